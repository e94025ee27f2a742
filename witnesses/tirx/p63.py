"""p63, one whole Mamba-2 layer, in TIRx: three kernels between the two projections, which stay with eager PyTorch.

1. Convolution and SiLU: a thread walks along the time with 8 channels, and keeps the last three tokens in registers.
2. The scan, token by token, as the rule is stated: a thread block has one head, a thread 4 of its 64 channels times 16
   of 256 state places, from the first token to the last. The next token is on its way while one is worked on.
3. The gated norm: a thread block has one group of one token.

CPU: the same three in plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

GROUPS = 8
VECTOR = 8
TAPS = 4
THREADS = 256
TOKENS = 16  # that a thread of the convolution walks along
ROWS = 4  # channels of a head that a thread of the scan has
LANES = 16  # threads that share these channels


def silu(x):
    return x / (T.float32(1) + T.exp(-x))


def softplus(x):
    return T.max(x, T.float32(0)) + T.log1p(T.exp(-T.abs(x)))


def float32(x):
    return T.cast(x, "float32")


@T.jit
def convolution_cuda(
    p: T.handle,
    w: T.handle,
    b: T.handle,
    o: T.handle,
    *,
    width: T.constexpr,
    first: T.constexpr,
    channels: T.constexpr,
):
    """The channels stand in a row of `width` from `first` on."""
    batch = T.int32()
    length = T.int32()
    projected = T.match_buffer(p, (batch, length, width), "bfloat16")
    weight = T.match_buffer(w, (channels, TAPS), "bfloat16")
    bias = T.match_buffer(b, (channels,), "bfloat16")
    out = T.match_buffer(o, (batch, length, channels), "bfloat16")
    T.device_entry()
    part, stretch, prompt = T.cta_id([T.ceildiv(channels // VECTOR, THREADS), T.ceildiv(length, TOKENS), batch])
    thread = T.thread_id([THREADS])
    place = T.alloc_local((1,), "int32")
    token = T.alloc_local((1,), "int32")
    taps = T.alloc_local((VECTOR, TAPS), "bfloat16")
    biases = T.alloc_local((VECTOR,), "bfloat16")
    window = T.alloc_local((TAPS, VECTOR), "float32")  # the last tokens, the current one last
    x = T.alloc_local((VECTOR,), "bfloat16")
    total = T.alloc_local((1,), "float32")
    place[0] = part * THREADS + thread
    if place[0] < channels // VECTOR:
        for e in T.unroll(VECTOR):
            for t in T.vectorized(TAPS):
                taps[e, t] = weight[place[0] * VECTOR + e, t]
        for e in T.vectorized(VECTOR):
            biases[e] = bias[place[0] * VECTOR + e]
        for t in T.unroll(TAPS):
            for e in T.unroll(VECTOR):
                window[t, e] = T.float32(0)
        for t in T.unroll(TAPS - 1):
            token[0] = stretch * TOKENS + t - (TAPS - 1)
            if token[0] >= 0:
                for e in T.vectorized(VECTOR):
                    x[e] = projected[prompt, token[0], first + place[0] * VECTOR + e]
                for e in T.unroll(VECTOR):
                    window[t + 1, e] = float32(x[e])
        for t in T.serial(TOKENS):
            token[0] = stretch * TOKENS + t
            if token[0] < length:
                for older in T.unroll(TAPS - 1):
                    for e in T.unroll(VECTOR):
                        window[older, e] = window[older + 1, e]
                for e in T.vectorized(VECTOR):
                    x[e] = projected[prompt, token[0], first + place[0] * VECTOR + e]
                for e in T.unroll(VECTOR):
                    window[TAPS - 1, e] = float32(x[e])
                    total[0] = float32(biases[e])
                    for tap in T.unroll(TAPS):
                        total[0] = total[0] + window[tap, e] * float32(taps[e, tap])
                    x[e] = T.cast(silu(total[0]), "bfloat16")
                for e in T.vectorized(VECTOR):
                    out[prompt, token[0], place[0] * VECTOR + e] = x[e]


@T.jit
def scan_cuda(
    c: T.handle,
    p: T.handle,
    sb: T.handle,
    lr: T.handle,
    sk: T.handle,
    shortest: T.float32,
    longest: T.float32,
    o: T.handle,
    *,
    width: T.constexpr,
    heads: T.constexpr,
    head_size: T.constexpr,
    state_size: T.constexpr,
    vectors: T.constexpr,
):
    batch = T.int32()
    length = T.int32()
    xbc = T.match_buffer(c, (batch, length, heads * head_size + 2 * GROUPS * state_size), "bfloat16")
    projected = T.match_buffer(p, (batch, length, width), "bfloat16")
    step_bias = T.match_buffer(sb, (heads,), "bfloat16")
    log_rate = T.match_buffer(lr, (heads,), "bfloat16")
    skip = T.match_buffer(sk, (heads,), "bfloat16")
    out = T.match_buffer(o, (batch, length, heads * head_size), "bfloat16")
    T.device_entry()
    head, prompt = T.cta_id([heads, batch])
    thread = T.thread_id([head_size // ROWS * LANES])
    row = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    following = T.alloc_local((1,), "int32")
    state = T.alloc_local((ROWS, vectors, VECTOR), "float32")
    next_x = T.alloc_local((ROWS,), "bfloat16")
    next_b = T.alloc_local((vectors, VECTOR), "bfloat16")
    next_c = T.alloc_local((vectors, VECTOR), "bfloat16")
    next_step = T.alloc_local((1,), "bfloat16")
    xs = T.alloc_local((ROWS,), "float32")
    bs = T.alloc_local((vectors, VECTOR), "float32")
    cs = T.alloc_local((vectors, VECTOR), "float32")
    y = T.alloc_local((ROWS,), "bfloat16")
    step = T.alloc_local((2,), "float32")  # the step and the decay
    pushed = T.alloc_local((1,), "float32")
    answer = T.alloc_local((1,), "float32")
    row[0] = head * (head_size // ROWS) + thread // LANES
    lane[0] = thread % LANES
    for r in T.unroll(ROWS):
        for v in T.unroll(vectors):
            for e in T.unroll(VECTOR):
                state[r, v, e] = T.float32(0)
    following[0] = 0
    for token in T.serial(length + 1):
        # The first turn only loads; every other turn works on what the turn before has loaded.
        if token > 0:
            for r in T.unroll(ROWS):
                xs[r] = float32(next_x[r])
            for v in T.unroll(vectors):
                for e in T.unroll(VECTOR):
                    bs[v, e] = float32(next_b[v, e])
                    cs[v, e] = float32(next_c[v, e])
            step[0] = softplus(float32(next_step[0]) + float32(step_bias[head]))
            step[0] = T.min(T.max(step[0], shortest), longest)
            step[1] = T.exp(-T.exp(float32(log_rate[head])) * step[0])
            following[0] = T.min(token, length - 1)
        for r in T.vectorized(ROWS):
            next_x[r] = xbc[prompt, following[0], row[0] * ROWS + r]
        for v in T.unroll(vectors):
            for e in T.vectorized(VECTOR):
                next_b[v, e] = xbc[
                    prompt,
                    following[0],
                    heads * head_size + (head // (heads // GROUPS)) * state_size + (v * LANES + lane[0]) * VECTOR + e,
                ]
            for e in T.vectorized(VECTOR):
                next_c[v, e] = xbc[
                    prompt,
                    following[0],
                    heads * head_size
                    + (GROUPS + head // (heads // GROUPS)) * state_size
                    + (v * LANES + lane[0]) * VECTOR
                    + e,
                ]
        next_step[0] = projected[prompt, following[0], width - heads + head]
        if token > 0:
            for r in T.unroll(ROWS):
                pushed[0] = step[0] * xs[r]
                answer[0] = T.float32(0)
                for v in T.unroll(vectors):
                    for e in T.unroll(VECTOR):
                        state[r, v, e] = state[r, v, e] * step[1] + bs[v, e] * pushed[0]
                        answer[0] = answer[0] + state[r, v, e] * cs[v, e]
                answer[0] = T.cuda.warp_sum(answer[0], LANES)
                y[r] = T.cast(answer[0] + float32(skip[head]) * xs[r], "bfloat16")
            if lane[0] == 0:
                for r in T.vectorized(ROWS):
                    out[prompt, token - 1, row[0] * ROWS + r] = y[r]


@T.jit
def norm_cuda(
    y: T.handle,
    p: T.handle,
    w: T.handle,
    eps: T.float32,
    o: T.handle,
    *,
    width: T.constexpr,
    inner: T.constexpr,
    threads: T.constexpr,
):
    batch = T.int32()
    length = T.int32()
    source = T.match_buffer(y, (batch, length, inner), "bfloat16")
    projected = T.match_buffer(p, (batch, length, width), "bfloat16")
    weight = T.match_buffer(w, (inner,), "bfloat16")
    out = T.match_buffer(o, (batch, length, inner), "bfloat16")
    T.device_entry()
    group, token, prompt = T.cta_id([GROUPS, length, batch])
    thread = T.thread_id([threads])
    a = T.alloc_local((VECTOR,), "bfloat16")
    g = T.alloc_local((VECTOR,), "bfloat16")
    ws = T.alloc_local((VECTOR,), "bfloat16")
    z = T.alloc_local((VECTOR,), "float32")
    total = T.alloc_local((1,), "float32")
    partial = T.alloc_shared((threads // 32,), "float32")
    for e in T.vectorized(VECTOR):
        a[e] = source[prompt, token, (group * threads + thread) * VECTOR + e]
    for e in T.vectorized(VECTOR):
        g[e] = projected[prompt, token, (group * threads + thread) * VECTOR + e]
    for e in T.vectorized(VECTOR):
        ws[e] = weight[(group * threads + thread) * VECTOR + e]
    total[0] = T.float32(0)
    for e in T.unroll(VECTOR):
        z[e] = float32(a[e]) * silu(float32(g[e]))
        total[0] = total[0] + z[e] * z[e]
    total[0] = T.cuda.warp_sum(total[0])
    if thread % 32 == 0:
        partial[thread // 32] = total[0]
    T.cuda.cta_sync()
    total[0] = T.float32(0)
    for k in T.unroll(threads // 32):
        total[0] = total[0] + partial[k]
    total[0] = T.rsqrt(total[0] / T.float32(threads * VECTOR) + eps)
    for e in T.unroll(VECTOR):
        a[e] = T.cast(z[e] * total[0] * float32(ws[e]), "bfloat16")
    for e in T.vectorized(VECTOR):
        out[prompt, token, (group * threads + thread) * VECTOR + e] = a[e]


@T.jit
def convolution_cpu(
    p: T.handle,
    w: T.handle,
    b: T.handle,
    o: T.handle,
    *,
    width: T.constexpr,
    first: T.constexpr,
    channels: T.constexpr,
):
    batch = T.int32()
    length = T.int32()
    projected = T.match_buffer(p, (batch, length, width), "bfloat16")
    weight = T.match_buffer(w, (channels, TAPS), "bfloat16")
    bias = T.match_buffer(b, (channels,), "bfloat16")
    out = T.match_buffer(o, (batch, length, channels), "bfloat16")
    total = T.alloc_buffer((1,), "float32", scope="local")
    for prompt, token, channel in T.grid(batch, length, channels):
        total[0] = float32(bias[channel])
        for tap in T.serial(TAPS):
            if token + tap >= TAPS - 1:
                total[0] = total[0] + float32(projected[prompt, token + tap - (TAPS - 1), first + channel]) * float32(
                    weight[channel, tap]
                )
        out[prompt, token, channel] = T.cast(silu(total[0]), "bfloat16")


@T.jit
def scan_cpu(
    c: T.handle,
    p: T.handle,
    sb: T.handle,
    lr: T.handle,
    sk: T.handle,
    shortest: T.float32,
    longest: T.float32,
    o: T.handle,
    *,
    width: T.constexpr,
    heads: T.constexpr,
    head_size: T.constexpr,
    state_size: T.constexpr,
):
    batch = T.int32()
    length = T.int32()
    xbc = T.match_buffer(c, (batch, length, heads * head_size + 2 * GROUPS * state_size), "bfloat16")
    projected = T.match_buffer(p, (batch, length, width), "bfloat16")
    step_bias = T.match_buffer(sb, (heads,), "bfloat16")
    log_rate = T.match_buffer(lr, (heads,), "bfloat16")
    skip = T.match_buffer(sk, (heads,), "bfloat16")
    out = T.match_buffer(o, (batch, length, heads * head_size), "bfloat16")
    state = T.alloc_buffer((head_size, state_size), "float32", scope="local")
    step = T.alloc_buffer((2,), "float32", scope="local")
    answer = T.alloc_buffer((1,), "float32", scope="local")
    place = T.alloc_buffer((2,), "int32", scope="local")
    for prompt, head in T.grid(batch, heads):
        place[0] = heads * head_size + (head // (heads // GROUPS)) * state_size
        place[1] = place[0] + GROUPS * state_size
        for row, n in T.grid(head_size, state_size):
            state[row, n] = T.float32(0)
        for token in T.serial(length):
            step[0] = softplus(float32(projected[prompt, token, width - heads + head]) + float32(step_bias[head]))
            step[0] = T.min(T.max(step[0], shortest), longest)
            step[1] = T.exp(-T.exp(float32(log_rate[head])) * step[0])
            for row in T.serial(head_size):
                answer[0] = float32(skip[head]) * float32(xbc[prompt, token, head * head_size + row])
                for n in T.serial(state_size):
                    state[row, n] = state[row, n] * step[1] + step[0] * float32(
                        xbc[prompt, token, head * head_size + row]
                    ) * float32(xbc[prompt, token, place[0] + n])
                    answer[0] = answer[0] + state[row, n] * float32(xbc[prompt, token, place[1] + n])
                out[prompt, token, head * head_size + row] = T.cast(answer[0], "bfloat16")


@T.jit
def norm_cpu(
    y: T.handle, p: T.handle, w: T.handle, eps: T.float32, o: T.handle, *, width: T.constexpr, inner: T.constexpr
):
    batch = T.int32()
    length = T.int32()
    source = T.match_buffer(y, (batch, length, inner), "bfloat16")
    projected = T.match_buffer(p, (batch, length, width), "bfloat16")
    weight = T.match_buffer(w, (inner,), "bfloat16")
    out = T.match_buffer(o, (batch, length, inner), "bfloat16")
    z = T.alloc_buffer((inner // GROUPS,), "float32", scope="local")
    total = T.alloc_buffer((1,), "float32", scope="local")
    for prompt, token, group in T.grid(batch, length, GROUPS):
        total[0] = T.float32(0)
        for c in T.serial(inner // GROUPS):
            z[c] = float32(source[prompt, token, group * (inner // GROUPS) + c]) * silu(
                float32(projected[prompt, token, group * (inner // GROUPS) + c])
            )
            total[0] = total[0] + z[c] * z[c]
        total[0] = T.float32(1) / T.sqrt(total[0] / T.float32(inner // GROUPS) + eps)
        for c in T.serial(inner // GROUPS):
            out[prompt, token, group * (inner // GROUPS) + c] = T.cast(
                z[c] * total[0] * float32(weight[group * (inner // GROUPS) + c]), "bfloat16"
            )


def compile_for(
    arch: str, heads: int = 256, head_size: int = 64, state_size: int = 256
) -> list[tvm.runtime.Executable]:
    """Convolution, scan and norm for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    inner = heads * head_size
    channels = inner + 2 * GROUPS * state_size
    width = inner + channels + heads
    scan_sizes = {"width": width, "heads": heads, "head_size": head_size, "state_size": state_size}
    if arch == "llvm":
        kernels = [
            convolution_cpu.specialize(width=width, first=inner, channels=channels),
            scan_cpu.specialize(**scan_sizes),
            norm_cpu.specialize(width=width, inner=inner),
        ]
        return [tvm.compile(tvm.IRModule({"main": kernel}), target="llvm") for kernel in kernels]
    assert head_size % ROWS == 0 and state_size % (VECTOR * LANES) == 0 and inner % (32 * GROUPS * VECTOR) == 0
    kernels = [
        convolution_cuda.specialize(width=width, first=inner, channels=channels),
        scan_cuda.specialize(**scan_sizes, vectors=state_size // (VECTOR * LANES)),
        norm_cuda.specialize(width=width, inner=inner, threads=inner // GROUPS // VECTOR),
    ]
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return [tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx") for kernel in kernels]


@cache
def kernels_for(device: torch.device, heads: int, head_size: int, state_size: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return [executable["main"] for executable in compile_for(arch, heads, head_size, state_size)]


def solve(
    hidden_states: torch.Tensor,
    in_proj_weight: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor,
    norm_weight: torch.Tensor,
    out_proj_weight: torch.Tensor,
    time_step_min: float,
    time_step_max: float,
    eps: float,
) -> torch.Tensor:
    batch, length = hidden_states.shape[:2]
    heads, inner, channels = len(A_log), len(norm_weight), len(conv_bias)
    convolve, scan, norm = kernels_for(hidden_states.device, heads, inner // heads, (channels - inner) // (2 * GROUPS))
    projected = hidden_states @ in_proj_weight.t()
    xbc = hidden_states.new_empty(batch, length, channels)
    convolve(projected, conv_weight.squeeze(1), conv_bias, xbc)
    y = hidden_states.new_empty(batch, length, inner)
    scan(xbc, projected, dt_bias, A_log, D, time_step_min, time_step_max, y)
    normed = torch.empty_like(y)
    norm(y, projected, norm_weight, eps, normed)
    return normed @ out_proj_weight.t()
