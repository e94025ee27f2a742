"""p67, a whole Hyena block, in TIRx: five kernels around the four projections, which stay with eager PyTorch.

1. Layer norm: a warp has a token. 2. The filter network: a thread block has a point in time; sines in float64.
3. The short filters, the gates and the long convolution, which is summed up directly: a thread block has 16 channels of
a sequence, with gated inputs and filter in shared memory, a thread two stretches of 8 tokens of a channel, an early and
a late one, and goes back in time 8 tokens at a time with the filter in a sliding window.
4. Bias, residual and layer norm. 5. Bias and GELU, in place. The last product adds to what the fourth kernel left.
CPU: the same five in plain loops.
"""

from functools import cache
from math import pi, sqrt

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

VECTOR = 4
ROWS = 8  # a warp each, of a thread block of the norms
CHANNELS = 16  # of a thread block of the convolution
TOKENS = 8  # in a row, that a thread of the convolution has
TAPS = 3
FILTER_ROW = CHANNELS + 2  # neighbouring stretches lie in different banks of shared memory
GELU_ROWS = 4  # of a thread
LOWEST_BAND = 1e-4


def sine(x):
    return T.cast(T.sin(T.cast(x, "float64")), "float32")


def gelu(x):
    """The tanh form, by way of the logistic function of twice the argument."""
    return x / (T.float32(1) + T.exp(T.float32(-2 * sqrt(2 / pi)) * (x + T.float32(0.044715) * x * x * x)))


def phase(token, length, band, bands):
    """Of a band's wave at a token, in float64."""
    frequency = LOWEST_BAND + band * (bands - 1 - LOWEST_BAND) / max(bands - 1, 1)
    return T.float64(frequency * 2 * pi / length) * T.cast(token, "float64")


