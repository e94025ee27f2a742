"""p22, norms, rotary embedding and two cache inserts of a main and an index branch, in TIRx.

CUDA: a thread block has one token, 16 threads a head, 8 values (16 bytes) a thread. The norm is a reduction over the
16; the partner of a rotated value is at the same place in another thread, one shuffle away. CPU: plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

INDEX_HEADS = 4
EPS = 1e-6
VECTOR = 8
EVERY_LANE = 0xFFFFFFFF


@T.jit
def fused_cuda(
    a: T.handle,
    w0: T.handle,
    w1: T.handle,
    w2: T.handle,
    w3: T.handle,
    po: T.handle,
    tb: T.handle,
    sl: T.handle,
    si: T.handle,
    kv: T.handle,
    ic: T.handle,
    qo: T.handle,
    io: T.handle,
    *,
    keys: T.constexpr,
    values: T.constexpr,
    index_queries: T.constexpr,
    index_key: T.constexpr,
    kv_heads: T.constexpr,
    size: T.constexpr,
    rotary: T.constexpr,
    page: T.constexpr,
    lanes: T.constexpr,
    half_lanes: T.constexpr,
    threads: T.constexpr,
):
    """`keys` is the head where the keys begin, and so on; `lanes` threads a head, `half_lanes` a half that turns."""
    tokens = T.int32()
    pages = T.int32()
    index_pages = T.int32()
    rows = T.int32()
    qkv = T.match_buffer(a, (tokens, index_key + 1, size), "bfloat16")
    q_weight = T.match_buffer(w0, (size,), "bfloat16")
    k_weight = T.match_buffer(w1, (size,), "bfloat16")
    index_q_weight = T.match_buffer(w2, (size,), "bfloat16")
    index_k_weight = T.match_buffer(w3, (size,), "bfloat16")
    positions = T.match_buffer(po, (tokens,), "int64")
    table = T.match_buffer(tb, (rows, rotary), "bfloat16")
    slots = T.match_buffer(sl, (tokens,), "int64")
    index_slots = T.match_buffer(si, (tokens,), "int64")
    kv_cache = T.match_buffer(kv, (pages, kv_heads, page, 2 * size), "bfloat16")
    index_cache = T.match_buffer(ic, (index_pages, page, size), "bfloat16")
    q = T.match_buffer(qo, (tokens, keys, size), "bfloat16")
    index_q = T.match_buffer(io, (tokens, INDEX_HEADS, size), "bfloat16")
    T.device_entry()
    token = T.cta_id([tokens])
    thread = T.thread_id([threads])
    x = T.alloc_local((VECTOR,), "bfloat16")
    w = T.alloc_local((VECTOR,), "bfloat16")
    cos = T.alloc_local((VECTOR,), "bfloat16")
    sin = T.alloc_local((VECTOR,), "bfloat16")
    y = T.alloc_local((VECTOR,), "float32")
    other = T.alloc_local((1,), "float32")
    total = T.alloc_local((1,), "float32")
    head = T.alloc_local((2,), "int32")
    lane = T.alloc_local((1,), "int32")
    slot = T.alloc_local((2,), "int32")
    position = T.alloc_local((1,), "int32")
    head[0] = thread // lanes
    head[1] = T.min(head[0], index_key)  # there may be threads of heads that do not exist
    lane[0] = thread % lanes
    slot[0] = T.cast(slots[token], "int32")
    slot[1] = T.cast(index_slots[token], "int32")
    position[0] = T.cast(positions[token], "int32")
    for e in T.vectorized(VECTOR):
        x[e] = qkv[token, head[1], lane[0] * VECTOR + e]
    if head[0] < keys:
        for e in T.vectorized(VECTOR):
            w[e] = q_weight[lane[0] * VECTOR + e]
    elif head[0] < values:
        for e in T.vectorized(VECTOR):
            w[e] = k_weight[lane[0] * VECTOR + e]
    elif head[0] < index_key:
        for e in T.vectorized(VECTOR):
            w[e] = index_q_weight[lane[0] * VECTOR + e]
    else:
        for e in T.vectorized(VECTOR):
            w[e] = index_k_weight[lane[0] * VECTOR + e]
    if head[0] < values or head[0] >= index_queries:
        for e in T.vectorized(VECTOR):
            cos[e] = table[position[0], (lane[0] % half_lanes) * VECTOR + e]
        for e in T.vectorized(VECTOR):
            sin[e] = table[position[0], (half_lanes + lane[0] % half_lanes) * VECTOR + e]
        total[0] = T.float32(0)
        for e in T.unroll(VECTOR):
            y[e] = T.cast(x[e], "float32")
            total[0] = total[0] + y[e] * y[e]
        total[0] = T.cuda.warp_sum(total[0], lanes)
        total[0] = T.rsqrt(total[0] / T.float32(size) + T.float32(EPS))
        for e in T.unroll(VECTOR):
            y[e] = y[e] * total[0] * (T.float32(1) + T.cast(w[e], "float32"))
            # Every thread of the warp takes part in the shuffle, also those whose values do not turn.
            other[0] = T.cuda.__shfl_xor_sync(T.uint32(EVERY_LANE), y[e], half_lanes, 32)
            if lane[0] < half_lanes:
                y[e] = y[e] * T.cast(cos[e], "float32") - other[0] * T.cast(sin[e], "float32")
            elif lane[0] < 2 * half_lanes:
                y[e] = y[e] * T.cast(cos[e], "float32") + other[0] * T.cast(sin[e], "float32")
            x[e] = T.cast(y[e], "bfloat16")
    if head[0] < keys:
        for e in T.vectorized(VECTOR):
            q[token, head[0], lane[0] * VECTOR + e] = x[e]
    elif head[0] < values:
        for e in T.vectorized(VECTOR):
            kv_cache[slot[0] // page, head[0] - keys, slot[0] % page, lane[0] * VECTOR + e] = x[e]
    elif head[0] < index_queries:
        for e in T.vectorized(VECTOR):
            kv_cache[slot[0] // page, head[0] - values, slot[0] % page, size + lane[0] * VECTOR + e] = x[e]
    elif head[0] < index_key:
        for e in T.vectorized(VECTOR):
            index_q[token, head[0] - index_queries, lane[0] * VECTOR + e] = x[e]
    elif head[0] == index_key:
        for e in T.vectorized(VECTOR):
            index_cache[slot[1] // page, slot[1] % page, lane[0] * VECTOR + e] = x[e]


@T.jit
def turned_cpu(
    a: T.handle,
    w: T.handle,
    po: T.handle,
    tb: T.handle,
    o: T.handle,
    *,
    heads: T.constexpr,
    size: T.constexpr,
    rotary: T.constexpr,
):
    """Heads of one kind, normalised and turned."""
    tokens = T.int32()
    rows = T.int32()
    source = T.match_buffer(a, (tokens, heads, size), "bfloat16")
    weight = T.match_buffer(w, (size,), "bfloat16")
    positions = T.match_buffer(po, (tokens,), "int64")
    table = T.match_buffer(tb, (rows, rotary), "bfloat16")
    out = T.match_buffer(o, (tokens, heads, size), "bfloat16")
    y = T.alloc_buffer((size,), "float32", scope="local")
    total = T.alloc_buffer((1,), "float32", scope="local")
    first = T.alloc_buffer((1,), "float32", scope="local")
    for token, head in T.grid(tokens, heads):
        total[0] = T.float32(0)
        for c in T.serial(size):
            y[c] = T.cast(source[token, head, c], "float32")
            total[0] = total[0] + y[c] * y[c]
        total[0] = T.float32(1) / T.sqrt(total[0] / T.float32(size) + T.float32(EPS))
        for c in T.serial(size):
            y[c] = y[c] * total[0] * (T.float32(1) + T.cast(weight[c], "float32"))
        for c in T.serial(rotary // 2):
            first[0] = y[c]
            y[c] = y[c] * T.cast(table[positions[token], c], "float32") - y[c + rotary // 2] * T.cast(
                table[positions[token], c + rotary // 2], "float32"
            )
            y[c + rotary // 2] = y[c + rotary // 2] * T.cast(table[positions[token], c], "float32") + first[0] * T.cast(
                table[positions[token], c + rotary // 2], "float32"
            )
        for c in T.serial(size):
            out[token, head, c] = T.cast(y[c], "bfloat16")


def compile_for(
    arch: str, query_heads: int = 16, kv_heads: int = 4, size: int = 128, rotary: int = 64, page: int = 64
) -> tvm.runtime.Executable:
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    # Whole warps must lie within a kind of head.
    assert all(count * size % (32 * VECTOR) == 0 for count in (query_heads, kv_heads, INDEX_HEADS))
    lanes, values = size // VECTOR, query_heads + kv_heads
    index_key = values + kv_heads + INDEX_HEADS
    kernel = fused_cuda.specialize(
        keys=query_heads,
        values=values,
        index_queries=values + kv_heads,
        index_key=index_key,
        kv_heads=kv_heads,
        size=size,
        rotary=rotary,
        page=page,
        lanes=lanes,
        half_lanes=rotary // 2 // VECTOR,
        threads=-(-(index_key + 1) * lanes // 32) * 32,
    )
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx")


@cache
def cuda_kernel(device: torch.device, query_heads: int, kv_heads: int, size: int, rotary: int, page: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", query_heads, kv_heads, size, rotary, page)["main"]


@cache
def cpu_kernel(heads: int, size: int, rotary: int):
    kernel = turned_cpu.specialize(heads=heads, size=size, rotary=rotary)
    return tvm.compile(tvm.IRModule({"main": kernel}), target="llvm")["main"]


def turned(x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    cpu_kernel(x.shape[1], x.shape[2], table.shape[1])(x, weight, positions, table, out)
    return out


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
    if qkv.is_cuda:
        q = torch.empty(len(qkv), query_heads, size, dtype=qkv.dtype, device=qkv.device)
        index_q = torch.empty(len(qkv), INDEX_HEADS, size, dtype=qkv.dtype, device=qkv.device)
        kernel = cuda_kernel(qkv.device, query_heads, kv_heads, size, cos_sin_cache.shape[1], page)
        kernel(
            *(heads, q_norm_weight, k_norm_weight, index_q_norm_weight, index_k_norm_weight, positions, cos_sin_cache),
            *(slot_mapping, index_slot_mapping, kv_cache, index_cache, q, index_q),
        )
        return q, index_q, kv_cache, index_cache
    q, k, v, index_q, index_k = torch.split(heads, [query_heads, kv_heads, kv_heads, INDEX_HEADS, 1], dim=1)
    q = turned(q, q_norm_weight, positions, cos_sin_cache)
    k = turned(k, k_norm_weight, positions, cos_sin_cache)
    index_q = turned(index_q, index_q_norm_weight, positions, cos_sin_cache)
    index_k = turned(index_k, index_k_norm_weight, positions, cos_sin_cache)
    kv_cache[slot_mapping // page, :, slot_mapping % page] = torch.cat([k, v], dim=-1)
    index_cache[index_slot_mapping // page, index_slot_mapping % page] = index_k[:, 0]
    return q, index_q, kv_cache, index_cache
