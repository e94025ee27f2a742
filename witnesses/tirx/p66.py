"""p66, RWKV-4's WKV recurrence, in TIRx: one kernel that goes through a sequence token by token.

CUDA: a thread has two neighbouring channels of a sequence, with their state in registers from the first token to the
last. The next 8 tokens are on their way while 8 are worked on. Of the two weights that a maximum makes, one is 1, so
a step takes two exponentials. CPU: the same in plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

VECTOR = 2  # channels of a thread
THREADS = 64
TOKENS = 8  # that are loaded together


def smaller_weight(x, y):
    """What the smaller of two exponents weighs, relative to the larger."""
    return T.exp(-T.abs(x - y))


def first_weight(x, y, smaller):
    return T.if_then_else(x >= y, T.float32(1), smaller)


@T.jit
def recurrence_cuda(
    td: T.handle,
    kh: T.handle,
    tf: T.handle,
    vh: T.handle,
    ni: T.handle,
    mi: T.handle,
    di: T.handle,
    o: T.handle,
    no: T.handle,
    do: T.handle,
    mo: T.handle,
    *,
    channels: T.constexpr,
):
    batch = T.int32()
    length = T.int32()
    time_decay = T.match_buffer(td, (channels,), "float32")
    key = T.match_buffer(kh, (batch, length, channels), "float32")
    time_first = T.match_buffer(tf, (channels,), "float32")
    value = T.match_buffer(vh, (batch, length, channels), "float32")
    num_before = T.match_buffer(ni, (batch, channels), "float32")
    max_before = T.match_buffer(mi, (batch, channels), "float32")
    den_before = T.match_buffer(di, (batch, channels), "float32")
    out = T.match_buffer(o, (batch, length, channels), "float32")
    num_after = T.match_buffer(no, (batch, channels), "float32")
    den_after = T.match_buffer(do, (batch, channels), "float32")
    max_after = T.match_buffer(mo, (batch, channels), "float32")
    T.device_entry()
    part, sequence = T.cta_id([T.ceildiv(channels, VECTOR * THREADS), batch])
    thread = T.thread_id([THREADS])
    place = T.alloc_local((1,), "int32")
    token = T.alloc_local((1,), "int32")
    next_k = T.alloc_local((TOKENS, VECTOR), "float32")
    next_v = T.alloc_local((TOKENS, VECTOR), "float32")
    k = T.alloc_local((TOKENS, VECTOR), "float32")
    v = T.alloc_local((TOKENS, VECTOR), "float32")
    w = T.alloc_local((VECTOR,), "float32")
    u = T.alloc_local((VECTOR,), "float32")
    n = T.alloc_local((VECTOR,), "float32")
    d = T.alloc_local((VECTOR,), "float32")
    m = T.alloc_local((VECTOR,), "float32")
    y = T.alloc_local((VECTOR,), "float32")
    exponents = T.alloc_local((2,), "float32")  # of the state and of the token
    weights = T.alloc_local((3,), "float32")  # the smaller one, then those of the state and of the token
    place[0] = part * THREADS + thread
    if place[0] < channels // VECTOR:
        for e in T.vectorized(VECTOR):
            w[e] = time_decay[place[0] * VECTOR + e]
        for e in T.vectorized(VECTOR):
            u[e] = time_first[place[0] * VECTOR + e]
        for e in T.vectorized(VECTOR):
            n[e] = num_before[sequence, place[0] * VECTOR + e]
        for e in T.vectorized(VECTOR):
            d[e] = den_before[sequence, place[0] * VECTOR + e]
        for e in T.vectorized(VECTOR):
            m[e] = max_before[sequence, place[0] * VECTOR + e]
        for e in T.unroll(VECTOR):
            w[e] = -T.exp(w[e])
        for t in T.unroll(TOKENS):
            token[0] = T.min(t, length - 1)
            for e in T.vectorized(VECTOR):
                next_k[t, e] = key[sequence, token[0], place[0] * VECTOR + e]
            for e in T.vectorized(VECTOR):
                next_v[t, e] = value[sequence, token[0], place[0] * VECTOR + e]
        for stretch in T.serial(T.ceildiv(length, TOKENS)):
            for t in T.unroll(TOKENS):
                for e in T.unroll(VECTOR):
                    k[t, e] = next_k[t, e]
                    v[t, e] = next_v[t, e]
            for t in T.unroll(TOKENS):
                token[0] = T.min((stretch + 1) * TOKENS + t, length - 1)
                for e in T.vectorized(VECTOR):
                    next_k[t, e] = key[sequence, token[0], place[0] * VECTOR + e]
                for e in T.vectorized(VECTOR):
                    next_v[t, e] = value[sequence, token[0], place[0] * VECTOR + e]
            for t in T.unroll(TOKENS):
                if stretch * TOKENS + t < length:
                    for e in T.unroll(VECTOR):
                        exponents[1] = k[t, e] + u[e]
                        weights[0] = smaller_weight(m[e], exponents[1])
                        weights[1] = first_weight(m[e], exponents[1], weights[0])
                        weights[2] = first_weight(exponents[1], m[e], weights[0])
                        y[e] = (weights[1] * n[e] + weights[2] * v[t, e]) / (weights[1] * d[e] + weights[2])
                        exponents[0] = m[e] + w[e]
                        weights[0] = smaller_weight(exponents[0], k[t, e])
                        weights[1] = first_weight(exponents[0], k[t, e], weights[0])
                        weights[2] = first_weight(k[t, e], exponents[0], weights[0])
                        n[e] = weights[1] * n[e] + weights[2] * v[t, e]
                        d[e] = weights[1] * d[e] + weights[2]
                        m[e] = T.max(exponents[0], k[t, e])
                    for e in T.vectorized(VECTOR):
                        out[sequence, stretch * TOKENS + t, place[0] * VECTOR + e] = y[e]
        for e in T.vectorized(VECTOR):
            num_after[sequence, place[0] * VECTOR + e] = n[e]
        for e in T.vectorized(VECTOR):
            den_after[sequence, place[0] * VECTOR + e] = d[e]
        for e in T.vectorized(VECTOR):
            max_after[sequence, place[0] * VECTOR + e] = m[e]


@T.jit
def recurrence_cpu(
    td: T.handle,
    kh: T.handle,
    tf: T.handle,
    vh: T.handle,
    ni: T.handle,
    mi: T.handle,
    di: T.handle,
    o: T.handle,
    no: T.handle,
    do: T.handle,
    mo: T.handle,
    *,
    channels: T.constexpr,
):
    batch = T.int32()
    length = T.int32()
    time_decay = T.match_buffer(td, (channels,), "float32")
    key = T.match_buffer(kh, (batch, length, channels), "float32")
    time_first = T.match_buffer(tf, (channels,), "float32")
    value = T.match_buffer(vh, (batch, length, channels), "float32")
    num_before = T.match_buffer(ni, (batch, channels), "float32")
    max_before = T.match_buffer(mi, (batch, channels), "float32")
    den_before = T.match_buffer(di, (batch, channels), "float32")
    out = T.match_buffer(o, (batch, length, channels), "float32")
    num_after = T.match_buffer(no, (batch, channels), "float32")
    den_after = T.match_buffer(do, (batch, channels), "float32")
    max_after = T.match_buffer(mo, (batch, channels), "float32")
    state = T.alloc_buffer((3,), "float32", scope="local")  # n, d, m
    exponents = T.alloc_buffer((2,), "float32", scope="local")
    weights = T.alloc_buffer((3,), "float32", scope="local")
    for sequence, channel in T.grid(batch, channels):
        state[0] = num_before[sequence, channel]
        state[1] = den_before[sequence, channel]
        state[2] = max_before[sequence, channel]
        for token in T.serial(length):
            exponents[0] = state[2]
            exponents[1] = key[sequence, token, channel] + time_first[channel]
            weights[0] = smaller_weight(exponents[0], exponents[1])
            weights[1] = first_weight(exponents[0], exponents[1], weights[0])
            weights[2] = first_weight(exponents[1], exponents[0], weights[0])
            out[sequence, token, channel] = (weights[1] * state[0] + weights[2] * value[sequence, token, channel]) / (
                weights[1] * state[1] + weights[2]
            )
            exponents[0] = state[2] - T.exp(time_decay[channel])
            exponents[1] = key[sequence, token, channel]
            weights[0] = smaller_weight(exponents[0], exponents[1])
            weights[1] = first_weight(exponents[0], exponents[1], weights[0])
            weights[2] = first_weight(exponents[1], exponents[0], weights[0])
            state[0] = weights[1] * state[0] + weights[2] * value[sequence, token, channel]
            state[1] = weights[1] * state[1] + weights[2]
            state[2] = T.max(exponents[0], exponents[1])
        num_after[sequence, channel] = state[0]
        den_after[sequence, channel] = state[1]
        max_after[sequence, channel] = state[2]


def compile_for(arch: str, channels: int = 2048) -> tvm.runtime.Executable:
    """The kernel for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    if arch == "llvm":
        return tvm.compile(tvm.IRModule({"main": recurrence_cpu.specialize(channels=channels)}), target="llvm")
    assert channels % VECTOR == 0
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    kernel = recurrence_cuda.specialize(channels=channels)
    return tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx")


@cache
def kernel_for(device: torch.device, channels: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return compile_for(arch, channels)["main"]


def solve(
    time_decay: torch.Tensor,
    key: torch.Tensor,
    time_first: torch.Tensor,
    value: torch.Tensor,
    num_state: torch.Tensor,
    max_state: torch.Tensor,
    den_state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    output = torch.empty_like(value)
    num_after, den_after, max_after = (torch.empty_like(num_state) for _ in range(3))
    kernel = kernel_for(key.device, key.shape[2])
    kernel(
        *(time_decay, key, time_first, value, num_state, max_state, den_state),
        *(output, num_after, den_after, max_after),
    )
    return output, num_after, den_after, max_after
