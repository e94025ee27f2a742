"""p68, Kimi Delta Attention, in TIRx: one kernel that goes through a sequence token by token.

A column of the state (one value channel, all key channels) needs nothing of the other columns. CUDA: it stays in
registers from the first token to the last; 8 threads share 4 of them, 16 key channels each, and a thread block has 64
value channels of one head. 16 tokens at a time are prepared in shared memory by all threads together: keys and queries
are normalised, and carry the decay since the start of their 16 tokens (and the keys' second form its inverse), so that
the state itself decays only once in 16 tokens. CPU: the rule as it is stated, in plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

VECTOR = 8  # bfloat16 values in 16 bytes
LANES = 8  # threads that share a column of the state
COLUMNS = 4  # that they share
THREADS = 128
TOKENS = THREADS // LANES  # that are prepared together: 8 threads have one
VALUES = TOKENS * COLUMNS  # value channels of a thread block
SMALLEST_SQUARE = 1e-24  # of a norm that is divided by


def float32(x):
    return T.cast(x, "float32")


def inverse_norm(square):
    return T.rsqrt(T.max(square, T.float32(SMALLEST_SQUARE)))


@T.jit
def sequence_cuda(
    qh: T.handle,
    kh: T.handle,
    vh: T.handle,
    gh: T.handle,
    bh: T.handle,
    o: T.handle,
    *,
    key_heads: T.constexpr,
    value_heads: T.constexpr,
    key_size: T.constexpr,
    value_size: T.constexpr,
    chunks: T.constexpr,
):
    """A thread has `chunks` of 8 key channels; in shared memory they lie in twice as many of 4: no bank conflicts."""
    batch = T.int32()
    length = T.int32()
    query = T.match_buffer(qh, (batch, length, key_heads, key_size), "bfloat16")
    key = T.match_buffer(kh, (batch, length, key_heads, key_size), "bfloat16")
    value = T.match_buffer(vh, (batch, length, value_heads, value_size), "bfloat16")
    log_decay = T.match_buffer(gh, (batch, length, value_heads, key_size), "bfloat16")
    strength = T.match_buffer(bh, (batch, length, value_heads), "bfloat16")
    out = T.match_buffer(o, (batch, length, value_heads, value_size), "bfloat16")
    T.device_entry()
    part, head, prompt = T.cta_id([value_size // VALUES, value_heads, batch])
    thread = T.thread_id([THREADS])
    # Of every token: keys and queries with the decay, keys with its inverse. The first holds the log-decay before.
    shared_k = T.alloc_shared((TOKENS, chunks * 2, LANES, 4), "float32")
    shared_q = T.alloc_shared((TOKENS, chunks * 2, LANES, 4), "float32")
    shared_pushed = T.alloc_shared((TOKENS, chunks * 2, LANES, 4), "float32")
    shared_v = T.alloc_shared((TOKENS, VALUES), "float32")
    shared_decay = T.alloc_shared((chunks * 2, LANES, 4), "float32")  # of all 16 tokens
    shared_sums = T.alloc_shared((2, TOKENS), "float32")  # query times key, strength
    group = T.alloc_local((1,), "int32")  # the token that is prepared, then the four columns
    lane = T.alloc_local((1,), "int32")
    token = T.alloc_local((1,), "int32")
    next_k = T.alloc_local((chunks, VECTOR), "bfloat16")
    next_q = T.alloc_local((chunks, VECTOR), "bfloat16")
    next_g = T.alloc_local((chunks, VECTOR), "bfloat16")
    next_v = T.alloc_local((VECTOR,), "bfloat16")
    next_beta = T.alloc_local((1,), "bfloat16")
    state = T.alloc_local((COLUMNS, chunks * 2, 4), "float32")
    k = T.alloc_local((chunks * 2, 4), "float32")
    q = T.alloc_local((chunks * 2, 4), "float32")
    g = T.alloc_local((chunks * 2, 4), "float32")
    v = T.alloc_local((COLUMNS,), "float32")
    sums = T.alloc_local((3,), "float32")  # k·k, q·q, k·q
    predicted = T.alloc_local((COLUMNS,), "float32")
    answer = T.alloc_local((COLUMNS,), "float32")
    result = T.alloc_local((COLUMNS,), "bfloat16")
    total = T.alloc_local((1,), "float32")
    group[0] = thread // LANES
    lane[0] = thread % LANES
    for column in T.unroll(COLUMNS):
        for c in T.unroll(chunks * 2):
            for e in T.unroll(4):
                state[column, c, e] = T.float32(0)
    for turn in T.serial(T.ceildiv(length, TOKENS) + 1):
        # The first turn only loads; every other turn works on what the turn before has loaded.
        if turn > 0:
            for c in T.unroll(chunks * 2):
                for e in T.unroll(4):
                    g[c, e] = float32(next_g[c // 2, c % 2 * 4 + e])
                    k[c, e] = float32(next_k[c // 2, c % 2 * 4 + e])
                    q[c, e] = float32(next_q[c // 2, c % 2 * 4 + e])
                for e in T.vectorized(4):
                    shared_k[group[0], c, lane[0], e] = g[c, e]
            T.cuda.cta_sync()
            if thread < key_size:
                total[0] = T.float32(0)
                for t in T.unroll(TOKENS):
                    total[0] = total[0] + shared_k[t, thread // (LANES * 4), thread // 4 % LANES, thread % 4]
                    shared_k[t, thread // (LANES * 4), thread // 4 % LANES, thread % 4] = total[0]
            for i in T.unroll(3):
                sums[i] = T.float32(0)
            for c in T.unroll(chunks * 2):
                for e in T.unroll(4):
                    sums[0] = sums[0] + k[c, e] * k[c, e]
                    sums[1] = sums[1] + q[c, e] * q[c, e]
                    sums[2] = sums[2] + k[c, e] * q[c, e]
            for i in T.unroll(3):
                sums[i] = T.cuda.warp_sum(sums[i], LANES)
            sums[0] = inverse_norm(sums[0])
            sums[1] = inverse_norm(sums[1]) * T.float32(key_size**-0.5)
            if lane[0] == 0:
                shared_sums[0, group[0]] = sums[2] * sums[0] * sums[1]
                shared_sums[1, group[0]] = float32(next_beta[0])
            for e in T.unroll(VECTOR):
                shared_v[group[0], lane[0] * VECTOR + e] = float32(next_v[e])
            T.cuda.cta_sync()
            for c in T.unroll(chunks * 2):
                for e in T.vectorized(4):
                    g[c, e] = shared_k[group[0], c, lane[0], e]
                for e in T.unroll(4):
                    g[c, e] = T.exp(g[c, e])
                if group[0] == TOKENS - 1:
                    for e in T.vectorized(4):
                        shared_decay[c, lane[0], e] = g[c, e]
                for e in T.unroll(4):
                    k[c, e] = k[c, e] * sums[0]
                    q[c, e] = q[c, e] * sums[1] * g[c, e]
                for e in T.vectorized(4):
                    shared_q[group[0], c, lane[0], e] = q[c, e]
                for e in T.unroll(4):
                    q[c, e] = k[c, e] / g[c, e]
                    k[c, e] = k[c, e] * g[c, e]
                for e in T.vectorized(4):
                    shared_pushed[group[0], c, lane[0], e] = q[c, e]
                for e in T.vectorized(4):
                    shared_k[group[0], c, lane[0], e] = k[c, e]
            T.cuda.cta_sync()
        token[0] = T.min(turn * TOKENS + group[0], length - 1)
        for c in T.unroll(chunks):
            for e in T.vectorized(VECTOR):
                next_k[c, e] = key[
                    prompt, token[0], head // (value_heads // key_heads), (c * LANES + lane[0]) * VECTOR + e
                ]
            for e in T.vectorized(VECTOR):
                next_q[c, e] = query[
                    prompt, token[0], head // (value_heads // key_heads), (c * LANES + lane[0]) * VECTOR + e
                ]
            for e in T.vectorized(VECTOR):
                next_g[c, e] = log_decay[prompt, token[0], head, (c * LANES + lane[0]) * VECTOR + e]
        for e in T.vectorized(VECTOR):
            next_v[e] = value[prompt, token[0], head, (part * LANES + lane[0]) * VECTOR + e]
        next_beta[0] = strength[prompt, token[0], head]
        if turn > 0:
            for t in T.serial(T.min(TOKENS, length - (turn - 1) * TOKENS)):
                for c in T.unroll(chunks * 2):
                    for e in T.vectorized(4):
                        k[c, e] = shared_k[t, c, lane[0], e]
                    for e in T.vectorized(4):
                        q[c, e] = shared_q[t, c, lane[0], e]
                    for e in T.vectorized(4):
                        g[c, e] = shared_pushed[t, c, lane[0], e]
                for column in T.vectorized(COLUMNS):
                    v[column] = shared_v[t, group[0] * COLUMNS + column]
                for column in T.unroll(COLUMNS):
                    predicted[column] = T.float32(0)
                    answer[column] = T.float32(0)
                for c in T.unroll(chunks * 2):
                    for e in T.unroll(4):
                        for column in T.unroll(COLUMNS):
                            predicted[column] = predicted[column] + state[column, c, e] * k[c, e]
                            answer[column] = answer[column] + state[column, c, e] * q[c, e]
                for column in T.unroll(COLUMNS):
                    predicted[column] = T.cuda.warp_sum(predicted[column], LANES)
                    answer[column] = T.cuda.warp_sum(answer[column], LANES)
                    v[column] = (v[column] - predicted[column]) * shared_sums[1, t]
                    result[column] = T.cast(answer[column] + v[column] * shared_sums[0, t], "bfloat16")
                for c in T.unroll(chunks * 2):
                    for e in T.unroll(4):
                        for column in T.unroll(COLUMNS):
                            state[column, c, e] = state[column, c, e] + g[c, e] * v[column]
                if lane[0] == 0:
                    for column in T.vectorized(COLUMNS):
                        out[prompt, (turn - 1) * TOKENS + t, head, (part * TOKENS + group[0]) * COLUMNS + column] = (
                            result[column]
                        )
            for c in T.unroll(chunks * 2):
                for e in T.unroll(4):
                    for column in T.unroll(COLUMNS):
                        state[column, c, e] = state[column, c, e] * shared_decay[c, lane[0], e]
            T.cuda.cta_sync()


@T.jit
def sequence_cpu(
    qh: T.handle,
    kh: T.handle,
    vh: T.handle,
    gh: T.handle,
    bh: T.handle,
    o: T.handle,
    *,
    key_heads: T.constexpr,
    value_heads: T.constexpr,
    key_size: T.constexpr,
    value_size: T.constexpr,
):
    batch = T.int32()
    length = T.int32()
    query = T.match_buffer(qh, (batch, length, key_heads, key_size), "bfloat16")
    key = T.match_buffer(kh, (batch, length, key_heads, key_size), "bfloat16")
    value = T.match_buffer(vh, (batch, length, value_heads, value_size), "bfloat16")
    log_decay = T.match_buffer(gh, (batch, length, value_heads, key_size), "bfloat16")
    strength = T.match_buffer(bh, (batch, length, value_heads), "bfloat16")
    out = T.match_buffer(o, (batch, length, value_heads, value_size), "bfloat16")
    state = T.alloc_buffer((value_size, key_size), "float32", scope="local")
    k = T.alloc_buffer((key_size,), "float32", scope="local")
    q = T.alloc_buffer((key_size,), "float32", scope="local")
    sums = T.alloc_buffer((2,), "float32", scope="local")
    for prompt, head in T.grid(batch, value_heads):
        for column, c in T.grid(value_size, key_size):
            state[column, c] = T.float32(0)
        for token in T.serial(length):
            sums[0] = T.float32(0)
            sums[1] = T.float32(0)
            for c in T.serial(key_size):
                k[c] = float32(key[prompt, token, head // (value_heads // key_heads), c])
                q[c] = float32(query[prompt, token, head // (value_heads // key_heads), c])
                sums[0] = sums[0] + k[c] * k[c]
                sums[1] = sums[1] + q[c] * q[c]
            for c in T.serial(key_size):
                k[c] = k[c] * inverse_norm(sums[0])
                q[c] = q[c] * inverse_norm(sums[1]) * T.float32(key_size**-0.5)
            for column in T.serial(value_size):
                sums[0] = T.float32(0)
                for c in T.serial(key_size):
                    state[column, c] = state[column, c] * T.exp(float32(log_decay[prompt, token, head, c]))
                    sums[0] = sums[0] + state[column, c] * k[c]
                sums[0] = (float32(value[prompt, token, head, column]) - sums[0]) * float32(
                    strength[prompt, token, head]
                )
                sums[1] = T.float32(0)
                for c in T.serial(key_size):
                    state[column, c] = state[column, c] + k[c] * sums[0]
                    sums[1] = sums[1] + state[column, c] * q[c]
                out[prompt, token, head, column] = T.cast(sums[1], "bfloat16")


def compile_for(
    arch: str, key_heads: int = 16, value_heads: int = 16, key_size: int = 128, value_size: int = 128
) -> tvm.runtime.Executable:
    """The kernel for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    sizes = {"key_heads": key_heads, "value_heads": value_heads, "key_size": key_size, "value_size": value_size}
    if arch == "llvm":
        return tvm.compile(tvm.IRModule({"main": sequence_cpu.specialize(**sizes)}), target="llvm")
    assert key_size in {64, 128} and value_size % VALUES == 0
    kernel = sequence_cuda.specialize(**sizes, chunks=key_size // (VECTOR * LANES))
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx")


@cache
def kernel_for(device: torch.device, key_heads: int, value_heads: int, key_size: int, value_size: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return compile_for(arch, key_heads, value_heads, key_size, value_size)["main"]


def solve(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    output = torch.empty_like(v)
    kernel_for(v.device, k.shape[2], v.shape[2], k.shape[3], v.shape[3])(q, k, v, g, beta, output)
    return output
