"""p19, query and key norm, rotary embedding and cache write, in TIRx.

CUDA: a thread block has one token, 16 threads a head, 8 values (16 bytes) a thread. The norm is a reduction over the
16; the partner of a rotated value is at the same place in another thread, one shuffle away. CPU: plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

VECTOR = 8
EVERY_LANE = 0xFFFFFFFF


@T.jit
def fused_cuda(
    a: T.handle,
    po: T.handle,
    qw: T.handle,
    kw: T.handle,
    tb: T.handle,
    sl: T.handle,
    kv: T.handle,
    eps: T.float32,
    qo: T.handle,
    *,
    query_heads: T.constexpr,
    kv_heads: T.constexpr,
    size: T.constexpr,
    rotary: T.constexpr,
    page: T.constexpr,
    lanes: T.constexpr,
    half_lanes: T.constexpr,
):
    """`lanes` threads a head, `half_lanes` threads for the half of what is rotated."""
    tokens = T.int32()
    pages = T.int32()
    rows = T.int32()
    qkv = T.match_buffer(a, (tokens, query_heads + 2 * kv_heads, size), "bfloat16")
    positions = T.match_buffer(po, (tokens,), "int64")
    q_weight = T.match_buffer(qw, (size,), "bfloat16")
    k_weight = T.match_buffer(kw, (size,), "bfloat16")
    table = T.match_buffer(tb, (rows, rotary), "bfloat16")
    slots = T.match_buffer(sl, (tokens,), "int64")
    kv_cache = T.match_buffer(kv, (2, pages, page, kv_heads, size), "bfloat16")
    q = T.match_buffer(qo, (tokens, query_heads, size), "bfloat16")
    T.device_entry()
    token = T.cta_id([tokens])
    thread = T.thread_id([(query_heads + 2 * kv_heads) * lanes])
    x = T.alloc_local((VECTOR,), "bfloat16")
    w = T.alloc_local((VECTOR,), "bfloat16")
    cos = T.alloc_local((VECTOR,), "bfloat16")
    sin = T.alloc_local((VECTOR,), "bfloat16")
    y = T.alloc_local((VECTOR,), "float32")
    other = T.alloc_local((1,), "float32")
    total = T.alloc_local((1,), "float32")
    head = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    slot = T.alloc_local((1,), "int32")
    position = T.alloc_local((1,), "int32")
    head[0] = thread // lanes
    lane[0] = thread % lanes
    slot[0] = T.cast(slots[token], "int32")
    position[0] = T.cast(positions[token], "int32")
    for e in T.vectorized(VECTOR):
        x[e] = qkv[token, head[0], lane[0] * VECTOR + e]
    if head[0] < query_heads + kv_heads:
        if head[0] < query_heads:
            for e in T.vectorized(VECTOR):
                w[e] = q_weight[lane[0] * VECTOR + e]
        else:
            for e in T.vectorized(VECTOR):
                w[e] = k_weight[lane[0] * VECTOR + e]
        for e in T.vectorized(VECTOR):
            cos[e] = table[position[0], (lane[0] % half_lanes) * VECTOR + e]
        for e in T.vectorized(VECTOR):
            sin[e] = table[position[0], (half_lanes + lane[0] % half_lanes) * VECTOR + e]
        total[0] = T.float32(0)
        for e in T.unroll(VECTOR):
            y[e] = T.cast(x[e], "float32")
            total[0] = total[0] + y[e] * y[e]
        total[0] = T.cuda.warp_sum(total[0], lanes)
        total[0] = T.rsqrt(total[0] / T.float32(size) + eps)
        for e in T.unroll(VECTOR):
            y[e] = y[e] * total[0] * T.cast(w[e], "float32")
            # Every thread of the warp takes part in the shuffle, also those whose values do not turn.
            other[0] = T.cuda.__shfl_xor_sync(T.uint32(EVERY_LANE), y[e], half_lanes, 32)
            if lane[0] < half_lanes:
                y[e] = y[e] * T.cast(cos[e], "float32") - other[0] * T.cast(sin[e], "float32")
            elif lane[0] < 2 * half_lanes:
                y[e] = y[e] * T.cast(cos[e], "float32") + other[0] * T.cast(sin[e], "float32")
            x[e] = T.cast(y[e], "bfloat16")
    if head[0] < query_heads:
        for e in T.vectorized(VECTOR):
            q[token, head[0], lane[0] * VECTOR + e] = x[e]
    elif slot[0] >= 0:
        if head[0] < query_heads + kv_heads:
            for e in T.vectorized(VECTOR):
                kv_cache[0, slot[0] // page, slot[0] % page, head[0] - query_heads, lane[0] * VECTOR + e] = x[e]
        else:
            for e in T.vectorized(VECTOR):
                kv_cache[1, slot[0] // page, slot[0] % page, head[0] - query_heads - kv_heads, lane[0] * VECTOR + e] = (
                    x[e]
                )


@T.jit
def fused_cpu(
    a: T.handle,
    po: T.handle,
    qw: T.handle,
    kw: T.handle,
    tb: T.handle,
    sl: T.handle,
    kv: T.handle,
    eps: T.float32,
    qo: T.handle,
    *,
    query_heads: T.constexpr,
    kv_heads: T.constexpr,
    size: T.constexpr,
    rotary: T.constexpr,
    page: T.constexpr,
):
    tokens = T.int32()
    pages = T.int32()
    rows = T.int32()
    qkv = T.match_buffer(a, (tokens, query_heads + 2 * kv_heads, size), "bfloat16")
    positions = T.match_buffer(po, (tokens,), "int64")
    q_weight = T.match_buffer(qw, (size,), "bfloat16")
    k_weight = T.match_buffer(kw, (size,), "bfloat16")
    table = T.match_buffer(tb, (rows, rotary), "bfloat16")
    slots = T.match_buffer(sl, (tokens,), "int64")
    kv_cache = T.match_buffer(kv, (2, pages, page, kv_heads, size), "bfloat16")
    q = T.match_buffer(qo, (tokens, query_heads, size), "bfloat16")
    y = T.alloc_buffer((size,), "float32", scope="local")
    first = T.alloc_buffer((1,), "float32", scope="local")
    total = T.alloc_buffer((1,), "float32", scope="local")
    slot = T.alloc_buffer((1,), "int32", scope="local")
    position = T.alloc_buffer((1,), "int32", scope="local")
    for token, head in T.grid(tokens, query_heads + kv_heads):
        slot[0] = T.cast(slots[token], "int32")
        position[0] = T.cast(positions[token], "int32")
        total[0] = T.float32(0)
        for c in T.serial(size):
            y[c] = T.cast(qkv[token, head, c], "float32")
            total[0] = total[0] + y[c] * y[c]
        total[0] = T.float32(1) / T.sqrt(total[0] / T.float32(size) + eps)
        for c in T.serial(size):
            if head < query_heads:
                y[c] = y[c] * total[0] * T.cast(q_weight[c], "float32")
            else:
                y[c] = y[c] * total[0] * T.cast(k_weight[c], "float32")
        for c in T.serial(rotary // 2):
            first[0] = y[c]
            y[c] = y[c] * T.cast(table[position[0], c], "float32") - y[c + rotary // 2] * T.cast(
                table[position[0], c + rotary // 2], "float32"
            )
            y[c + rotary // 2] = y[c + rotary // 2] * T.cast(table[position[0], c], "float32") + first[0] * T.cast(
                table[position[0], c + rotary // 2], "float32"
            )
        if head < query_heads:
            for c in T.serial(size):
                q[token, head, c] = T.cast(y[c], "bfloat16")
        elif slot[0] >= 0:
            for c in T.serial(size):
                kv_cache[0, slot[0] // page, slot[0] % page, head - query_heads, c] = T.cast(y[c], "bfloat16")
                kv_cache[1, slot[0] // page, slot[0] % page, head - query_heads, c] = qkv[token, head + kv_heads, c]


def compile_for(
    arch: str, query_heads: int = 32, kv_heads: int = 8, size: int = 128, rotary: int = 64, page: int = 16
) -> tvm.runtime.Executable:
    """The kernel for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    sizes = {"query_heads": query_heads, "kv_heads": kv_heads, "size": size, "rotary": rotary, "page": page}
    if arch == "llvm":
        return tvm.compile(tvm.IRModule({"main": fused_cpu.specialize(**sizes)}), target="llvm")
    # Whole warps must lie within a kind of head, and within one half or another of what turns.
    assert query_heads * size % (32 * VECTOR) == 0 and kv_heads * size % (32 * VECTOR) == 0
    kernel = fused_cuda.specialize(**sizes, lanes=size // VECTOR, half_lanes=rotary // 2 // VECTOR)
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx")


@cache
def kernel_for(device: torch.device, query_heads: int, kv_heads: int, size: int, rotary: int, page: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return compile_for(arch, query_heads, kv_heads, size, rotary, page)["main"]


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
