"""p20, prologue of latent attention, in TIRx. The query's product stays with eager PyTorch.

One kernel then turns the positional part of every head of the product where it lies, and writes the token's latent and
its turned key into the cache. CUDA: a thread block has one token; a thread turns 8 values and their 8 partners, or
moves 8. CPU: plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

VECTOR = 8
HEADS = 16


def turned(x, partner, cos, sin, sign):
    """One bfloat16 value of a turned vector, as an expression."""
    x, partner, cos, sin = (T.cast(value, "float32") for value in (x, partner, cos, sin))
    return T.cast(x * cos + T.float32(sign) * partner * sin, "bfloat16")


@T.jit
def fused_cuda(
    qh: T.handle,
    qkv: T.handle,
    po: T.handle,
    tb: T.handle,
    sl: T.handle,
    kv: T.handle,
    *,
    rank: T.constexpr,
    latent: T.constexpr,
    plain: T.constexpr,
    rotary: T.constexpr,
    half_lanes: T.constexpr,
    query_threads: T.constexpr,
    latent_lanes: T.constexpr,
    threads: T.constexpr,
):
    tokens = T.int32()
    places = T.int32()
    rows = T.int32()
    q = T.match_buffer(qh, (tokens, HEADS, plain + rotary), "bfloat16")
    qkv_lora = T.match_buffer(qkv, (tokens, rank + latent + rotary), "bfloat16")
    positions = T.match_buffer(po, (tokens,), "int64")
    table = T.match_buffer(tb, (rows, rotary), "bfloat16")
    slots = T.match_buffer(sl, (tokens,), "int64")
    kv_cache = T.match_buffer(kv, (places, latent + rotary), "bfloat16")
    T.device_entry()
    token = T.cta_id([tokens])
    thread = T.thread_id([threads])
    a = T.alloc_local((VECTOR,), "bfloat16")
    b = T.alloc_local((VECTOR,), "bfloat16")
    c = T.alloc_local((VECTOR,), "bfloat16")
    d = T.alloc_local((VECTOR,), "bfloat16")
    cos = T.alloc_local((VECTOR,), "bfloat16")
    sin = T.alloc_local((VECTOR,), "bfloat16")
    head = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    slot = T.alloc_local((1,), "int32")
    position = T.alloc_local((1,), "int32")
    slot[0] = T.cast(slots[token], "int32")
    position[0] = T.cast(positions[token], "int32")
    head[0] = thread // half_lanes
    lane[0] = thread % half_lanes
    if thread < query_threads + half_lanes:
        for e in T.vectorized(VECTOR):
            cos[e] = table[position[0], lane[0] * VECTOR + e]
        for e in T.vectorized(VECTOR):
            sin[e] = table[position[0], rotary // 2 + lane[0] * VECTOR + e]
        if thread < query_threads:
            for e in T.vectorized(VECTOR):
                a[e] = q[token, head[0], plain + lane[0] * VECTOR + e]
            for e in T.vectorized(VECTOR):
                b[e] = q[token, head[0], plain + rotary // 2 + lane[0] * VECTOR + e]
        else:
            for e in T.vectorized(VECTOR):
                a[e] = qkv_lora[token, rank + latent + lane[0] * VECTOR + e]
            for e in T.vectorized(VECTOR):
                b[e] = qkv_lora[token, rank + latent + rotary // 2 + lane[0] * VECTOR + e]
        for e in T.unroll(VECTOR):
            c[e] = turned(a[e], b[e], cos[e], sin[e], -1.0)
            d[e] = turned(b[e], a[e], cos[e], sin[e], 1.0)
        if thread < query_threads:
            for e in T.vectorized(VECTOR):
                q[token, head[0], plain + lane[0] * VECTOR + e] = c[e]
            for e in T.vectorized(VECTOR):
                q[token, head[0], plain + rotary // 2 + lane[0] * VECTOR + e] = d[e]
        elif slot[0] >= 0:
            for e in T.vectorized(VECTOR):
                kv_cache[slot[0], latent + lane[0] * VECTOR + e] = c[e]
            for e in T.vectorized(VECTOR):
                kv_cache[slot[0], latent + rotary // 2 + lane[0] * VECTOR + e] = d[e]
    else:
        lane[0] = thread - query_threads - half_lanes
        if lane[0] < latent_lanes and slot[0] >= 0:
            for e in T.vectorized(VECTOR):
                a[e] = qkv_lora[token, rank + lane[0] * VECTOR + e]
            for e in T.vectorized(VECTOR):
                kv_cache[slot[0], lane[0] * VECTOR + e] = a[e]


@T.jit
def fused_cpu(
    qh: T.handle,
    qkv: T.handle,
    po: T.handle,
    tb: T.handle,
    sl: T.handle,
    kv: T.handle,
    *,
    rank: T.constexpr,
    latent: T.constexpr,
    plain: T.constexpr,
    rotary: T.constexpr,
):
    tokens = T.int32()
    places = T.int32()
    rows = T.int32()
    q = T.match_buffer(qh, (tokens, HEADS, plain + rotary), "bfloat16")
    qkv_lora = T.match_buffer(qkv, (tokens, rank + latent + rotary), "bfloat16")
    positions = T.match_buffer(po, (tokens,), "int64")
    table = T.match_buffer(tb, (rows, rotary), "bfloat16")
    slots = T.match_buffer(sl, (tokens,), "int64")
    kv_cache = T.match_buffer(kv, (places, latent + rotary), "bfloat16")
    first = T.alloc_buffer((2,), "bfloat16", scope="local")
    slot = T.alloc_buffer((1,), "int32", scope="local")
    position = T.alloc_buffer((1,), "int32", scope="local")
    for token in T.serial(tokens):
        slot[0] = T.cast(slots[token], "int32")
        position[0] = T.cast(positions[token], "int32")
        for head, i in T.grid(HEADS, rotary // 2):
            first[0] = q[token, head, plain + i]
            first[1] = q[token, head, plain + rotary // 2 + i]
            q[token, head, plain + i] = turned(
                first[0], first[1], table[position[0], i], table[position[0], rotary // 2 + i], -1.0
            )
            q[token, head, plain + rotary // 2 + i] = turned(
                first[1], first[0], table[position[0], i], table[position[0], rotary // 2 + i], 1.0
            )
        if slot[0] >= 0:
            for i in T.serial(latent):
                kv_cache[slot[0], i] = qkv_lora[token, rank + i]
            for i in T.serial(rotary // 2):
                first[0] = qkv_lora[token, rank + latent + i]
                first[1] = qkv_lora[token, rank + latent + rotary // 2 + i]
                kv_cache[slot[0], latent + i] = turned(
                    first[0], first[1], table[position[0], i], table[position[0], rotary // 2 + i], -1.0
                )
                kv_cache[slot[0], latent + rotary // 2 + i] = turned(
                    first[1], first[0], table[position[0], i], table[position[0], rotary // 2 + i], 1.0
                )


def compile_for(
    arch: str, rank: int = 1536, latent: int = 512, plain: int = 128, rotary: int = 64
) -> tvm.runtime.Executable:
    """The kernel for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    sizes = {"rank": rank, "latent": latent, "plain": plain, "rotary": rotary}
    if arch == "llvm":
        return tvm.compile(tvm.IRModule({"main": fused_cpu.specialize(**sizes)}), target="llvm")
    half_lanes, latent_lanes = rotary // 2 // VECTOR, latent // VECTOR
    threads = (HEADS + 1) * half_lanes + latent_lanes
    kernel = fused_cuda.specialize(
        **sizes,
        half_lanes=half_lanes,
        query_threads=HEADS * half_lanes,
        latent_lanes=latent_lanes,
        threads=-(-threads // 32) * 32,
    )
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx")


@cache
def kernel_for(device: torch.device, rank: int, latent: int, plain: int, rotary: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return compile_for(arch, rank, latent, plain, rotary)["main"]


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
