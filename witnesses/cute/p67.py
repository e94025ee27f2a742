"""p67, a whole Hyena block, in CuTe DSL: five kernels around the four projections, which stay with eager PyTorch.

1. Layer norm: a warp has a token. 2. The filter network: a thread block has a point in time.
3. The short filters, the gates and the long convolution, which is summed up directly: a thread block has 16 channels of
a sequence, with gated inputs and filter in shared memory, a thread two stretches of 8 tokens of a channel, an early and
a late one, and goes back in time 8 tokens at a time with the filter in a sliding window.
4. Bias, residual and layer norm. 5. Bias and GELU, in place. The last product adds to what the fourth kernel left.
"""

from functools import cache
from math import pi, sqrt

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

VECTOR = 4  # float32 values in 16 bytes
ROWS = 8  # a warp each, of a thread block of the norms
CHANNELS = 16  # of a thread block of the convolution
TOKENS = 8  # in a row, that a thread of the convolution has
TAPS = 3
FILTER_ROW = CHANNELS + 2  # neighbouring stretches lie in different banks of shared memory
GELU_ROWS = 4  # of a thread
LOWEST_BAND = 1e-4
LOG2_E = 1.4426950408889634


@cute.jit
def load_row(row: cute.Tensor, lane: cutlass.Int32) -> cute.Tensor:
    parts = cutlass.const_expr(row.shape[0] // (32 * VECTOR))
    values = cute.make_rmem_tensor((VECTOR, parts), cutlass.Float32)
    for p in cutlass.range_constexpr(parts):
        cute.autovec_copy(cute.local_tile(row, (VECTOR,), (p * 32 + lane,)), values[None, p])
    return values


@cute.jit
def store_row(values: cute.Tensor, row: cute.Tensor, lane: cutlass.Int32):
    for p in cutlass.range_constexpr(cute.size(values, mode=[1])):
        cute.autovec_copy(values[None, p], cute.local_tile(row, (VECTOR,), (p * 32 + lane,)))


@cute.jit
def row_mean(values, width: cutlass.Constexpr[int]) -> cutlass.Float32:
    total = values.reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
    return cute.arch.warp_reduction_sum(total) * cutlass.Float32(1 / width)


@cute.jit
def normalise(x, weight: cute.Tensor, bias: cute.Tensor, eps: cutlass.Float32, lane: cutlass.Int32):
    width = cutlass.const_expr(weight.shape[0])
    centred = x - row_mean(x, width)
    scale = cute.math.rsqrt(row_mean(centred * centred, width) + eps)
    return centred * scale * load_row(weight, lane).load() + load_row(bias, lane).load()


@cute.kernel
def norm_kernel(source: cute.Tensor, weight: cute.Tensor, bias: cute.Tensor, eps: cutlass.Float32, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    lane = thread % 32
    row = cutlass.min(block * ROWS + thread // 32, source.shape[0] - 1)  # beyond the end, the last row again
    x = load_row(source[row, None], lane)
    x.store(normalise(x.load(), weight, bias, eps, lane))
    store_row(x, out[row, None], lane)


@cute.jit
def dot(weight: cute.Tensor, hidden: cute.Tensor, total: cutlass.Float32) -> cutlass.Float32:
    w = cute.make_rmem_tensor(weight.shape[0], cutlass.Float32)
    cute.autovec_copy(weight, w)
    for c in cutlass.range_constexpr(weight.shape[0]):
        total += w[c] * hidden[c]
    return total


@cute.kernel
def filter_kernel(
    in_weight: cute.Tensor,
    in_bias: cute.Tensor,
    frequency: cute.Tensor,
    first_weight: cute.Tensor,
    first_bias: cute.Tensor,
    second_weight: cute.Tensor,
    second_bias: cute.Tensor,
    out_weight: cute.Tensor,
    deltas: cute.Tensor,
    shift: cutlass.Float32,
    out: cute.Tensor,
):
    thread, _, _ = cute.arch.thread_idx()
    token, _, _ = cute.arch.block_idx()
    inner, length = cutlass.const_expr(in_weight.shape[0]), cutlass.const_expr(out.shape[0])
    bands = cutlass.const_expr(in_weight.shape[1] // 2)
    hidden = cutlass.utils.SmemAllocator().allocate_tensor(
        cutlass.Float32, cute.make_layout((inner, 3), stride=(1, inner)), 16
    )
    time = token.to(cutlass.Float32) / cutlass.Float32(length - 1)
    if thread < inner:
        total = in_bias[thread] + in_weight[thread, 0] * time
        for band in cutlass.range_constexpr(bands):
            wave = (LOWEST_BAND + band * (bands - 1 - LOWEST_BAND) / max(bands - 1, 1)) * 2 * pi / length
            phase = (token.to(cutlass.Float64) * cutlass.Float64(wave)).to(cutlass.Float32)
            total += in_weight[thread, 1 + band] * cute.math.cos(phase)
            total -= in_weight[thread, 1 + bands + band] * cute.math.sin(phase)
        hidden[thread, 0] = cute.math.sin(frequency[thread] * total)
    cute.arch.sync_threads()
    if thread < inner:
        first = dot(first_weight[thread, None], hidden[None, 0], first_bias[thread])
        hidden[thread, 1] = cute.math.sin(frequency[thread] * first)
    cute.arch.sync_threads()
    if thread < inner:
        second = dot(second_weight[thread, None], hidden[None, 1], second_bias[thread])
        hidden[thread, 2] = cute.math.sin(frequency[thread] * second)
    cute.arch.sync_threads()
    value = dot(out_weight[thread, None], hidden[None, 2], cutlass.Float32(0.0))
    delta = deltas[thread]
    window = cute.math.exp(-time * cute.arch.fmax(delta, -delta)) + shift
    out[token, thread] = value * window


@cute.kernel
def convolution_kernel(
    projected: cute.Tensor,
    projection_bias: cute.Tensor,
    short_weight: cute.Tensor,
    short_bias: cute.Tensor,
    long_filter: cute.Tensor,
    direct: cute.Tensor,
    out: cute.Tensor,
):
    """Streams without their projection's bias, of which there is nothing before the first token."""
    thread, _, _ = cute.arch.thread_idx()
    part, sequence, _ = cute.arch.block_idx()
    length, width = cutlass.const_expr(out.shape[1]), cutlass.const_expr(out.shape[2])
    strips = cutlass.const_expr(length // CHANNELS)
    lane, strip = thread % CHANNELS, thread // CHANNELS
    channel = part * CHANNELS + lane
    streams = projected[sequence, None, None]
    memory = cutlass.utils.SmemAllocator()
    gated = memory.allocate_tensor(cutlass.Float32, cute.make_layout((length, CHANNELS), stride=(CHANNELS, 1)), 16)
    # After as many zeros as a stretch has tokens.
    filters = memory.allocate_tensor(
        cutlass.Float32, cute.make_layout((length + TOKENS, FILTER_ROW), stride=(FILTER_ROW, 1)), 16
    )
    window = cute.make_rmem_tensor((2 * TOKENS + TAPS - 1, 2), cutlass.Float32)
    total = cute.make_rmem_tensor(TOKENS, cutlass.Float32)
    s = cute.make_rmem_tensor(TOKENS, cutlass.Float32)
    k = cute.make_rmem_tensor(2 * TOKENS, cutlass.Float32)

    for t in cutlass.range_constexpr(CHANNELS):
        filters[TOKENS + t * strips + strip, lane] = long_filter[t * strips + strip, channel]
    if strip < TOKENS:
        filters[strip, lane] = cutlass.Float32(0.0)
    window.fill(0.0)
    for stream in cutlass.range_constexpr(2):
        row = (1 + stream) * width + channel
        before = projection_bias[row]
        for t in cutlass.range_constexpr(2 * TOKENS + TAPS - 1):
            token = strip * (2 * TOKENS) + (t - (TAPS - 1))
            if token >= 0:
                window[t, stream] = streams[token, row] + before
    for t in cutlass.range_constexpr(2 * TOKENS):
        product = cutlass.Float32(1.0)
        for stream in cutlass.range_constexpr(2):
            row = (1 + stream) * width + channel
            value = short_bias[row]
            for tap in cutlass.range_constexpr(TAPS):
                value += short_weight[row, tap] * window[t + tap, stream]
            product *= value
        gated[strip * (2 * TOKENS) + t, lane] = product
    cute.arch.sync_threads()

    before, skip, bias = projection_bias[channel], direct[channel], short_bias[channel]
    for late in cutlass.range_constexpr(2):
        first = strip * TOKENS
        if cutlass.const_expr(late == 1):
            first = length - TOKENS - strip * TOKENS
        window.fill(0.0)
        for t in cutlass.range_constexpr(TOKENS + TAPS - 1):
            token = first + (t - (TAPS - 1))
            if token >= 0:
                window[t, 0] = streams[token, channel] + before
        total.fill(0.0)
        for t in cutlass.range_constexpr(TOKENS):
            k[t] = filters[first + TOKENS + t, lane]  # what will be shifted up
        for back in cutlass.range(first // TOKENS + 1):
            # The inputs are those from token 8·back on; k[8 + n] is the filter at the difference of both starts plus n.
            for t in cutlass.range_constexpr(TOKENS):
                k[TOKENS + t] = k[t]
                k[t] = filters[first - back * TOKENS + t, lane]
                s[t] = gated[back * TOKENS + t, lane]
            for t in cutlass.range_constexpr(TOKENS):
                for q in cutlass.range_constexpr(TOKENS):
                    total[t] = total[t] + k[TOKENS + t - q] * s[q]
        for t in cutlass.range_constexpr(TOKENS):
            gate = bias
            for tap in cutlass.range_constexpr(TAPS):
                gate += short_weight[channel, tap] * window[t + tap, 0]
            out[sequence, first + t, channel] = (total[t] + skip * gated[first + t, lane]) * gate


@cute.kernel
def residual_norm_kernel(
    mixed: cute.Tensor,
    mixed_bias: cute.Tensor,
    hidden: cute.Tensor,
    weight: cute.Tensor,
    bias: cute.Tensor,
    next_bias: cute.Tensor,
    eps: cutlass.Float32,
    residual: cute.Tensor,
    out: cute.Tensor,
):
    """The residual already contains the bias of the block's last product."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    lane = thread % 32
    row = cutlass.min(block * ROWS + thread // 32, mixed.shape[0] - 1)  # beyond the end, the last row again
    x, before = load_row(mixed[row, None], lane), load_row(hidden[row, None], lane)
    total = x.load() + load_row(mixed_bias, lane).load() + before.load()
    x.store(total + load_row(next_bias, lane).load())
    store_row(x, residual[row, None], lane)
    x.store(normalise(total, weight, bias, eps, lane))
    store_row(x, out[row, None], lane)


@cute.kernel
def gelu_kernel(inner: cute.Tensor, bias: cute.Tensor):
    """The tanh form, by way of the logistic function of twice the argument."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    x = cute.make_rmem_tensor((VECTOR, GELU_ROWS), cutlass.Float32)
    biases = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    cute.autovec_copy(cute.local_tile(bias, (VECTOR,), (thread,)), biases)
    for r in cutlass.range_constexpr(GELU_ROWS):
        row = block * GELU_ROWS + r
        if row < inner.shape[0]:
            cute.autovec_copy(cute.local_tile(inner[row, None], (VECTOR,), (thread,)), x[None, r])
    for r in cutlass.range_constexpr(GELU_ROWS):
        row = block * GELU_ROWS + r
        z = x[None, r].load() + biases.load()
        exponent = (z + 0.044715 * z * z * z) * (-2.0 * LOG2_E * sqrt(2 / pi))
        below = 1.0 + cute.math.exp2(exponent, fastmath=True)
        for e in cutlass.range_constexpr(VECTOR):
            x[e, r] = z[e] * cute.arch.rcp_approx(below[e])
        if row < inner.shape[0]:
            cute.autovec_copy(x[None, r], cute.local_tile(inner[row, None], (VECTOR,), (thread,)))


@cute.jit
def norm_and_filter(
    source: cute.Tensor,
    weight: cute.Tensor,
    bias: cute.Tensor,
    eps: cutlass.Float32,
    normed: cute.Tensor,
    in_weight: cute.Tensor,
    in_bias: cute.Tensor,
    frequency: cute.Tensor,
    first_weight: cute.Tensor,
    first_bias: cute.Tensor,
    second_weight: cute.Tensor,
    second_bias: cute.Tensor,
    out_weight: cute.Tensor,
    deltas: cute.Tensor,
    shift: cutlass.Float32,
    long_filter: cute.Tensor,
    stream,
):
    norm_kernel(source, weight, bias, eps, normed).launch(
        grid=((source.shape[0] + ROWS - 1) // ROWS, 1, 1), block=(32 * ROWS, 1, 1), stream=stream
    )
    filter_kernel(
        *(in_weight, in_bias, frequency, first_weight, first_bias, second_weight, second_bias),
        *(out_weight, deltas, shift, long_filter),
    ).launch(grid=(long_filter.shape[0], 1, 1), block=(long_filter.shape[1], 1, 1), stream=stream)


@cute.jit
def convolve(
    projected: cute.Tensor,
    projection_bias: cute.Tensor,
    short_weight: cute.Tensor,
    short_bias: cute.Tensor,
    long_filter: cute.Tensor,
    direct: cute.Tensor,
    out: cute.Tensor,
    stream,
):
    convolution_kernel(projected, projection_bias, short_weight, short_bias, long_filter, direct, out).launch(
        grid=(out.shape[2] // CHANNELS, out.shape[0], 1), block=(out.shape[1], 1, 1), stream=stream
    )


@cute.jit
def residual_norm(
    mixed: cute.Tensor,
    mixed_bias: cute.Tensor,
    hidden: cute.Tensor,
    weight: cute.Tensor,
    bias: cute.Tensor,
    next_bias: cute.Tensor,
    eps: cutlass.Float32,
    residual: cute.Tensor,
    out: cute.Tensor,
    stream,
):
    residual_norm_kernel(mixed, mixed_bias, hidden, weight, bias, next_bias, eps, residual, out).launch(
        grid=((mixed.shape[0] + ROWS - 1) // ROWS, 1, 1), block=(32 * ROWS, 1, 1), stream=stream
    )


@cute.jit
def gelu_in_place(inner: cute.Tensor, bias: cute.Tensor, stream):
    gelu_kernel(inner, bias).launch(
        grid=((inner.shape[0] + GELU_ROWS - 1) // GELU_ROWS, 1, 1),
        block=(inner.shape[1] // VECTOR, 1, 1),
        stream=stream,
    )


def compile_for(
    arch: str,
    length: int = 256,
    width: int = 256,
    mlp_width: int = 1024,
    filter_width: int = 64,
    features: int = 5,
):
    """The kernels for `arch` (`sm_90a`, `sm_100a`, ...), in four calls; needs no GPU."""
    assert width % 128 == 0 and filter_width % VECTOR == 0 and filter_width <= width <= 1024
    assert length % (2 * TOKENS) == 0 and 2 * TOKENS == CHANNELS and TOKENS * CHANNELS <= length <= 320
    assert mlp_width % 128 == 0 and mlp_width <= 4096
    rows, batch = cute.sym_int(), cute.sym_int()

    def fake(*shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(cutlass.Float32, shape, stride_order=order, assumed_align=16)

    def compiled(function, *arguments):
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return cute.compile(function, *arguments, stream, options=f"--enable-tvm-ffi --gpu-arch {arch}")

    tokens, vector, inner, square = fake(rows, width), fake(width), fake(filter_width), fake(filter_width, filter_width)
    number, long_filter = cutlass.Float32(0.0), fake(length, width)
    return (
        compiled(
            *(norm_and_filter, tokens, vector, vector, number, tokens, fake(filter_width, features), inner, inner),
            *(square, inner, square, inner, fake(width, filter_width), vector, number, long_filter),
        ),
        compiled(
            *(convolve, fake(batch, length, 3 * width), fake(3 * width), fake(3 * width, TAPS), fake(3 * width)),
            *(long_filter, vector, fake(batch, length, width)),
        ),
        compiled(residual_norm, tokens, vector, tokens, vector, vector, vector, number, tokens, tokens),
        compiled(gelu_in_place, fake(rows, mlp_width), fake(mlp_width)),
    )


@cache
def kernels_for(device: torch.device, length: int, width: int, mlp_width: int, filter_width: int, features: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", length, width, mlp_width, filter_width, features)


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
    start, convolution, middle, activation = kernels_for(hidden_states.device, *sizes)
    hidden = hidden_states.view(-1, width)
    normed, residual, gated = (torch.empty_like(hidden) for _ in range(3))
    long_filter = hidden.new_empty(length, width)
    start(
        *(hidden, norm1_weight, norm1_bias, layer_norm_eps, normed),
        *(filter_in_weight, filter_in_bias, sin_freq.view(-1), filter_mid1_weight, filter_mid1_bias),
        *(filter_mid2_weight, filter_mid2_bias, filter_out_weight, exp_mod_deltas.view(-1), exp_mod_shift, long_filter),
    )
    projected = normed @ in_proj_weight.t()
    convolution(
        *(projected.view(batch, length, -1), in_proj_bias, short_filter_weight.squeeze(1), short_filter_bias),
        *(long_filter, filter_bias, gated.view(batch, length, width)),
    )
    mixed = gated @ out_proj_weight.t()
    biases = (norm2_weight, norm2_bias, fc2_bias)
    middle(mixed, out_proj_bias, hidden, *biases, layer_norm_eps, residual, normed)
    inner = normed @ fc1_weight.t()
    activation(inner, fc1_bias)
    return residual.addmm_(inner, fc2_weight.t()).view_as(hidden_states)
