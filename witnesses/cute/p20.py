"""p20, prologue of latent attention, in CuTe DSL. The query's product stays with eager PyTorch.

One kernel then turns the positional part of every head of the product where it lies, and writes the token's latent and
its turned key into the cache. A thread block has one token: a thread turns 8 values and their 8 partners, or moves 8.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

VECTOR = 8  # bfloat16 values in 16 bytes
HEADS = 16


@cute.jit
def rotate(
    source: cute.Tensor,
    target: cute.Tensor,
    table_row: cute.Tensor,
    lane: cutlass.Int32,
    source_start: cutlass.Constexpr[int],
    target_start: cutlass.Constexpr[int],
):
    """8 values of a row and their partners half the rotated width on, turned, to another row. Starts count by 8."""
    half = cutlass.const_expr(table_row.shape[0] // 2 // VECTOR)
    a = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    b = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    cos = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    sin = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    cute.autovec_copy(cute.local_tile(source, (VECTOR,), (source_start + lane,)), a)
    cute.autovec_copy(cute.local_tile(source, (VECTOR,), (source_start + half + lane,)), b)
    cute.autovec_copy(cute.local_tile(table_row, (VECTOR,), (lane,)), cos)
    cute.autovec_copy(cute.local_tile(table_row, (VECTOR,), (half + lane,)), sin)
    x, y = a.load().to(cutlass.Float32), b.load().to(cutlass.Float32)
    c, s = cos.load().to(cutlass.Float32), sin.load().to(cutlass.Float32)
    a.store((x * c - y * s).to(cutlass.BFloat16))
    b.store((y * c + x * s).to(cutlass.BFloat16))
    cute.autovec_copy(a, cute.local_tile(target, (VECTOR,), (target_start + lane,)))
    cute.autovec_copy(b, cute.local_tile(target, (VECTOR,), (target_start + half + lane,)))


@cute.kernel
def fused_kernel(
    q: cute.Tensor,
    qkv_lora: cute.Tensor,
    positions: cute.Tensor,
    table: cute.Tensor,
    slots: cute.Tensor,
    kv_cache: cute.Tensor,
):
    thread, _, _ = cute.arch.thread_idx()
    token, _, _ = cute.arch.block_idx()
    turning = cutlass.const_expr(table.shape[1] // VECTOR)  # all places counted in vectors
    plain = cutlass.const_expr(q.shape[2] // VECTOR - turning)
    latent = cutlass.const_expr(kv_cache.shape[1] // VECTOR - turning)
    rank = cutlass.const_expr(qkv_lora.shape[1] // VECTOR - latent - turning)
    half = cutlass.const_expr(turning // 2)
    query_threads = cutlass.const_expr(q.shape[1] * half)
    slot = slots[token].to(cutlass.Int32)
    table_row = table[positions[token].to(cutlass.Int32), None]
    if thread < query_threads:
        head = q[token, thread // half, None]
        rotate(head, head, table_row, thread % half, plain, plain)
    elif slot >= 0:
        lane = thread - query_threads
        if lane < half:
            rotate(qkv_lora[token, None], kv_cache[slot, None], table_row, lane, rank + latent, latent)
        elif lane < half + latent:
            x = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
            cute.autovec_copy(cute.local_tile(qkv_lora[token, None], (VECTOR,), (rank + lane - half,)), x)
            cute.autovec_copy(x, cute.local_tile(kv_cache[slot, None], (VECTOR,), (lane - half,)))


@cute.jit
def fused(
    q: cute.Tensor,
    qkv_lora: cute.Tensor,
    positions: cute.Tensor,
    table: cute.Tensor,
    slots: cute.Tensor,
    kv_cache: cute.Tensor,
    stream,
):
    half = cutlass.const_expr(table.shape[1] // VECTOR // 2)
    latent = cutlass.const_expr(kv_cache.shape[1] // VECTOR - 2 * half)
    threads = cutlass.const_expr((q.shape[1] + 1) * half + latent)
    fused_kernel(q, qkv_lora, positions, table, slots, kv_cache).launch(
        grid=(q.shape[0], 1, 1), block=((threads + 31) // 32 * 32, 1, 1), stream=stream
    )


def compile_for(arch: str, rank: int = 1536, latent: int = 512, plain: int = 128, rotary: int = 64):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    tokens, places, table_rows = cute.sym_int(), cute.sym_int(), cute.sym_int()

    def fake(dtype, *shape: int):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    return cute.compile(
        fused,
        fake(cutlass.BFloat16, tokens, HEADS, plain + rotary),
        fake(cutlass.BFloat16, tokens, rank + latent + rotary),
        fake(cutlass.Int64, tokens),
        fake(cutlass.BFloat16, table_rows, rotary),
        fake(cutlass.Int64, tokens),
        fake(cutlass.BFloat16, places, latent + rotary),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, rank: int, latent: int, plain: int, rotary: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", rank, latent, plain, rotary)


def solve(
    qkv_lora: torch.Tensor,
    q_b_weight: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    rank, rotary, entry = q_b_weight.shape[1], cos_sin_cache.shape[1], kv_cache.shape[-1]
    q = torch.mm(qkv_lora[:, :rank], q_b_weight.t()).view(len(qkv_lora), HEADS, -1)
    kernel = kernel_for(q.device, rank, entry - rotary, q.shape[-1] - rotary, rotary)
    kernel(q, qkv_lora, positions, cos_sin_cache, slot_mapping, kv_cache.view(-1, entry))
    return q, kv_cache
