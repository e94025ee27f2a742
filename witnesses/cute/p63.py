"""p63, one whole Mamba-2 layer, in CuTe DSL: three kernels between the two projections, which stay with eager PyTorch.

1. Convolution and SiLU: a thread walks along the time with 8 channels, and keeps the last three tokens in registers.
2. The scan, token by token, as the rule is stated: a thread block has one head, a thread 4 of its 64 channels times 16
   of 256 state places, from the first token to the last. The next token is on its way while one is worked on.
3. The gated norm: a thread block has one group of one token.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

GROUPS = 8
VECTOR = 8  # bfloat16 values in 16 bytes
TAPS = 4
THREADS = 256
TOKENS = 16  # that a thread of the convolution walks along
ROWS = 4  # channels of a head that a thread of the scan has
LANES = 16  # threads that share these channels


@cute.jit
def silu(x):
    return x / (1.0 + cute.math.exp(-x))


@cute.kernel
def convolution_kernel(
    projected: cute.Tensor, weight: cute.Tensor, bias: cute.Tensor, out: cute.Tensor, first_channel: cutlass.Constexpr
):
    thread, _, _ = cute.arch.thread_idx()
    part, stretch, prompt = cute.arch.block_idx()
    place = part * THREADS + thread  # in vectors
    length = out.shape[1]
    offset = cutlass.const_expr(first_channel // VECTOR)
    if place < cutlass.const_expr(out.shape[2] // VECTOR):
        taps = cute.make_rmem_tensor((TAPS, VECTOR), cutlass.BFloat16)
        biases = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
        window = cute.make_rmem_tensor((VECTOR, TAPS), cutlass.Float32)  # the last tokens, the current one last
        x = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
        window.fill(0.0)
        for e in cutlass.range_constexpr(VECTOR):
            cute.autovec_copy(weight[place * VECTOR + e, None], taps[None, e])
        cute.autovec_copy(cute.local_tile(bias, (VECTOR,), (place,)), biases)
        start = stretch * TOKENS
        for t in cutlass.range_constexpr(TAPS - 1):
            token = start + t - (TAPS - 1)
            if token >= 0:
                cute.autovec_copy(cute.local_tile(projected[prompt, token, None], (VECTOR,), (offset + place,)), x)
                window[None, t + 1].store(x.load().to(cutlass.Float32))
        for t in cutlass.range(TOKENS):
            token = start + t
            if token < length:
                for older in cutlass.range_constexpr(TAPS - 1):
                    window[None, older].store(window[None, older + 1].load())
                cute.autovec_copy(cute.local_tile(projected[prompt, token, None], (VECTOR,), (offset + place,)), x)
                window[None, TAPS - 1].store(x.load().to(cutlass.Float32))
                total = biases.load().to(cutlass.Float32)
                for tap in cutlass.range_constexpr(TAPS):
                    total = total + window[None, tap].load() * taps[tap, None].load().to(cutlass.Float32)
                x.store(silu(total).to(cutlass.BFloat16))
                cute.autovec_copy(x, cute.local_tile(out[prompt, token, None], (VECTOR,), (place,)))


@cute.jit
def load_token(
    xbc: cute.Tensor,
    first_row: cutlass.Int32,
    b_place: cutlass.Int32,
    c_place: cutlass.Int32,
    x: cute.Tensor,
    b: cute.Tensor,
    c: cute.Tensor,
):
    cute.autovec_copy(cute.local_tile(xbc, (ROWS,), (first_row,)), x)
    for v in cutlass.range_constexpr(cute.size(b, mode=[1])):
        cute.autovec_copy(cute.local_tile(xbc, (VECTOR,), (b_place + v * LANES,)), b[None, v])
        cute.autovec_copy(cute.local_tile(xbc, (VECTOR,), (c_place + v * LANES,)), c[None, v])


@cute.kernel
def scan_kernel(
    xbc: cute.Tensor,
    projected: cute.Tensor,
    step_bias: cute.Tensor,
    log_rate: cute.Tensor,
    skip: cute.Tensor,
    shortest: cutlass.Float32,
    longest: cutlass.Float32,
    out: cute.Tensor,
    state_size: cutlass.Constexpr[int],
):
    thread, _, _ = cute.arch.thread_idx()
    head, prompt, _ = cute.arch.block_idx()
    heads, length = cutlass.const_expr(step_bias.shape[0]), xbc.shape[1]
    inner = cutlass.const_expr(out.shape[2])
    head_size = cutlass.const_expr(inner // heads)
    vectors = cutlass.const_expr(state_size // (VECTOR * LANES))
    step_channel = cutlass.const_expr(projected.shape[2] - heads)
    group = head // cutlass.const_expr(heads // GROUPS)
    row, lane = thread // LANES, thread % LANES
    first_row = head * cutlass.const_expr(head_size // ROWS) + row
    b_place = cutlass.const_expr(inner // VECTOR) + group * cutlass.const_expr(state_size // VECTOR) + lane
    c_place = b_place + cutlass.const_expr(GROUPS * state_size // VECTOR)

    state = cute.make_rmem_tensor((VECTOR, vectors, ROWS), cutlass.Float32)
    next_x = cute.make_rmem_tensor(ROWS, cutlass.BFloat16)
    next_b = cute.make_rmem_tensor((VECTOR, vectors), cutlass.BFloat16)
    next_c = cute.make_rmem_tensor((VECTOR, vectors), cutlass.BFloat16)
    y = cute.make_rmem_tensor(ROWS, cutlass.BFloat16)
    state.fill(0.0)
    rate = -cute.math.exp(log_rate[head].to(cutlass.Float32))
    bias, direct = step_bias[head].to(cutlass.Float32), skip[head].to(cutlass.Float32)
    load_token(xbc[prompt, 0, None], first_row, b_place, c_place, next_x, next_b, next_c)
    next_step = projected[prompt, 0, step_channel + head]
    for token in cutlass.range(length):
        x = next_x.load().to(cutlass.Float32)
        b, c = next_b.load().to(cutlass.Float32), next_c.load().to(cutlass.Float32)
        raw = next_step.to(cutlass.Float32) + bias
        following = cutlass.min(token + 1, length - 1)
        load_token(xbc[prompt, following, None], first_row, b_place, c_place, next_x, next_b, next_c)
        next_step = projected[prompt, following, step_channel + head]

        magnitude = cute.arch.fmax(raw, -raw)
        step = cute.arch.fmax(raw, cutlass.Float32(0.0)) + cute.math.log1p(cute.math.exp(-magnitude))
        step = cute.arch.fmin(cute.arch.fmax(step, shortest), longest)
        decay = cute.math.exp(rate * step)
        for r in cutlass.range_constexpr(ROWS):
            updated = state[None, None, r].load() * decay + b * (step * x[r])
            state[None, None, r].store(updated)
            answer = (updated * c).reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
            answer = cute.arch.warp_reduction_sum(answer, threads_in_group=LANES)
            y[r] = (answer + direct * x[r]).to(cutlass.BFloat16)
        if lane == 0:
            cute.autovec_copy(y, cute.local_tile(out[prompt, token, None], (ROWS,), (first_row,)))


@cute.kernel
def norm_kernel(y: cute.Tensor, projected: cute.Tensor, weight: cute.Tensor, eps: cutlass.Float32, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    group, token, prompt = cute.arch.block_idx()
    vectors = cutlass.const_expr(y.shape[2] // GROUPS // VECTOR)
    warps = cutlass.const_expr(vectors // cute.arch.WARP_SIZE)
    place = (group * vectors + thread,)
    a = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    g = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    w = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    cute.autovec_copy(cute.local_tile(y[prompt, token, None], (VECTOR,), place), a)
    cute.autovec_copy(cute.local_tile(projected[prompt, token, None], (VECTOR,), place), g)
    cute.autovec_copy(cute.local_tile(weight, (VECTOR,), place), w)
    z = a.load().to(cutlass.Float32) * silu(g.load().to(cutlass.Float32))
    total = cute.arch.warp_reduction_sum((z * z).reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0))
    partial = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(warps), 16)
    if thread % cute.arch.WARP_SIZE == 0:
        partial[thread // cute.arch.WARP_SIZE] = total
    cute.arch.sync_threads()
    total = cutlass.Float32(0.0)
    for k in cutlass.range_constexpr(warps):
        total += partial[k]
    scale = cute.math.rsqrt(total / (vectors * VECTOR) + eps)
    a.store((z * scale * w.load().to(cutlass.Float32)).to(cutlass.BFloat16))
    cute.autovec_copy(a, cute.local_tile(out[prompt, token, None], (VECTOR,), place))


@cute.jit
def between(
    projected: cute.Tensor,
    conv_weight: cute.Tensor,
    conv_bias: cute.Tensor,
    xbc: cute.Tensor,
    step_bias: cute.Tensor,
    log_rate: cute.Tensor,
    skip: cute.Tensor,
    shortest: cutlass.Float32,
    longest: cutlass.Float32,
    y: cute.Tensor,
    norm_weight: cute.Tensor,
    eps: cutlass.Float32,
    normed: cute.Tensor,
    stream,
):
    batch, length, channels = xbc.shape
    heads, inner = cutlass.const_expr(step_bias.shape[0]), cutlass.const_expr(y.shape[2])
    state_size = cutlass.const_expr((channels - inner) // (2 * GROUPS))
    parts = cutlass.const_expr(-(-channels // (VECTOR * THREADS)))
    convolution_kernel(projected, conv_weight, conv_bias, xbc, inner).launch(
        grid=(parts, (length + TOKENS - 1) // TOKENS, batch), block=(THREADS, 1, 1), stream=stream
    )
    scan_kernel(xbc, projected, step_bias, log_rate, skip, shortest, longest, y, state_size).launch(
        grid=(heads, batch, 1), block=(inner // heads // ROWS * LANES, 1, 1), stream=stream
    )
    norm_kernel(y, projected, norm_weight, eps, normed).launch(
        grid=(GROUPS, length, batch), block=(inner // GROUPS // VECTOR, 1, 1), stream=stream
    )


def compile_for(arch: str, heads: int = 256, head_size: int = 64, state_size: int = 256):
    """The three kernels for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    batch, length, inner = cute.sym_int(), cute.sym_int(), heads * head_size
    channels = inner + 2 * GROUPS * state_size
    assert head_size % ROWS == 0 and state_size % (VECTOR * LANES) == 0 and inner % (32 * GROUPS * VECTOR) == 0

    def fake(*shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(cutlass.BFloat16, shape, stride_order=order, assumed_align=16)

    return cute.compile(
        between,
        fake(batch, length, inner + channels + heads),
        fake(channels, TAPS),
        fake(channels),
        fake(batch, length, channels),
        fake(heads),
        fake(heads),
        fake(heads),
        cutlass.Float32(0.0),
        cutlass.Float32(0.0),
        fake(batch, length, inner),
        fake(inner),
        cutlass.Float32(0.0),
        fake(batch, length, inner),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, heads: int, head_size: int, state_size: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", heads, head_size, state_size)


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
    projected = hidden_states @ in_proj_weight.t()
    xbc = hidden_states.new_empty(batch, length, channels)
    y = hidden_states.new_empty(batch, length, inner)
    normed = torch.empty_like(y)
    kernel = kernel_for(y.device, heads, inner // heads, (channels - inner) // (2 * GROUPS))
    kernel(
        *(projected, conv_weight.squeeze(1), conv_bias, xbc, dt_bias, A_log, D, time_step_min, time_step_max),
        *(y, norm_weight, eps, normed),
    )
    return normed @ out_proj_weight.t()
