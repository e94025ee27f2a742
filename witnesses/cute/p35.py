"""p35, gradients of a post-norm feed-forward block, in CuTe DSL. The four products stay with eager PyTorch, in float32.

1. LayerNorm's gradient: a warp has a row, walks over many, and keeps sums over its rows of the three terms that become
   the gradients at ln_weight, beta and the second bias.
2. The gradient through the tanh GELU, in place, with sums over rows for the first bias. A thread has 4 columns and some
   rows under way.
3. The sums of all thread blocks are added up, in float64.

The residual's part of the gradient at hidden_states is where the last product adds to. Accesses are of 16 bytes.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

VECTOR = 4  # float32 values in 16 bytes
WARPS = 4
NORM_BLOCKS = 528
THREADS = 128
ROWS = 4  # rows whose loads a thread has under way
ROW_BLOCKS = 264
GROUPS = 8  # threads that share a column of partial sums
SLOPE = 1.5957691216057308  # 2 · √(2/π)
CUBIC = 0.044715


@cute.jit
def derivative(x: cutlass.Float32) -> cutlass.Float32:
    """GELU is x / 2 · (1 + tanh(y)), that is x times the sigmoid s = 1 / (1 + e) of 2 y, with e = exp(-2 y); 1 - s is
    e s, without the digits that a difference would lose."""
    exponent = -SLOPE * x * (1.0 + CUBIC * x * x)
    e = cute.math.exp(cute.arch.fmin(exponent, cutlass.Float32(80.0)))
    s = 1.0 / (1.0 + e)
    return s + x * (e * s) * s * (SLOPE * (1.0 + 3 * CUBIC * x * x))


@cute.kernel
def norm_kernel(
    grad: cute.Tensor,
    normalized: cute.Tensor,
    variance: cute.Tensor,
    weight: cute.Tensor,
    eps: cutlass.Float32,
    result: cute.Tensor,
    partial: cute.Tensor,
):
    """The sums of a block: grad · n, grad and the result, a row each."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    width = cutlass.const_expr(grad.shape[1])
    lanes = cutlass.const_expr(cute.arch.WARP_SIZE)
    chunks = cutlass.const_expr((width // VECTOR + lanes - 1) // lanes)
    warp, lane = thread // lanes, thread % lanes
    ws = cute.make_rmem_tensor((VECTOR, chunks), cutlass.Float32)
    gs = cute.make_rmem_tensor((VECTOR, chunks), cutlass.Float32)
    ns = cute.make_rmem_tensor((VECTOR, chunks), cutlass.Float32)
    at_weight = cute.make_rmem_tensor((VECTOR, chunks), cutlass.Float32)
    at_beta = cute.make_rmem_tensor((VECTOR, chunks), cutlass.Float32)
    at_bias = cute.make_rmem_tensor((VECTOR, chunks), cutlass.Float32)
    for registers in (ws, at_weight, at_beta, at_bias):
        registers.fill(0.0)
    for c in cutlass.range_constexpr(chunks):
        if (c * lanes + lane) * VECTOR < width:
            cute.autovec_copy(cute.local_tile(weight, (VECTOR,), (c * lanes + lane,)), ws[None, c])
    for step in cutlass.range((grad.shape[0] + NORM_BLOCKS * WARPS - 1) // (NORM_BLOCKS * WARPS)):
        row = (step * NORM_BLOCKS + block) * WARPS + warp
        gs.fill(0.0)
        ns.fill(0.0)
        square = cutlass.Float32(1.0)
        if row < grad.shape[0]:
            for c in cutlass.range_constexpr(chunks):
                if (c * lanes + lane) * VECTOR < width:
                    cute.autovec_copy(cute.local_tile(grad[row, None], (VECTOR,), (c * lanes + lane,)), gs[None, c])
                    source = cute.local_tile(normalized[row, None], (VECTOR,), (c * lanes + lane,))
                    cute.autovec_copy(source, ns[None, c])
            square = variance[row]
        g, n = gs.load(), ns.load()
        scaled = g * ws.load()
        mean = cute.arch.warp_reduction_sum(scaled.reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)) / width
        projection = (scaled * n).reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
        projection = cute.arch.warp_reduction_sum(projection) / width
        # rows beyond the end are zeros: they add nothing to these two
        at_weight.store(at_weight.load() + g * n)
        at_beta.store(at_beta.load() + g)
        gs.store((scaled - mean - n * projection) * (1.0 / cute.math.sqrt(square + eps)))
        at_bias.store(at_bias.load() + gs.load())
        if row < grad.shape[0]:
            for c in cutlass.range_constexpr(chunks):
                if (c * lanes + lane) * VECTOR < width:
                    cute.autovec_copy(gs[None, c], cute.local_tile(result[row, None], (VECTOR,), (c * lanes + lane,)))
    layout = cute.make_layout((WARPS, 3 * width), stride=(3 * width, 1))
    shared = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.Float32, layout, 16)
    for k, registers in enumerate((at_weight, at_beta, at_bias)):
        for c in cutlass.range_constexpr(chunks):
            if (c * lanes + lane) * VECTOR < width:
                place = k * (width // VECTOR) + c * lanes + lane
                cute.autovec_copy(registers[None, c], cute.local_tile(shared[warp, None], (VECTOR,), (place,)))
    cute.arch.sync_threads()
    for c in cutlass.range_constexpr((3 * width + WARPS * lanes - 1) // (WARPS * lanes)):
        column = c * WARPS * lanes + thread
        if column < 3 * width:
            total = shared[0, column]
            for k in cutlass.range_constexpr(1, WARPS):
                total += shared[k, column]
            partial[block, column] = total


@cute.kernel
def activation_kernel(grad: cute.Tensor, before: cute.Tensor, partial: cute.Tensor):
    """Thread block: a stretch of rows of one band of 512 columns. `grad` becomes the gradient before the activation."""
    thread, _, _ = cute.arch.thread_idx()
    band, block, _ = cute.arch.block_idx()
    inner = cutlass.const_expr(grad.shape[1])
    vector = band * THREADS + thread
    share = (grad.shape[0] + ROW_BLOCKS - 1) // ROW_BLOCKS
    start = block * share
    stop = cutlass.min(start + share, grad.shape[0])
    gs = cute.make_rmem_tensor((VECTOR, ROWS), cutlass.Float32)
    xs = cute.make_rmem_tensor((VECTOR, ROWS), cutlass.Float32)
    total = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    total.fill(0.0)
    if vector * VECTOR < inner:
        for step in cutlass.range((share + ROWS - 1) // ROWS):
            gs.fill(0.0)
            xs.fill(0.0)
            for r in cutlass.range_constexpr(ROWS):
                row = start + step * ROWS + r
                if row < stop:
                    cute.autovec_copy(cute.local_tile(grad[row, None], (VECTOR,), (vector,)), gs[None, r])
                    cute.autovec_copy(cute.local_tile(before[row, None], (VECTOR,), (vector,)), xs[None, r])
            for r in cutlass.range_constexpr(ROWS):
                for i in cutlass.range_constexpr(VECTOR):
                    gs[i, r] = gs[i, r] * derivative(xs[i, r])
            for r in cutlass.range_constexpr(0, ROWS, 2):
                total.store(total.load() + (gs[None, r].load() + gs[None, r + 1].load()))
            for r in cutlass.range_constexpr(ROWS):
                row = start + step * ROWS + r
                if row < stop:
                    cute.autovec_copy(gs[None, r], cute.local_tile(grad[row, None], (VECTOR,), (vector,)))
        cute.autovec_copy(total, cute.local_tile(partial[block, None], (VECTOR,), (vector,)))


@cute.kernel
def add_up_kernel(partial: cute.Tensor, sums: cute.Tensor):
    """The sums of all blocks, in float64; 32 columns a thread block, whose warps share the rows."""
    thread, _, _ = cute.arch.thread_idx()
    band, _, _ = cute.arch.block_idx()
    lanes = cutlass.const_expr(cute.arch.WARP_SIZE)
    group, lane = thread // lanes, thread % lanes
    layout = cute.make_layout((GROUPS, lanes), stride=(lanes, 1))
    shared = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.Float64, layout, 16)
    total = cutlass.Float64(0.0)
    for row in cutlass.range(group, partial.shape[0], GROUPS):
        total += partial[row, band * lanes + lane].to(cutlass.Float64)
    shared[group, lane] = total
    cute.arch.sync_threads()
    if group == 0:
        for k in cutlass.range_constexpr(1, GROUPS):
            total += shared[k, lane]
        sums[band * lanes + lane] = total.to(cutlass.Float32)


@cute.jit
def norm(
    grad: cute.Tensor,
    normalized: cute.Tensor,
    variance: cute.Tensor,
    weight: cute.Tensor,
    eps: cutlass.Float32,
    result: cute.Tensor,
    partial: cute.Tensor,
    stream,
):
    norm_kernel(grad, normalized, variance, weight, eps, result, partial).launch(
        grid=(NORM_BLOCKS, 1, 1), block=(WARPS * cute.arch.WARP_SIZE, 1, 1), stream=stream
    )


@cute.jit
def activation(grad: cute.Tensor, before: cute.Tensor, partial: cute.Tensor, stream):
    bands = cutlass.const_expr((grad.shape[1] // VECTOR + THREADS - 1) // THREADS)
    activation_kernel(grad, before, partial).launch(grid=(bands, ROW_BLOCKS, 1), block=(THREADS, 1, 1), stream=stream)


@cute.jit
def add_up(partial: cute.Tensor, sums: cute.Tensor, stream):
    add_up_kernel(partial, sums).launch(
        grid=(partial.shape[1] // cute.arch.WARP_SIZE, 1, 1), block=(GROUPS * cute.arch.WARP_SIZE, 1, 1), stream=stream
    )


def compile_for(arch: str, width: int = 512, inner: int = 2048):
    """The kernels for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert width % 32 == 0, "sums are added up for 32 columns at a time"
    assert inner % 32 == 0, "sums are added up for 32 columns at a time"
    assert WARPS * 3 * width * 4 <= 48 * 1024, "a block's sums must fit in shared memory"
    rows = cute.sym_int()

    def fake(*shape: int):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(cutlass.Float32, shape, stride_order=order, assumed_align=16)

    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {arch}"
    matrix, wide = fake(rows, width), fake(rows, inner)
    norm_partial, partial = fake(NORM_BLOCKS, 3 * width), fake(ROW_BLOCKS, inner)
    eps = cutlass.Float32(0.0)
    return (
        cute.compile(norm, matrix, matrix, fake(rows), fake(width), eps, matrix, norm_partial, stream, options=options),
        cute.compile(activation, wide, wide, partial, stream, options=options),
        cute.compile(add_up, norm_partial, fake(3 * width), stream, options=options),
        cute.compile(add_up, partial, fake(inner), stream, options=options),
    )


@cache
def kernels_for(device: torch.device, width: int, inner: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", width, inner)


def solve(
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_output: torch.Tensor,
    gelu_output: torch.Tensor,
    fc2_weight: torch.Tensor,
    normalized: torch.Tensor,
    var: torch.Tensor,
    ln_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    width, inner = fc2_weight.shape
    grad, h, n = (x.view(-1, width) for x in (grad_output, hidden_states, normalized))
    a, g = fc1_output.view(-1, inner), gelu_output.view(-1, inner)
    norming, activating, adding_norm, adding_activation = kernels_for(grad.device, width, inner)
    grad_y, partial = torch.empty_like(grad), grad.new_empty(NORM_BLOCKS, 3 * width)
    norming(grad, n, var.view(-1), ln_weight, eps, grad_y, partial)
    norm_sums = grad.new_empty(3, width)
    adding_norm(partial, norm_sums.view(-1))
    grad_fc2_weight = grad_y.T @ g
    grad_a, partial = grad_y @ fc2_weight, grad.new_empty(ROW_BLOCKS, inner)  # before the activation with the kernel
    activating(grad_a, a, partial)
    grad_fc1_bias = grad.new_empty(inner)
    adding_activation(partial, grad_fc1_bias)
    grad_fc1_weight = grad_a.T @ h
    grad_hidden = grad_y.addmm_(grad_a, fc1_weight).view(hidden_states.shape)
    grad_ln_weight, grad_ln_bias, grad_fc2_bias = norm_sums.unbind()
    return (
        grad_hidden,
        grad_fc1_weight,
        grad_fc1_bias,
        grad_fc2_weight,
        grad_fc2_bias,
        grad_ln_weight,
        grad_ln_bias,
    )