@T.jit
def norm_cuda(
    h: T.handle, w: T.handle, b: T.handle, eps: T.float32, o: T.handle, *, width: T.constexpr, parts: T.constexpr
):
    rows = T.int32()
    source = T.match_buffer(h, (rows, width), "float32")
    weight = T.match_buffer(w, (width,), "float32")
    bias = T.match_buffer(b, (width,), "float32")
    out = T.match_buffer(o, (rows, width), "float32")
    T.device_entry()
    block = T.cta_id([T.ceildiv(rows, ROWS)])
    thread = T.thread_id([32 * ROWS])
    row = T.alloc_local((1,), "int32")
    x = T.alloc_local((parts, VECTOR), "float32")
    ws = T.alloc_local((VECTOR,), "float32")
    bs = T.alloc_local((VECTOR,), "float32")
    total = T.alloc_local((2,), "float32")
    row[0] = T.min(block * ROWS + thread // 32, rows - 1)  # beyond the end, the last row again
    for p in T.unroll(parts):
        for e in T.vectorized(VECTOR):
            x[p, e] = source[row[0], (p * 32 + thread % 32) * VECTOR + e]
    total[0] = T.float32(0)
    for p in T.unroll(parts):
        for e in T.unroll(VECTOR):
            total[0] = total[0] + x[p, e]
    total[0] = T.cuda.warp_sum(total[0]) * T.float32(1 / width)
    total[1] = T.float32(0)
    for p in T.unroll(parts):
        for e in T.unroll(VECTOR):
            x[p, e] = x[p, e] - total[0]
            total[1] = total[1] + x[p, e] * x[p, e]
    total[1] = T.rsqrt(T.cuda.warp_sum(total[1]) * T.float32(1 / width) + eps)
    for p in T.unroll(parts):
        for e in T.vectorized(VECTOR):
            ws[e] = weight[(p * 32 + thread % 32) * VECTOR + e]
        for e in T.vectorized(VECTOR):
            bs[e] = bias[(p * 32 + thread % 32) * VECTOR + e]
        for e in T.unroll(VECTOR):
            x[p, e] = x[p, e] * total[1] * ws[e] + bs[e]
        for e in T.vectorized(VECTOR):
            out[row[0], (p * 32 + thread % 32) * VECTOR + e] = x[p, e]


@T.jit
def filter_cuda(
    wi: T.handle,
    bi: T.handle,
    fr: T.handle,
    w1: T.handle,
    b1: T.handle,
    w2: T.handle,
    b2: T.handle,
    wo: T.handle,
    de: T.handle,
    shift: T.float32,
    o: T.handle,
    *,
    length: T.constexpr,
    width: T.constexpr,
    inner: T.constexpr,
    features: T.constexpr,
):
    in_weight = T.match_buffer(wi, (inner, features), "float32")
    in_bias = T.match_buffer(bi, (inner,), "float32")
    frequency = T.match_buffer(fr, (inner,), "float32")
    first_weight = T.match_buffer(w1, (inner, inner), "float32")
    first_bias = T.match_buffer(b1, (inner,), "float32")
    second_weight = T.match_buffer(w2, (inner, inner), "float32")
    second_bias = T.match_buffer(b2, (inner,), "float32")
    out_weight = T.match_buffer(wo, (width, inner), "float32")
    deltas = T.match_buffer(de, (width,), "float32")
    out = T.match_buffer(o, (length, width), "float32")
    T.device_entry()
    token = T.cta_id([length])
    thread = T.thread_id([width])
    w = T.alloc_local((inner // VECTOR, VECTOR), "float32")
    total = T.alloc_local((1,), "float32")
    wave = T.alloc_local((1,), "float64")
    hidden = T.alloc_shared((3, inner), "float32")
    if thread < inner:
        total[0] = in_bias[thread] + in_weight[thread, 0] * (T.cast(token, "float32") / T.float32(length - 1))
        for band in T.unroll(features // 2):
            wave[0] = phase(token, length, band, features // 2)
            total[0] = total[0] + in_weight[thread, 1 + band] * T.cast(T.cos(wave[0]), "float32")
            total[0] = total[0] - in_weight[thread, 1 + features // 2 + band] * T.cast(T.sin(wave[0]), "float32")
        hidden[0, thread] = sine(frequency[thread] * total[0])
    T.cuda.cta_sync()
    if thread < inner:
        for v in T.unroll(inner // VECTOR):
            for e in T.vectorized(VECTOR):
                w[v, e] = first_weight[thread, v * VECTOR + e]
        total[0] = first_bias[thread]
        for v in T.unroll(inner // VECTOR):
            for e in T.unroll(VECTOR):
                total[0] = total[0] + w[v, e] * hidden[0, v * VECTOR + e]
        hidden[1, thread] = sine(frequency[thread] * total[0])
    T.cuda.cta_sync()
    if thread < inner:
        for v in T.unroll(inner // VECTOR):
            for e in T.vectorized(VECTOR):
                w[v, e] = second_weight[thread, v * VECTOR + e]
        total[0] = second_bias[thread]
        for v in T.unroll(inner // VECTOR):
            for e in T.unroll(VECTOR):
                total[0] = total[0] + w[v, e] * hidden[1, v * VECTOR + e]
        hidden[2, thread] = sine(frequency[thread] * total[0])
    T.cuda.cta_sync()
    for v in T.unroll(inner // VECTOR):
        for e in T.vectorized(VECTOR):
            w[v, e] = out_weight[thread, v * VECTOR + e]
    total[0] = T.float32(0)
    for v in T.unroll(inner // VECTOR):
        for e in T.unroll(VECTOR):
            total[0] = total[0] + w[v, e] * hidden[2, v * VECTOR + e]
    out[token, thread] = total[0] * (
        T.exp(-(T.cast(token, "float32") / T.float32(length - 1)) * T.abs(deltas[thread])) + shift
    )


@T.jit
def convolution_cuda(
    p: T.handle,
    pb: T.handle,
    sw: T.handle,
    sb: T.handle,
    f: T.handle,
    fb: T.handle,
    o: T.handle,
    *,
    length: T.constexpr,
    width: T.constexpr,
):
    """Streams without their projection's bias, of which there is nothing before the first token."""
    batch = T.int32()
    projected = T.match_buffer(p, (batch, length, 3 * width), "float32")
    projection_bias = T.match_buffer(pb, (3 * width,), "float32")
    short_weight = T.match_buffer(sw, (3 * width, TAPS), "float32")
    short_bias = T.match_buffer(sb, (3 * width,), "float32")
    long_filter = T.match_buffer(f, (length, width), "float32")
    direct = T.match_buffer(fb, (width,), "float32")
    out = T.match_buffer(o, (batch, length, width), "float32")
    T.device_entry()
    part, sequence = T.cta_id([width // CHANNELS, batch])
    thread = T.thread_id([length])
    lane = T.alloc_local((1,), "int32")
    strip = T.alloc_local((1,), "int32")
    channel = T.alloc_local((1,), "int32")
    first = T.alloc_local((1,), "int32")
    taps = T.alloc_local((2, TAPS), "float32")
    biases = T.alloc_local((2, 2), "float32")
    window = T.alloc_local((2, 2 * TOKENS + TAPS - 1), "float32")
    sums = T.alloc_local((2,), "float32")
    total = T.alloc_local((TOKENS,), "float32")
    s = T.alloc_local((TOKENS,), "float32")
    k = T.alloc_local((2 * TOKENS,), "float32")
    gated = T.alloc_shared((length, CHANNELS), "float32")
    filters = T.alloc_shared((length + TOKENS, FILTER_ROW), "float32")  # after as many zeros as a stretch has tokens
    lane[0] = thread % CHANNELS
    strip[0] = thread // CHANNELS
    channel[0] = part * CHANNELS + lane[0]
    for t in T.unroll(CHANNELS):
        filters[TOKENS + t * (length // CHANNELS) + strip[0], lane[0]] = long_filter[
            t * (length // CHANNELS) + strip[0], channel[0]
        ]
    if strip[0] < TOKENS:
        filters[strip[0], lane[0]] = T.float32(0)
    for stream in T.unroll(2):
        for tap in T.unroll(TAPS):
            taps[stream, tap] = short_weight[(1 + stream) * width + channel[0], tap]
        biases[stream, 0] = projection_bias[(1 + stream) * width + channel[0]]
        biases[stream, 1] = short_bias[(1 + stream) * width + channel[0]]
        for t in T.unroll(2 * TOKENS + TAPS - 1):
            first[0] = strip[0] * 2 * TOKENS + t - (TAPS - 1)
            window[stream, t] = T.float32(0)
            if first[0] >= 0:
                window[stream, t] = projected[sequence, first[0], (1 + stream) * width + channel[0]] + biases[stream, 0]
    for t in T.unroll(2 * TOKENS):
        for stream in T.unroll(2):
            sums[stream] = biases[stream, 1]
            for tap in T.unroll(TAPS):
                sums[stream] = sums[stream] + taps[stream, tap] * window[stream, t + tap]
        gated[strip[0] * 2 * TOKENS + t, lane[0]] = sums[0] * sums[1]
    T.cuda.cta_sync()

    for tap in T.unroll(TAPS):
        taps[0, tap] = short_weight[channel[0], tap]
    biases[0, 0] = projection_bias[channel[0]]
    biases[0, 1] = short_bias[channel[0]]
    for late in T.unroll(2):
        if late == 0:
            first[0] = strip[0] * TOKENS
        else:
            first[0] = length - TOKENS - strip[0] * TOKENS
        for t in T.unroll(TOKENS + TAPS - 1):
            window[0, t] = T.float32(0)
            if first[0] + t >= TAPS - 1:
                window[0, t] = projected[sequence, first[0] + t - (TAPS - 1), channel[0]] + biases[0, 0]
        for t in T.unroll(TOKENS):
            total[t] = T.float32(0)
            k[t] = filters[first[0] + TOKENS + t, lane[0]]  # what will be shifted up
        for back in T.serial(first[0] // TOKENS + 1):
            # The inputs are those from token 8·back on; k[8 + n] is the filter at the difference of both starts plus n.
            for t in T.unroll(TOKENS):
                k[TOKENS + t] = k[t]
                k[t] = filters[first[0] - back * TOKENS + t, lane[0]]
                s[t] = gated[back * TOKENS + t, lane[0]]
            for t in T.unroll(TOKENS):
                for q in T.unroll(TOKENS):
                    total[t] = total[t] + k[TOKENS + t - q] * s[q]
        for t in T.unroll(TOKENS):
            sums[0] = biases[0, 1]
            for tap in T.unroll(TAPS):
                sums[0] = sums[0] + taps[0, tap] * window[0, t + tap]
            out[sequence, first[0] + t, channel[0]] = (
                total[t] + direct[channel[0]] * gated[first[0] + t, lane[0]]
            ) * sums[0]


@T.jit
def residual_norm_cuda(
    m: T.handle,
    mb: T.handle,
    h: T.handle,
    w: T.handle,
    b: T.handle,
    nb: T.handle,
    eps: T.float32,
    r: T.handle,
    o: T.handle,
    *,
    width: T.constexpr,
    parts: T.constexpr,
):
    """The residual already contains the bias of the block's last product."""
    rows = T.int32()
    mixed = T.match_buffer(m, (rows, width), "float32")
    mixed_bias = T.match_buffer(mb, (width,), "float32")
    hidden = T.match_buffer(h, (rows, width), "float32")
    weight = T.match_buffer(w, (width,), "float32")
    bias = T.match_buffer(b, (width,), "float32")
    next_bias = T.match_buffer(nb, (width,), "float32")
    residual = T.match_buffer(r, (rows, width), "float32")
    out = T.match_buffer(o, (rows, width), "float32")
    T.device_entry()
    block = T.cta_id([T.ceildiv(rows, ROWS)])
    thread = T.thread_id([32 * ROWS])
    row = T.alloc_local((1,), "int32")
    x = T.alloc_local((parts, VECTOR), "float32")
    a = T.alloc_local((parts, VECTOR), "float32")
    ws = T.alloc_local((VECTOR,), "float32")
    bs = T.alloc_local((VECTOR,), "float32")
    total = T.alloc_local((2,), "float32")
    row[0] = T.min(block * ROWS + thread // 32, rows - 1)  # beyond the end, the last row again
    for p in T.unroll(parts):
        for e in T.vectorized(VECTOR):
            x[p, e] = mixed[row[0], (p * 32 + thread % 32) * VECTOR + e]
        for e in T.vectorized(VECTOR):
            a[p, e] = hidden[row[0], (p * 32 + thread % 32) * VECTOR + e]
    total[0] = T.float32(0)
    for p in T.unroll(parts):
        for e in T.vectorized(VECTOR):
            bs[e] = mixed_bias[(p * 32 + thread % 32) * VECTOR + e]
        for e in T.vectorized(VECTOR):
            ws[e] = next_bias[(p * 32 + thread % 32) * VECTOR + e]
        for e in T.unroll(VECTOR):
            x[p, e] = x[p, e] + bs[e] + a[p, e]
            total[0] = total[0] + x[p, e]
            a[p, e] = x[p, e] + ws[e]
        for e in T.vectorized(VECTOR):
            residual[row[0], (p * 32 + thread % 32) * VECTOR + e] = a[p, e]
    total[0] = T.cuda.warp_sum(total[0]) * T.float32(1 / width)
    total[1] = T.float32(0)
    for p in T.unroll(parts):
        for e in T.unroll(VECTOR):
            x[p, e] = x[p, e] - total[0]
            total[1] = total[1] + x[p, e] * x[p, e]
    total[1] = T.rsqrt(T.cuda.warp_sum(total[1]) * T.float32(1 / width) + eps)
    for p in T.unroll(parts):
        for e in T.vectorized(VECTOR):
            ws[e] = weight[(p * 32 + thread % 32) * VECTOR + e]
        for e in T.vectorized(VECTOR):
            bs[e] = bias[(p * 32 + thread % 32) * VECTOR + e]
        for e in T.unroll(VECTOR):
            x[p, e] = x[p, e] * total[1] * ws[e] + bs[e]
        for e in T.vectorized(VECTOR):
            out[row[0], (p * 32 + thread % 32) * VECTOR + e] = x[p, e]


@T.jit
def gelu_cuda(i: T.handle, b: T.handle, *, width: T.constexpr):
    rows = T.int32()
    inner = T.match_buffer(i, (rows, width), "float32")
    bias = T.match_buffer(b, (width,), "float32")
    T.device_entry()
    block = T.cta_id([T.ceildiv(rows, GELU_ROWS)])
    thread = T.thread_id([width // VECTOR])
    x = T.alloc_local((GELU_ROWS, VECTOR), "float32")
    bs = T.alloc_local((VECTOR,), "float32")
    for e in T.vectorized(VECTOR):
        bs[e] = bias[thread * VECTOR + e]
    for r in T.unroll(GELU_ROWS):
        if block * GELU_ROWS + r < rows:
            for e in T.vectorized(VECTOR):
                x[r, e] = inner[block * GELU_ROWS + r, thread * VECTOR + e]
    for r in T.unroll(GELU_ROWS):
        for e in T.unroll(VECTOR):
            x[r, e] = gelu(x[r, e] + bs[e])
        if block * GELU_ROWS + r < rows:
            for e in T.vectorized(VECTOR):
                inner[block * GELU_ROWS + r, thread * VECTOR + e] = x[r, e]


@T.jit
def norm_cpu(h: T.handle, w: T.handle, b: T.handle, eps: T.float32, o: T.handle, *, width: T.constexpr):
    rows = T.int32()
    source = T.match_buffer(h, (rows, width), "float32")
    weight = T.match_buffer(w, (width,), "float32")
    bias = T.match_buffer(b, (width,), "float32")
    out = T.match_buffer(o, (rows, width), "float32")
    total = T.alloc_buffer((2,), "float32", scope="local")
    for row in T.serial(rows):
        total[0] = T.float32(0)
        total[1] = T.float32(0)
        for c in T.serial(width):
            total[0] = total[0] + source[row, c] * T.float32(1 / width)
        for c in T.serial(width):
            total[1] = total[1] + (source[row, c] - total[0]) * (source[row, c] - total[0])
        total[1] = T.float32(1) / T.sqrt(total[1] * T.float32(1 / width) + eps)
        for c in T.serial(width):
            out[row, c] = (source[row, c] - total[0]) * total[1] * weight[c] + bias[c]


@T.jit
def filter_cpu(
    wi: T.handle,
    bi: T.handle,
    fr: T.handle,
    w1: T.handle,
    b1: T.handle,
    w2: T.handle,
    b2: T.handle,
    wo: T.handle,
    de: T.handle,
    shift: T.float32,
    o: T.handle,
    *,
    length: T.constexpr,
    width: T.constexpr,
    inner: T.constexpr,
    features: T.constexpr,
):
    in_weight = T.match_buffer(wi, (inner, features), "float32")
    in_bias = T.match_buffer(bi, (inner,), "float32")
    frequency = T.match_buffer(fr, (inner,), "float32")
    first_weight = T.match_buffer(w1, (inner, inner), "float32")
    first_bias = T.match_buffer(b1, (inner,), "float32")
    second_weight = T.match_buffer(w2, (inner, inner), "float32")
    second_bias = T.match_buffer(b2, (inner,), "float32")
    out_weight = T.match_buffer(wo, (width, inner), "float32")
    deltas = T.match_buffer(de, (width,), "float32")
    out = T.match_buffer(o, (length, width), "float32")
    total = T.alloc_buffer((1,), "float32", scope="local")
    wave = T.alloc_buffer((1,), "float64", scope="local")
    hidden = T.alloc_buffer((3, inner), "float32", scope="local")
    for token in T.serial(length):
        for unit in T.serial(inner):
            total[0] = in_bias[unit] + in_weight[unit, 0] * (T.cast(token, "float32") / T.float32(length - 1))
            for band in T.unroll(features // 2):
                wave[0] = phase(token, length, band, features // 2)
                total[0] = total[0] + in_weight[unit, 1 + band] * T.cast(T.cos(wave[0]), "float32")
                total[0] = total[0] - in_weight[unit, 1 + features // 2 + band] * T.cast(T.sin(wave[0]), "float32")
            hidden[0, unit] = sine(frequency[unit] * total[0])
        for unit in T.serial(inner):
            total[0] = first_bias[unit]
            for c in T.serial(inner):
                total[0] = total[0] + first_weight[unit, c] * hidden[0, c]
            hidden[1, unit] = sine(frequency[unit] * total[0])
        for unit in T.serial(inner):
            total[0] = second_bias[unit]
            for c in T.serial(inner):
                total[0] = total[0] + second_weight[unit, c] * hidden[1, c]
            hidden[2, unit] = sine(frequency[unit] * total[0])
        for channel in T.serial(width):
            total[0] = T.float32(0)
            for c in T.serial(inner):
                total[0] = total[0] + out_weight[channel, c] * hidden[2, c]
            out[token, channel] = total[0] * (
                T.exp(-(T.cast(token, "float32") / T.float32(length - 1)) * T.abs(deltas[channel])) + shift
            )


@T.jit
def convolution_cpu(
    p: T.handle,
    pb: T.handle,
    sw: T.handle,
    sb: T.handle,
    f: T.handle,
    fb: T.handle,
    o: T.handle,
    *,
    length: T.constexpr,
    width: T.constexpr,
):
    batch = T.int32()
    projected = T.match_buffer(p, (batch, length, 3 * width), "float32")
    projection_bias = T.match_buffer(pb, (3 * width,), "float32")
    short_weight = T.match_buffer(sw, (3 * width, TAPS), "float32")
    short_bias = T.match_buffer(sb, (3 * width,), "float32")
    long_filter = T.match_buffer(f, (length, width), "float32")
    direct = T.match_buffer(fb, (width,), "float32")
    out = T.match_buffer(o, (batch, length, width), "float32")
    streams = T.alloc_buffer((3, length), "float32", scope="local")
    total = T.alloc_buffer((1,), "float32", scope="local")
    for sequence, channel in T.grid(batch, width):
        for stream, token in T.grid(3, length):
            streams[stream, token] = short_bias[stream * width + channel]
            for tap in T.serial(TAPS):
                if token + tap >= TAPS - 1:
                    streams[stream, token] = streams[stream, token] + short_weight[stream * width + channel, tap] * (
                        projected[sequence, token + tap - (TAPS - 1), stream * width + channel]
                        + projection_bias[stream * width + channel]
                    )
        for token in T.serial(length):
            streams[1, token] = streams[1, token] * streams[2, token]
        for token in T.serial(length):
            total[0] = direct[channel] * streams[1, token]
            for before in T.serial(token + 1):
                total[0] = total[0] + long_filter[token - before, channel] * streams[1, before]
            out[sequence, token, channel] = total[0] * streams[0, token]


@T.jit
def residual_norm_cpu(
    m: T.handle,
    mb: T.handle,
    h: T.handle,
    w: T.handle,
    b: T.handle,
    nb: T.handle,
    eps: T.float32,
    r: T.handle,
    o: T.handle,
    *,
    width: T.constexpr,
):
    rows = T.int32()
    mixed = T.match_buffer(m, (rows, width), "float32")
    mixed_bias = T.match_buffer(mb, (width,), "float32")
    hidden = T.match_buffer(h, (rows, width), "float32")
    weight = T.match_buffer(w, (width,), "float32")
    bias = T.match_buffer(b, (width,), "float32")
    next_bias = T.match_buffer(nb, (width,), "float32")
    residual = T.match_buffer(r, (rows, width), "float32")
    out = T.match_buffer(o, (rows, width), "float32")
    x = T.alloc_buffer((width,), "float32", scope="local")
    total = T.alloc_buffer((2,), "float32", scope="local")
    for row in T.serial(rows):
        total[0] = T.float32(0)
        total[1] = T.float32(0)
        for c in T.serial(width):
            x[c] = mixed[row, c] + mixed_bias[c] + hidden[row, c]
            total[0] = total[0] + x[c] * T.float32(1 / width)
            residual[row, c] = x[c] + next_bias[c]
        for c in T.serial(width):
            total[1] = total[1] + (x[c] - total[0]) * (x[c] - total[0])
        total[1] = T.float32(1) / T.sqrt(total[1] * T.float32(1 / width) + eps)
        for c in T.serial(width):
            out[row, c] = (x[c] - total[0]) * total[1] * weight[c] + bias[c]


@T.jit
def gelu_cpu(i: T.handle, b: T.handle, *, width: T.constexpr):
    rows = T.int32()
    inner = T.match_buffer(i, (rows, width), "float32")
    bias = T.match_buffer(b, (width,), "float32")
    for row, c in T.grid(rows, width):
        inner[row, c] = gelu(inner[row, c] + bias[c])


def compile_for(
    arch: str,
    length: int = 256,
    width: int = 256,
    mlp_width: int = 1024,
    filter_width: int = 64,
    features: int = 5,
) -> list[tvm.runtime.Executable]:
    """The five kernels for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    network = {"length": length, "width": width, "inner": filter_width, "features": features}
    if arch == "llvm":
        kernels = [
            norm_cpu.specialize(width=width),
            filter_cpu.specialize(**network),
            convolution_cpu.specialize(length=length, width=width),
            residual_norm_cpu.specialize(width=width),
            gelu_cpu.specialize(width=mlp_width),
        ]
        return [tvm.compile(tvm.IRModule({"main": kernel}), target="llvm") for kernel in kernels]
    assert width % 128 == 0 and filter_width % VECTOR == 0 and filter_width <= width <= 1024
    assert length % (2 * TOKENS) == 0 and 2 * TOKENS == CHANNELS and TOKENS * CHANNELS <= length <= 320
    assert mlp_width % 128 == 0 and mlp_width <= 4096
    kernels = [
        norm_cuda.specialize(width=width, parts=width // 128),
        filter_cuda.specialize(**network),
        convolution_cuda.specialize(length=length, width=width),
        residual_norm_cuda.specialize(width=width, parts=width // 128),
        gelu_cuda.specialize(width=mlp_width),
    ]
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return [tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx") for kernel in kernels]


@cache
def kernels_for(device: torch.device, length: int, width: int, mlp_width: int, filter_width: int, features: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return [executable["main"] for executable in compile_for(arch, length, width, mlp_width, filter_width, features)]


def solve(
    hidden_states: torch.Tensor,
    norm1_weight: torch.Tensor,
    norm1_bias: torch.Tensor,
    norm2_weight: torch.Tensor,
    norm2_bias: torch.Tensor,
    in_proj_weight: torch.Tensor,
    in_proj_bias: torch.Tensor,
    short_filter_weight: torch.Tensor,
    short_filter_bias: torch.Tensor,
    filter_in_weight: torch.Tensor,
    filter_in_bias: torch.Tensor,
    sin_freq: torch.Tensor,
    filter_mid1_weight: torch.Tensor,
    filter_mid1_bias: torch.Tensor,
    filter_mid2_weight: torch.Tensor,
    filter_mid2_bias: torch.Tensor,
    filter_out_weight: torch.Tensor,
    filter_bias: torch.Tensor,
    exp_mod_deltas: torch.Tensor,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor,
    fc2_weight: torch.Tensor,
    fc2_bias: torch.Tensor,
    layer_norm_eps: float,
    exp_mod_shift: float,
) -> torch.Tensor:
    batch, length, width = hidden_states.shape
    sizes = (length, width, len(fc1_bias), *filter_in_weight.shape)
    norm, make_filter, convolve, residual_norm, gelu_in_place = kernels_for(hidden_states.device, *sizes)
    hidden = hidden_states.view(-1, width)
    normed, residual, gated = (torch.empty_like(hidden) for _ in range(3))
    long_filter = hidden.new_empty(length, width)
    norm(hidden, norm1_weight, norm1_bias, layer_norm_eps, normed)
    projected = normed @ in_proj_weight.t()
    make_filter(
        *(filter_in_weight, filter_in_bias, sin_freq.view(-1), filter_mid1_weight, filter_mid1_bias),
        *(filter_mid2_weight, filter_mid2_bias, filter_out_weight, exp_mod_deltas.view(-1), exp_mod_shift, long_filter),
    )
    convolve(
        *(projected.view(batch, length, -1), in_proj_bias, short_filter_weight.squeeze(1), short_filter_bias),
        *(long_filter, filter_bias, gated.view(batch, length, width)),
    )
    mixed = gated @ out_proj_weight.t()
    biases = (norm2_weight, norm2_bias, fc2_bias)
    residual_norm(mixed, out_proj_bias, hidden, *biases, layer_norm_eps, residual, normed)
    inner = normed @ fc1_weight.t()
    gelu_in_place(inner, fc1_bias)
    return residual.addmm_(inner, fc2_weight.t()).view_as(hidden_states)
