"""p73, the gated delta rule over draft tokens from pooled states, in TIRx.

A row of the state (one value channel, all key channels) needs nothing of the other rows. CUDA: it is read once and
stays in registers over the draft; 8 threads share it, 16 values each, and a thread block has 32 rows of one value head.
All sums of a token are taken before its update, so that they cross the threads together: with the decayed state d, the
answer (d + c k)·q is d·q + c (k·q), where c is the correction. The pool is handed back as it is. CPU: the rule as it is
stated.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

VECTOR = 4
LANES = 8  # threads that share a row of the state
ROWS = 32


def float32(x):
    return T.cast(x, "float32")


def decay_of(log_rate, gate, bias):
    """exp(-exp(log_rate) · softplus(gate + bias)), as an expression."""
    raw = float32(gate) + bias
    step = T.max(raw, T.float32(0)) + T.log1p(T.exp(-T.abs(raw)))
    return T.exp(-T.exp(log_rate) * step)


def sigmoid(x):
    return T.float32(1) / (T.float32(1) + T.exp(-float32(x)))


@T.jit
def draft_cuda(
    qh: T.handle,
    kh: T.handle,
    vh: T.handle,
    po: T.handle,
    pl: T.handle,
    lr: T.handle,
    ga: T.handle,
    gb: T.handle,
    st: T.handle,
    scale: T.float32,
    o: T.handle,
    *,
    tokens: T.constexpr,
    query_heads: T.constexpr,
    key_heads: T.constexpr,
    heads: T.constexpr,
    size: T.constexpr,
    chunks: T.constexpr,
):
    batch = T.int32()
    states = T.int32()
    query = T.match_buffer(qh, (batch, tokens, query_heads, size), "bfloat16")
    key = T.match_buffer(kh, (batch, tokens, key_heads, size), "bfloat16")
    value = T.match_buffer(vh, (batch, tokens, heads, size), "bfloat16")
    pool = T.match_buffer(po, (states, heads, size, size), "float32")
    places = T.match_buffer(pl, (batch,), "int32")
    log_rate = T.match_buffer(lr, (heads,), "float32")
    gate = T.match_buffer(ga, (batch, tokens, heads), "bfloat16")
    gate_bias = T.match_buffer(gb, (heads,), "float32")
    strength = T.match_buffer(st, (batch, tokens, heads), "bfloat16")
    out = T.match_buffer(o, (batch, tokens, heads, size), "bfloat16")
    T.device_entry()
    part, head, request = T.cta_id([size // ROWS, heads, batch])
    thread = T.thread_id([ROWS * LANES])
    row = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    place = T.alloc_local((1,), "int32")
    x = T.alloc_local((chunks, VECTOR), "float32")
    ks = T.alloc_local((chunks, VECTOR), "bfloat16")
    qs = T.alloc_local((chunks, VECTOR), "bfloat16")
    decay = T.alloc_local((1,), "float32")
    sums = T.alloc_local((3,), "float32")  # d·k, d·q, k·q
    correction = T.alloc_local((1,), "float32")
    row[0] = part * ROWS + thread // LANES
    lane[0] = thread % LANES
    place[0] = places[request]
    for c in T.unroll(chunks):
        for e in T.vectorized(VECTOR):
            x[c, e] = pool[place[0], head, row[0], (c * LANES + lane[0]) * VECTOR + e]
    for token in T.unroll(tokens):
        for c in T.unroll(chunks):
            for e in T.vectorized(VECTOR):
                ks[c, e] = key[request, token, head // (heads // key_heads), (c * LANES + lane[0]) * VECTOR + e]
            for e in T.vectorized(VECTOR):
                qs[c, e] = query[request, token, head // (heads // query_heads), (c * LANES + lane[0]) * VECTOR + e]
        decay[0] = decay_of(log_rate[head], gate[request, token, head], gate_bias[head])
        for i in T.unroll(3):
            sums[i] = T.float32(0)
        for c in T.unroll(chunks):
            for e in T.unroll(VECTOR):
                x[c, e] = x[c, e] * decay[0]
                sums[0] = sums[0] + x[c, e] * float32(ks[c, e])
                sums[1] = sums[1] + x[c, e] * float32(qs[c, e])
                sums[2] = sums[2] + float32(ks[c, e]) * float32(qs[c, e])
        for i in T.unroll(3):
            sums[i] = T.cuda.warp_sum(sums[i], LANES)
        correction[0] = sigmoid(strength[request, token, head]) * (
            float32(value[request, token, head, row[0]]) - sums[0]
        )
        for c in T.unroll(chunks):
            for e in T.unroll(VECTOR):
                x[c, e] = x[c, e] + float32(ks[c, e]) * correction[0]
        if lane[0] == 0:
            out[request, token, head, row[0]] = T.cast((sums[1] + correction[0] * sums[2]) * scale, "bfloat16")


@T.jit
def draft_cpu(
    qh: T.handle,
    kh: T.handle,
    vh: T.handle,
    po: T.handle,
    pl: T.handle,
    lr: T.handle,
    ga: T.handle,
    gb: T.handle,
    st: T.handle,
    scale: T.float32,
    o: T.handle,
    *,
    tokens: T.constexpr,
    query_heads: T.constexpr,
    key_heads: T.constexpr,
    heads: T.constexpr,
    size: T.constexpr,
):
    batch = T.int32()
    states = T.int32()
    query = T.match_buffer(qh, (batch, tokens, query_heads, size), "bfloat16")
    key = T.match_buffer(kh, (batch, tokens, key_heads, size), "bfloat16")
    value = T.match_buffer(vh, (batch, tokens, heads, size), "bfloat16")
    pool = T.match_buffer(po, (states, heads, size, size), "float32")
    places = T.match_buffer(pl, (batch,), "int32")
    log_rate = T.match_buffer(lr, (heads,), "float32")
    gate = T.match_buffer(ga, (batch, tokens, heads), "bfloat16")
    gate_bias = T.match_buffer(gb, (heads,), "float32")
    strength = T.match_buffer(st, (batch, tokens, heads), "bfloat16")
    out = T.match_buffer(o, (batch, tokens, heads, size), "bfloat16")
    x = T.alloc_buffer((size,), "float32", scope="local")
    sums = T.alloc_buffer((2,), "float32", scope="local")
    for request, head, row in T.grid(batch, heads, size):
        for c in T.serial(size):
            x[c] = pool[places[request], head, row, c]
        for token in T.serial(tokens):
            sums[0] = T.float32(0)
            for c in T.serial(size):
                x[c] = x[c] * decay_of(log_rate[head], gate[request, token, head], gate_bias[head])
                sums[0] = sums[0] + x[c] * float32(key[request, token, head // (heads // key_heads), c])
            sums[0] = sigmoid(strength[request, token, head]) * (float32(value[request, token, head, row]) - sums[0])
            sums[1] = T.float32(0)
            for c in T.serial(size):
                x[c] = x[c] + sums[0] * float32(key[request, token, head // (heads // key_heads), c])
                sums[1] = sums[1] + x[c] * float32(query[request, token, head // (heads // query_heads), c])
            out[request, token, head, row] = T.cast(sums[1] * scale, "bfloat16")


def compile_for(
    arch: str, tokens: int = 4, query_heads: int = 8, key_heads: int = 8, heads: int = 16, size: int = 128
) -> tvm.runtime.Executable:
    """The kernel for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    sizes = {"tokens": tokens, "query_heads": query_heads, "key_heads": key_heads, "heads": heads, "size": size}
    if arch == "llvm":
        return tvm.compile(tvm.IRModule({"main": draft_cpu.specialize(**sizes)}), target="llvm")
    assert size % (VECTOR * LANES) == 0 and size % ROWS == 0
    kernel = draft_cuda.specialize(**sizes, chunks=size // (VECTOR * LANES))
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx")


@cache
def kernel_for(device: torch.device, tokens: int, query_heads: int, key_heads: int, heads: int, size: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return compile_for(arch, tokens, query_heads, key_heads, heads, size)["main"]


def solve(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    output = torch.empty_like(v)
    kernel = kernel_for(q.device, v.shape[1], q.shape[2], k.shape[2], v.shape[2], v.shape[3])
    kernel(q, k, v, initial_state, initial_state_indices, A_log, a, dt_bias, b, scale, output)
    return output, initial_state
