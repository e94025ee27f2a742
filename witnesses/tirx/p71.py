"""p71, gated delta rule prefill over packed sequences, in TIRx: one kernel that goes through them token by token.

A row of the state (one value channel, all key channels) needs nothing of the other rows. CUDA: it stays in registers
from the first token to the last; 8 threads share it, 16 values each, and a thread block has 32 rows of one value head
of one sequence. All sums of a token are taken before its update, so that they cross the threads together: with the
decayed state d, the answer (d + c k)·q is d·q + c (k·q), where c is the correction. CPU: the rule as it is stated.
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
def prefill_cuda(
    qh: T.handle,
    kh: T.handle,
    vh: T.handle,
    sh: T.handle,
    lr: T.handle,
    ga: T.handle,
    gb: T.handle,
    st: T.handle,
    bo: T.handle,
    scale: T.float32,
    o: T.handle,
    ns: T.handle,
    *,
    query_heads: T.constexpr,
    key_heads: T.constexpr,
    heads: T.constexpr,
    size: T.constexpr,
    chunks: T.constexpr,
):
    tokens = T.int32()
    sequences = T.int32()
    query = T.match_buffer(qh, (tokens, query_heads, size), "bfloat16")
    key = T.match_buffer(kh, (tokens, key_heads, size), "bfloat16")
    value = T.match_buffer(vh, (tokens, heads, size), "bfloat16")
    state = T.match_buffer(sh, (sequences, heads, size, size), "float32")
    log_rate = T.match_buffer(lr, (heads,), "float32")
    gate = T.match_buffer(ga, (tokens, heads), "bfloat16")
    gate_bias = T.match_buffer(gb, (heads,), "float32")
    strength = T.match_buffer(st, (tokens, heads), "bfloat16")
    boundaries = T.match_buffer(bo, (sequences + 1,), "int64")
    out = T.match_buffer(o, (tokens, heads, size), "bfloat16")
    new_state = T.match_buffer(ns, (sequences, heads, size, size), "float32")
    T.device_entry()
    part, head, sequence = T.cta_id([size // ROWS, heads, sequences])
    thread = T.thread_id([ROWS * LANES])
    row = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    first = T.alloc_local((1,), "int32")
    length = T.alloc_local((1,), "int32")
    token = T.alloc_local((1,), "int32")
    x = T.alloc_local((chunks, VECTOR), "float32")
    next_k = T.alloc_local((chunks, VECTOR), "bfloat16")
    next_q = T.alloc_local((chunks, VECTOR), "bfloat16")
    next_v = T.alloc_local((3,), "bfloat16")  # value, gate, strength
    k = T.alloc_local((chunks, VECTOR), "float32")
    q = T.alloc_local((chunks, VECTOR), "float32")
    v = T.alloc_local((3,), "float32")  # value, decay, strength
    sums = T.alloc_local((3,), "float32")  # d·k, d·q, k·q
    correction = T.alloc_local((1,), "float32")
    row[0] = part * ROWS + thread // LANES
    lane[0] = thread % LANES
    first[0] = T.cast(boundaries[sequence], "int32")
    length[0] = T.cast(boundaries[sequence + 1], "int32") - first[0]
    for c in T.unroll(chunks):
        for e in T.vectorized(VECTOR):
            x[c, e] = state[sequence, head, row[0], (c * LANES + lane[0]) * VECTOR + e]
    for turn in T.serial(length[0] + 1):
        # The first turn only loads; every other turn works on what the turn before has loaded.
        if turn > 0:
            for c in T.unroll(chunks):
                for e in T.unroll(VECTOR):
                    k[c, e] = float32(next_k[c, e])
                    q[c, e] = float32(next_q[c, e])
            v[0] = float32(next_v[0])
            v[1] = decay_of(log_rate[head], next_v[1], gate_bias[head])
            v[2] = sigmoid(next_v[2])
        token[0] = first[0] + T.min(turn, length[0] - 1)
        if length[0] > 0:
            for c in T.unroll(chunks):
                for e in T.vectorized(VECTOR):
                    next_k[c, e] = key[token[0], head // (heads // key_heads), (c * LANES + lane[0]) * VECTOR + e]
                for e in T.vectorized(VECTOR):
                    next_q[c, e] = query[token[0], head // (heads // query_heads), (c * LANES + lane[0]) * VECTOR + e]
            next_v[0] = value[token[0], head, row[0]]
            next_v[1] = gate[token[0], head]
            next_v[2] = strength[token[0], head]
        if turn > 0:
            for i in T.unroll(3):
                sums[i] = T.float32(0)
            for c in T.unroll(chunks):
                for e in T.unroll(VECTOR):
                    x[c, e] = x[c, e] * v[1]
                    sums[0] = sums[0] + x[c, e] * k[c, e]
                    sums[1] = sums[1] + x[c, e] * q[c, e]
                    sums[2] = sums[2] + k[c, e] * q[c, e]
            for i in T.unroll(3):
                sums[i] = T.cuda.warp_sum(sums[i], LANES)
            correction[0] = v[2] * (v[0] - sums[0])
            for c in T.unroll(chunks):
                for e in T.unroll(VECTOR):
                    x[c, e] = x[c, e] + k[c, e] * correction[0]
            if lane[0] == 0:
                out[first[0] + turn - 1, head, row[0]] = T.cast((sums[1] + correction[0] * sums[2]) * scale, "bfloat16")
    for c in T.unroll(chunks):
        for e in T.vectorized(VECTOR):
            new_state[sequence, head, row[0], (c * LANES + lane[0]) * VECTOR + e] = x[c, e]


@T.jit
def prefill_cpu(
    qh: T.handle,
    kh: T.handle,
    vh: T.handle,
    sh: T.handle,
    lr: T.handle,
    ga: T.handle,
    gb: T.handle,
    st: T.handle,
    bo: T.handle,
    scale: T.float32,
    o: T.handle,
    ns: T.handle,
    *,
    query_heads: T.constexpr,
    key_heads: T.constexpr,
    heads: T.constexpr,
    size: T.constexpr,
):
    tokens = T.int32()
    sequences = T.int32()
    query = T.match_buffer(qh, (tokens, query_heads, size), "bfloat16")
    key = T.match_buffer(kh, (tokens, key_heads, size), "bfloat16")
    value = T.match_buffer(vh, (tokens, heads, size), "bfloat16")
    state = T.match_buffer(sh, (sequences, heads, size, size), "float32")
    log_rate = T.match_buffer(lr, (heads,), "float32")
    gate = T.match_buffer(ga, (tokens, heads), "bfloat16")
    gate_bias = T.match_buffer(gb, (heads,), "float32")
    strength = T.match_buffer(st, (tokens, heads), "bfloat16")
    boundaries = T.match_buffer(bo, (sequences + 1,), "int64")
    out = T.match_buffer(o, (tokens, heads, size), "bfloat16")
    new_state = T.match_buffer(ns, (sequences, heads, size, size), "float32")
    sums = T.alloc_buffer((2,), "float32", scope="local")
    token = T.alloc_buffer((1,), "int32", scope="local")
    decay = T.alloc_buffer((1,), "float32", scope="local")
    for sequence, head, row in T.grid(sequences, heads, size):
        for c in T.serial(size):
            new_state[sequence, head, row, c] = state[sequence, head, row, c]
        for t in T.serial(T.cast(boundaries[sequence + 1] - boundaries[sequence], "int32")):
            token[0] = T.cast(boundaries[sequence], "int32") + t
            decay[0] = decay_of(log_rate[head], gate[token[0], head], gate_bias[head])
            sums[0] = T.float32(0)
            for c in T.serial(size):
                new_state[sequence, head, row, c] = new_state[sequence, head, row, c] * decay[0]
                sums[0] = sums[0] + new_state[sequence, head, row, c] * float32(
                    key[token[0], head // (heads // key_heads), c]
                )
            sums[0] = sigmoid(strength[token[0], head]) * (float32(value[token[0], head, row]) - sums[0])
            sums[1] = T.float32(0)
            for c in T.serial(size):
                new_state[sequence, head, row, c] = new_state[sequence, head, row, c] + sums[0] * float32(
                    key[token[0], head // (heads // key_heads), c]
                )
                sums[1] = sums[1] + new_state[sequence, head, row, c] * float32(
                    query[token[0], head // (heads // query_heads), c]
                )
            out[token[0], head, row] = T.cast(sums[1] * scale, "bfloat16")


def compile_for(
    arch: str, query_heads: int = 8, key_heads: int = 8, heads: int = 16, size: int = 128
) -> tvm.runtime.Executable:
    """The kernel for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    sizes = {"query_heads": query_heads, "key_heads": key_heads, "heads": heads, "size": size}
    if arch == "llvm":
        return tvm.compile(tvm.IRModule({"main": prefill_cpu.specialize(**sizes)}), target="llvm")
    assert size % (VECTOR * LANES) == 0 and size % ROWS == 0
    kernel = prefill_cuda.specialize(**sizes, chunks=size // (VECTOR * LANES))
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx")


@cache
def kernel_for(device: torch.device, query_heads: int, key_heads: int, heads: int, size: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return compile_for(arch, query_heads, key_heads, heads, size)["main"]


def solve(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    output, new_state = torch.empty_like(v), torch.empty_like(state)
    kernel = kernel_for(q.device, q.shape[1], k.shape[1], v.shape[1], v.shape[2])
    kernel(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale, output, new_state)
    return output, new_state
