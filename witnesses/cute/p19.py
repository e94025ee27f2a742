"""p19, query and key norm, rotary embedding and cache write, in CuTe DSL.

A thread block has one token, 16 threads a head, 8 values (16 bytes) a thread. The norm is a reduction over the 16; the
partner of a rotated value is at the same place in another thread, one shuffle away. Values are moved as they are.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

VECTOR = 8  # bfloat16 values in 16 bytes


@cute.jit
def norm_and_rotate(
    x: cute.Tensor, weight: cute.Tensor, table_row: cute.Tensor, lane: cutlass.Int32, eps: cutlass.Float32
):
    """The 8 values of this thread, replaced by the result; `table_row` holds the cosines, then the sines."""
    size, half = cutlass.const_expr(weight.shape[0]), cutlass.const_expr(table_row.shape[0] // 2)
    lanes, half_lanes = cutlass.const_expr(size // VECTOR), cutlass.const_expr(half // VECTOR)
    w = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    cos = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    sin = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    y = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    cute.autovec_copy(cute.local_tile(weight, (VECTOR,), (lane,)), w)
    place = lane % half_lanes
    cute.autovec_copy(cute.local_tile(table_row, (VECTOR,), (place,)), cos)
    cute.autovec_copy(cute.local_tile(table_row, (VECTOR,), (half_lanes + place,)), sin)
    values = x.load().to(cutlass.Float32)
    total = (values * values).reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
    total = cute.arch.warp_reduction_sum(total, threads_in_group=lanes)
    y.store(values * cute.math.rsqrt(total / size + eps) * w.load().to(cutlass.Float32))
    for e in cutlass.range_constexpr(VECTOR):
        # Every thread of the warp takes part in the shuffle, also those whose values do not turn.
        other = cute.arch.shuffle_sync_bfly(y[e], offset=half_lanes)
        c, s = cos[e].to(cutlass.Float32), sin[e].to(cutlass.Float32)
        if lane < half_lanes:
            y[e] = y[e] * c - other * s
        elif lane < 2 * half_lanes:
            y[e] = y[e] * c + other * s
    x.store(y.load().to(cutlass.BFloat16))


@cute.kernel
def fused_kernel(
    qkv: cute.Tensor,
    positions: cute.Tensor,
    q_weight: cute.Tensor,
    k_weight: cute.Tensor,
    table: cute.Tensor,
    slots: cute.Tensor,
    kv_cache: cute.Tensor,
    eps: cutlass.Float32,
    q: cute.Tensor,
):
    thread, _, _ = cute.arch.thread_idx()
    token, _, _ = cute.arch.block_idx()
    page = cutlass.const_expr(kv_cache.shape[2])
    query_heads, kv_heads = cutlass.const_expr(q.shape[1]), cutlass.const_expr(kv_cache.shape[3])
    lanes = cutlass.const_expr(q.shape[2] // VECTOR)
    head, lane = thread // lanes, thread % lanes
    slot = slots[token].to(cutlass.Int32)
    position = positions[token].to(cutlass.Int32)
    x = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    cute.autovec_copy(cute.local_tile(qkv[token, head, None], (VECTOR,), (lane,)), x)
    if head < query_heads:
        norm_and_rotate(x, q_weight, table[position, None], lane, eps)
        cute.autovec_copy(x, cute.local_tile(q[token, head, None], (VECTOR,), (lane,)))
    elif head < query_heads + kv_heads:
        norm_and_rotate(x, k_weight, table[position, None], lane, eps)
        if slot >= 0:
            target = kv_cache[0, slot // page, slot % page, head - query_heads, None]
            cute.autovec_copy(x, cute.local_tile(target, (VECTOR,), (lane,)))
    elif slot >= 0:
        target = kv_cache[1, slot // page, slot % page, head - query_heads - kv_heads, None]
        cute.autovec_copy(x, cute.local_tile(target, (VECTOR,), (lane,)))


@cute.jit
def fused(
    qkv: cute.Tensor,
    positions: cute.Tensor,
    q_weight: cute.Tensor,
    k_weight: cute.Tensor,
    table: cute.Tensor,
    slots: cute.Tensor,
    kv_cache: cute.Tensor,
    eps: cutlass.Float32,
    q: cute.Tensor,
    stream,
):
    threads = cutlass.const_expr(qkv.shape[1] * (qkv.shape[2] // VECTOR))
    fused_kernel(qkv, positions, q_weight, k_weight, table, slots, kv_cache, eps, q).launch(
        grid=(qkv.shape[0], 1, 1), block=(threads, 1, 1), stream=stream
    )


def compile_for(arch: str, query_heads: int = 32, kv_heads: int = 8, size: int = 128, rotary: int = 64, page: int = 16):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU. Whole warps must lie within a kind of head."""
    assert query_heads * size % (32 * VECTOR) == 0 and kv_heads * size % (32 * VECTOR) == 0
    tokens, pages, table_rows = cute.sym_int(), cute.sym_int(), cute.sym_int()

    def fake(dtype, *shape: int):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    return cute.compile(
        fused,
        fake(cutlass.BFloat16, tokens, query_heads + 2 * kv_heads, size),
        fake(cutlass.Int64, tokens),
        fake(cutlass.BFloat16, size),
        fake(cutlass.BFloat16, size),
        fake(cutlass.BFloat16, table_rows, rotary),
        fake(cutlass.Int64, tokens),
        fake(cutlass.BFloat16, 2, pages, page, kv_heads, size),
        cutlass.Float32(0.0),
        fake(cutlass.BFloat16, tokens, query_heads, size),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, query_heads: int, kv_heads: int, size: int, rotary: int, page: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", query_heads, kv_heads, size, rotary, page)


def solve(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    page, kv_heads, size = kv_cache.shape[2:]
    heads = qkv.view(len(qkv), -1, size)
    query_heads = heads.shape[1] - 2 * kv_heads
    q = torch.empty(len(qkv), query_heads, size, dtype=qkv.dtype, device=qkv.device)
    kernel = kernel_for(qkv.device, query_heads, kv_heads, size, cos_sin_cache.shape[1], page)
    kernel(heads, positions, q_norm_weight, k_norm_weight, cos_sin_cache, slot_mapping, kv_cache, eps, q)
    return q, kv_cache
