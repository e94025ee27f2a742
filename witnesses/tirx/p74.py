"""p74, the delta rule without decay, in TIRx: one kernel that goes through a sequence token by token.

A row of the state (one value channel, all key channels) needs nothing of the other rows. CUDA: it stays in registers
from the first token to the last; 8 threads share it, 16 values each, and a thread block has 32 rows of one head.
All sums of a token are taken before its update, so that they cross the threads together: with the state d before, the
answer (d + c k)·q is d·q + c (k·q), where c is the correction. The next token is on its way while one is worked on.
CPU: the rule as it is stated, in plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

VECTOR = 8
LANES = 8  # threads that share a row of the state
ROWS = 32
SMALLEST_SQUARE = 1e-24  # of a norm that is divided by


@T.jit
def sequence_cuda(
    qh: T.handle,
    kh: T.handle,
    vh: T.handle,
    bh: T.handle,
    si: T.handle,
    o: T.handle,
    so: T.handle,
    *,
    heads: T.constexpr,
    key_size: T.constexpr,
    value_size: T.constexpr,
    chunks: T.constexpr,
):
    batch = T.int32()
    length = T.int32()
    query = T.match_buffer(qh, (batch, heads, length, key_size), "bfloat16")
    key = T.match_buffer(kh, (batch, heads, length, key_size), "bfloat16")
    value = T.match_buffer(vh, (batch, heads, length, value_size), "bfloat16")
    strength = T.match_buffer(bh, (batch, heads, length), "bfloat16")
    initial_state = T.match_buffer(si, (batch, heads, key_size, value_size), "float32")
    out = T.match_buffer(o, (batch, heads, length, value_size), "bfloat16")
    final_state = T.match_buffer(so, (batch, heads, key_size, value_size), "float32")
    T.device_entry()
    part, head, prompt = T.cta_id([value_size // ROWS, heads, batch])
    thread = T.thread_id([ROWS * LANES])
    row = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    following = T.alloc_local((1,), "int32")
    state = T.alloc_local((chunks, VECTOR), "float32")
    next_k = T.alloc_local((chunks, VECTOR), "bfloat16")
    next_q = T.alloc_local((chunks, VECTOR), "bfloat16")
    next_v = T.alloc_local((2,), "bfloat16")  # value, strength
    k = T.alloc_local((chunks, VECTOR), "float32")
    q = T.alloc_local((chunks, VECTOR), "float32")
    v = T.alloc_local((2,), "float32")
    sums = T.alloc_local((5,), "float32")  # k·k, q·q, d·k, d·q, k·q
    norms = T.alloc_local((2,), "float32")
    correction = T.alloc_local((1,), "float32")
    row[0] = part * ROWS + thread // LANES
    lane[0] = thread % LANES
    for c in T.unroll(chunks):
        for e in T.unroll(VECTOR):
            # A row of ours is a column of theirs: read and written once, value by value.
            state[c, e] = initial_state[prompt, head, (c * LANES + lane[0]) * VECTOR + e, row[0]]
        for e in T.vectorized(VECTOR):
            next_k[c, e] = key[prompt, head, 0, (c * LANES + lane[0]) * VECTOR + e]
        for e in T.vectorized(VECTOR):
            next_q[c, e] = query[prompt, head, 0, (c * LANES + lane[0]) * VECTOR + e]
    next_v[0] = value[prompt, head, 0, row[0]]
    next_v[1] = strength[prompt, head, 0]
    for token in T.serial(length):
        for c in T.unroll(chunks):
            for e in T.unroll(VECTOR):
                k[c, e] = T.cast(next_k[c, e], "float32")
                q[c, e] = T.cast(next_q[c, e], "float32")
        for i in T.unroll(2):
            v[i] = T.cast(next_v[i], "float32")
        following[0] = T.min(token + 1, length - 1)
        for c in T.unroll(chunks):
            for e in T.vectorized(VECTOR):
                next_k[c, e] = key[prompt, head, following[0], (c * LANES + lane[0]) * VECTOR + e]
            for e in T.vectorized(VECTOR):
                next_q[c, e] = query[prompt, head, following[0], (c * LANES + lane[0]) * VECTOR + e]
        next_v[0] = value[prompt, head, following[0], row[0]]
        next_v[1] = strength[prompt, head, following[0]]
        for i in T.unroll(5):
            sums[i] = T.float32(0)
        for c in T.unroll(chunks):
            for e in T.unroll(VECTOR):
                sums[0] = sums[0] + k[c, e] * k[c, e]
                sums[1] = sums[1] + q[c, e] * q[c, e]
                sums[2] = sums[2] + state[c, e] * k[c, e]
                sums[3] = sums[3] + state[c, e] * q[c, e]
                sums[4] = sums[4] + k[c, e] * q[c, e]
        for i in T.unroll(5):
            sums[i] = T.cuda.warp_sum(sums[i], LANES)
        norms[0] = T.rsqrt(T.max(sums[0], T.float32(SMALLEST_SQUARE)))
        norms[1] = T.rsqrt(T.max(sums[1], T.float32(SMALLEST_SQUARE))) * T.float32(key_size**-0.5)
        correction[0] = v[1] * (v[0] - sums[2] * norms[0]) * norms[0]
        for c in T.unroll(chunks):
            for e in T.unroll(VECTOR):
                state[c, e] = state[c, e] + k[c, e] * correction[0]
        if lane[0] == 0:
            out[prompt, head, token, row[0]] = T.cast((sums[3] + correction[0] * sums[4]) * norms[1], "bfloat16")
    for c in T.unroll(chunks):
        for e in T.unroll(VECTOR):
            final_state[prompt, head, (c * LANES + lane[0]) * VECTOR + e, row[0]] = state[c, e]


@T.jit
def sequence_cpu(
    qh: T.handle,
    kh: T.handle,
    vh: T.handle,
    bh: T.handle,
    si: T.handle,
    o: T.handle,
    so: T.handle,
    *,
    heads: T.constexpr,
    key_size: T.constexpr,
    value_size: T.constexpr,
):
    batch = T.int32()
    length = T.int32()
    query = T.match_buffer(qh, (batch, heads, length, key_size), "bfloat16")
    key = T.match_buffer(kh, (batch, heads, length, key_size), "bfloat16")
    value = T.match_buffer(vh, (batch, heads, length, value_size), "bfloat16")
    strength = T.match_buffer(bh, (batch, heads, length), "bfloat16")
    initial_state = T.match_buffer(si, (batch, heads, key_size, value_size), "float32")
    out = T.match_buffer(o, (batch, heads, length, value_size), "bfloat16")
    final_state = T.match_buffer(so, (batch, heads, key_size, value_size), "float32")
    state = T.alloc_buffer((value_size, key_size), "float32", scope="local")
    k = T.alloc_buffer((key_size,), "float32", scope="local")
    q = T.alloc_buffer((key_size,), "float32", scope="local")
    sums = T.alloc_buffer((2,), "float32", scope="local")
    for prompt, head in T.grid(batch, heads):
        for row, c in T.grid(value_size, key_size):
            state[row, c] = initial_state[prompt, head, c, row]
        for token in T.serial(length):
            sums[0] = T.float32(0)
            sums[1] = T.float32(0)
            for c in T.serial(key_size):
                k[c] = T.cast(key[prompt, head, token, c], "float32")
                q[c] = T.cast(query[prompt, head, token, c], "float32")
                sums[0] = sums[0] + k[c] * k[c]
                sums[1] = sums[1] + q[c] * q[c]
            for c in T.serial(key_size):
                k[c] = k[c] / T.sqrt(T.max(sums[0], T.float32(SMALLEST_SQUARE)))
                q[c] = q[c] / T.sqrt(T.max(sums[1], T.float32(SMALLEST_SQUARE))) * T.float32(key_size**-0.5)
            for row in T.serial(value_size):
                sums[0] = T.float32(0)
                for c in T.serial(key_size):
                    sums[0] = sums[0] + state[row, c] * k[c]
                sums[0] = T.cast(strength[prompt, head, token], "float32") * (
                    T.cast(value[prompt, head, token, row], "float32") - sums[0]
                )
                sums[1] = T.float32(0)
                for c in T.serial(key_size):
                    state[row, c] = state[row, c] + k[c] * sums[0]
                    sums[1] = sums[1] + state[row, c] * q[c]
                out[prompt, head, token, row] = T.cast(sums[1], "bfloat16")
        for row, c in T.grid(value_size, key_size):
            final_state[prompt, head, c, row] = state[row, c]


def compile_for(arch: str, heads: int = 16, key_size: int = 128, value_size: int = 128) -> tvm.runtime.Executable:
    """The kernel for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    sizes = {"heads": heads, "key_size": key_size, "value_size": value_size}
    if arch == "llvm":
        return tvm.compile(tvm.IRModule({"main": sequence_cpu.specialize(**sizes)}), target="llvm")
    assert key_size % (VECTOR * LANES) == 0 and value_size % ROWS == 0
    kernel = sequence_cuda.specialize(**sizes, chunks=key_size // (VECTOR * LANES))
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx")


@cache
def kernel_for(device: torch.device, heads: int, key_size: int, value_size: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return compile_for(arch, heads, key_size, value_size)["main"]


def solve(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, initial_state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    output, final_state = torch.empty_like(v), torch.empty_like(initial_state)
    kernel = kernel_for(v.device, v.shape[1], k.shape[3], v.shape[3])
    kernel(q, k, v, beta, initial_state, output, final_state)
    return output, final_state
