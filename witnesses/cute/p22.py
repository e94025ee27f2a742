"""p22, norms, rotary embedding and two cache inserts of a main and an index branch, in CuTe DSL.

A thread block has one token, 16 threads a head, 8 values (16 bytes) a thread. The norm is a reduction over the 16; the
partner of a rotated value is at the same place in another thread, one shuffle away. Values are moved as they are.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

INDEX_HEADS = 4
EPS = 1e-6
VECTOR = 8  # bfloat16 values in 16 bytes


@cute.jit
def norm_and_rotate(x: cute.Tensor, w: cute.Tensor, table_row: cute.Tensor, lane: cutlass.Int32, lanes):
    """The 8 values of this thread, replaced by the result; `table_row` holds the cosines, then the sines."""
    half_lanes = cutlass.const_expr(table_row.shape[0] // 2 // VECTOR)
    cos = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    sin = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    y = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    cute.autovec_copy(cute.local_tile(table_row, (VECTOR,), (lane % half_lanes,)), cos)
    cute.autovec_copy(cute.local_tile(table_row, (VECTOR,), (half_lanes + lane % half_lanes,)), sin)
    values = x.load().to(cutlass.Float32)
    total = (values * values).reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
    total = cute.arch.warp_reduction_sum(total, threads_in_group=lanes)
    y.store(values * cute.math.rsqrt(total / (lanes * VECTOR) + EPS) * (w.load().to(cutlass.Float32) + 1.0))
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
    weights: tuple[cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor],
    positions: cute.Tensor,
    table: cute.Tensor,
    slots: cute.Tensor,
    index_slots: cute.Tensor,
    kv_cache: cute.Tensor,
    index_cache: cute.Tensor,
    q: cute.Tensor,
    index_q: cute.Tensor,
):
    thread, _, _ = cute.arch.thread_idx()
    token, _, _ = cute.arch.block_idx()
    heads, size = cutlass.const_expr(qkv.shape[1]), cutlass.const_expr(qkv.shape[2])
    kv_heads, page = cutlass.const_expr(kv_cache.shape[1]), cutlass.const_expr(kv_cache.shape[2])
    lanes = cutlass.const_expr(size // VECTOR)
    keys = cutlass.const_expr(q.shape[1])  # where the keys begin, and so on
    values = cutlass.const_expr(keys + kv_heads)
    index_queries = cutlass.const_expr(values + kv_heads)
    index_key = cutlass.const_expr(heads - 1)
    head, lane = thread // lanes, thread % lanes  # there may be threads of heads that do not exist
    slot, index_slot = slots[token].to(cutlass.Int32), index_slots[token].to(cutlass.Int32)
    x = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    w = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    cute.autovec_copy(cute.local_tile(qkv[token, cutlass.min(head, index_key), None], (VECTOR,), (lane,)), x)
    if head < keys:
        cute.autovec_copy(cute.local_tile(weights[0], (VECTOR,), (lane,)), w)
    elif head < values:
        cute.autovec_copy(cute.local_tile(weights[1], (VECTOR,), (lane,)), w)
    elif head < index_key:
        cute.autovec_copy(cute.local_tile(weights[2], (VECTOR,), (lane,)), w)
    else:
        cute.autovec_copy(cute.local_tile(weights[3], (VECTOR,), (lane,)), w)
    if head < values or head >= index_queries:
        norm_and_rotate(x, w, table[positions[token].to(cutlass.Int32), None], lane, lanes)
    if head < keys:
        cute.autovec_copy(x, cute.local_tile(q[token, head, None], (VECTOR,), (lane,)))
    elif head < values:
        row = kv_cache[slot // page, head - keys, slot % page, None]
        cute.autovec_copy(x, cute.local_tile(row, (VECTOR,), (lane,)))
    elif head < index_queries:
        row = kv_cache[slot // page, head - values, slot % page, None]
        cute.autovec_copy(x, cute.local_tile(row, (VECTOR,), (lanes + lane,)))
    elif head < index_key:
        cute.autovec_copy(x, cute.local_tile(index_q[token, head - index_queries, None], (VECTOR,), (lane,)))
    elif head < heads:
        row = index_cache[index_slot // page, index_slot % page, None]
        cute.autovec_copy(x, cute.local_tile(row, (VECTOR,), (lane,)))


@cute.jit
def fused(
    qkv: cute.Tensor,
    q_weight: cute.Tensor,
    k_weight: cute.Tensor,
    index_q_weight: cute.Tensor,
    index_k_weight: cute.Tensor,
    positions: cute.Tensor,
    table: cute.Tensor,
    slots: cute.Tensor,
    index_slots: cute.Tensor,
    kv_cache: cute.Tensor,
    index_cache: cute.Tensor,
    q: cute.Tensor,
    index_q: cute.Tensor,
    stream,
):
    threads = cutlass.const_expr((qkv.shape[1] * (qkv.shape[2] // VECTOR) + 31) // 32 * 32)
    weights = (q_weight, k_weight, index_q_weight, index_k_weight)
    fused_kernel(qkv, weights, positions, table, slots, index_slots, kv_cache, index_cache, q, index_q).launch(
        grid=(qkv.shape[0], 1, 1), block=(threads, 1, 1), stream=stream
    )


def compile_for(arch: str, query_heads: int = 16, kv_heads: int = 4, size: int = 128, rotary: int = 64, page: int = 64):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU. Whole warps must lie within a kind of head."""
    assert all(count * size % (32 * VECTOR) == 0 for count in (query_heads, kv_heads, INDEX_HEADS))
    tokens, pages, index_pages, table_rows = (cute.sym_int() for _ in range(4))

    def fake(dtype, *shape: int):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    return cute.compile(
        fused,
        fake(cutlass.BFloat16, tokens, query_heads + 2 * kv_heads + INDEX_HEADS + 1, size),
        *(fake(cutlass.BFloat16, size) for _ in range(4)),
        fake(cutlass.Int64, tokens),
        fake(cutlass.BFloat16, table_rows, rotary),
        fake(cutlass.Int64, tokens),
        fake(cutlass.Int64, tokens),
        fake(cutlass.BFloat16, pages, kv_heads, page, 2 * size),
        fake(cutlass.BFloat16, index_pages, page, size),
        fake(cutlass.BFloat16, tokens, query_heads, size),
        fake(cutlass.BFloat16, tokens, INDEX_HEADS, size),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, query_heads: int, kv_heads: int, size: int, rotary: int, page: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", query_heads, kv_heads, size, rotary, page)


def solve(
    qkv: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    index_q_norm_weight: torch.Tensor,
    index_k_norm_weight: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    index_slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    index_cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    size, kv_heads, page = q_norm_weight.shape[0], kv_cache.shape[1], kv_cache.shape[2]
    heads = qkv.view(len(qkv), -1, size)
    query_heads = heads.shape[1] - 2 * kv_heads - INDEX_HEADS - 1
    q = torch.empty(len(qkv), query_heads, size, dtype=qkv.dtype, device=qkv.device)
    index_q = torch.empty(len(qkv), INDEX_HEADS, size, dtype=qkv.dtype, device=qkv.device)
    kernel = kernel_for(qkv.device, query_heads, kv_heads, size, cos_sin_cache.shape[1], page)
    kernel(
        *(heads, q_norm_weight, k_norm_weight, index_q_norm_weight, index_k_norm_weight, positions, cos_sin_cache),
        *(slot_mapping, index_slot_mapping, kv_cache, index_cache, q, index_q),
    )
    return q, index_q, kv_cache, index_cache
