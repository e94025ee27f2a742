"""p37, backward pass of a tanh-GELU MLP in float32, in CuTe DSL. The four products stay with eager PyTorch.

1. The product at the GELU's output is multiplied by the GELU's derivative in place, and its columns are summed on the
   way; further thread blocks sum the columns of the output's gradient. A thread has 4 columns (16 bytes) and walks down
   64 rows, several at a time.
2. What the stretches of 64 rows gave is added up to both biases' gradients, 32 columns a thread block.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

VECTOR = 4  # float32 values in 16 bytes
THREADS = 256
STRETCH = 64  # rows of a thread block
DEPTH = 4  # rows in flight in each thread
LANES = 32
ROWS = 8  # of the parts, that a thread block of the second kernel reads at a time
SLOPE = 0.7978845608028654  # sqrt(2 / pi)
CUBIC = 0.044715


@cute.jit
def derivative(x: cute.Tensor, y: cute.Tensor):
    """The tanh-GELU's derivative. With s = 1 / (1 + e) the logistic function, tanh is 2 s - 1, and 1 - s is e s."""
    for i in cutlass.range_constexpr(cute.size(x)):
        square = x[i] * x[i]
        exponent = -2.0 * SLOPE * x[i] * (1.0 + CUBIC * square)
        e = cute.math.exp(cute.arch.fmin(exponent, cutlass.Float32(80.0)))
        s = 1.0 / (1.0 + e)
        y[i] = s + 2.0 * SLOPE * x[i] * (e * s) * s * (1.0 + 3.0 * CUBIC * square)


@cute.kernel
def columns_kernel(
    grad_gelu: cute.Tensor, before_gelu: cute.Tensor, grad_output: cute.Tensor, parts: cute.Tensor, tiles: cutlass.Int32
):
    """The first `tiles` are of the inner columns, the others of the outer ones."""
    thread, _, _ = cute.arch.thread_idx()
    tile, stretch, _ = cute.arch.block_idx()
    rows, inner, width = grad_gelu.shape[0], grad_gelu.shape[1], grad_output.shape[1]
    x = cute.make_rmem_tensor((VECTOR, DEPTH), cutlass.Float32)
    y = cute.make_rmem_tensor((VECTOR, DEPTH), cutlass.Float32)
    slope = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    total = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    total.fill(0.0)
    first, last = stretch * STRETCH, cutlass.min(stretch * STRETCH + STRETCH, rows)
    if tile < tiles:
        place = tile * THREADS + thread
        if place * VECTOR < inner:
            for start in cutlass.range(first, last, DEPTH):
                x.fill(0.0)
                y.fill(0.0)
                for d in cutlass.range_constexpr(DEPTH):
                    if start + d < last:
                        row = start + d
                        cute.autovec_copy(cute.local_tile(before_gelu[row, None], (VECTOR,), (place,)), x[None, d])
                        cute.autovec_copy(cute.local_tile(grad_gelu[row, None], (VECTOR,), (place,)), y[None, d])
                for d in cutlass.range_constexpr(DEPTH):
                    derivative(x[None, d], slope)
                    y[None, d].store(y[None, d].load() * slope.load())
                    total.store(total.load() + y[None, d].load())
                    if start + d < last:
                        row = start + d
                        cute.autovec_copy(y[None, d], cute.local_tile(grad_gelu[row, None], (VECTOR,), (place,)))
            cute.autovec_copy(total, cute.local_tile(parts[stretch, None], (VECTOR,), (place,)))
    else:
        place = (tile - tiles) * THREADS + thread
        if place * VECTOR < width:
            for start in cutlass.range(first, last, DEPTH):
                y.fill(0.0)
                for d in cutlass.range_constexpr(DEPTH):
                    if start + d < last:
                        row = start + d
                        cute.autovec_copy(cute.local_tile(grad_output[row, None], (VECTOR,), (place,)), y[None, d])
                for d in cutlass.range_constexpr(DEPTH):
                    total.store(total.load() + y[None, d].load())
            cute.autovec_copy(total, cute.local_tile(parts[stretch, None], (VECTOR,), (inner // VECTOR + place,)))


@cute.kernel
def biases_kernel(parts: cute.Tensor, grad_fc1_bias: cute.Tensor, grad_fc2_bias: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    tile, _, _ = cute.arch.block_idx()
    lane, first = thread % LANES, thread // LANES
    column, inner = tile * LANES + lane, grad_fc1_bias.shape[0]
    sums = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout((LANES, ROWS)), 16)
    total = cutlass.Float32(0.0)
    if column < parts.shape[1]:
        for row in cutlass.range(first, parts.shape[0], ROWS):
            total += parts[row, column]
    sums[lane, first] = total
    cute.arch.sync_threads()
    if first == 0 and column < parts.shape[1]:
        total = cutlass.Float32(0.0)
        for k in cutlass.range_constexpr(ROWS):
            total += sums[lane, k]
        if column < inner:
            grad_fc1_bias[column] = total
        else:
            grad_fc2_bias[column - inner] = total


@cute.jit
def backward(
    grad_gelu: cute.Tensor,
    before_gelu: cute.Tensor,
    grad_output: cute.Tensor,
    parts: cute.Tensor,
    grad_fc1_bias: cute.Tensor,
    grad_fc2_bias: cute.Tensor,
    stream,
):
    tiles = cute.ceil_div(grad_gelu.shape[1], VECTOR * THREADS)
    outer_tiles = cute.ceil_div(grad_output.shape[1], VECTOR * THREADS)
    columns_kernel(grad_gelu, before_gelu, grad_output, parts, tiles).launch(
        grid=(tiles + outer_tiles, parts.shape[0], 1), block=(THREADS, 1, 1), stream=stream
    )
    biases_kernel(parts, grad_fc1_bias, grad_fc2_bias).launch(
        grid=(cute.ceil_div(parts.shape[1], LANES), 1, 1), block=(LANES * ROWS, 1, 1), stream=stream
    )


def compile_for(arch: str, width: int = 2048, inner: int = 8192):
    """Both kernels for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert width % VECTOR == 0 and inner % VECTOR == 0
    rows, stretches = cute.sym_int(), cute.sym_int()

    def fake(*shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(cutlass.Float32, shape, stride_order=order, assumed_align=16)

    return cute.compile(
        backward,
        fake(rows, inner),
        fake(rows, inner),
        fake(rows, width),
        fake(stretches, inner + width),
        fake(inner),
        fake(width),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, width: int, inner: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", width, inner)


def solve(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc2_weight: torch.Tensor,
    fc1_output: torch.Tensor,
    gelu_output: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    inner, width = fc1_weight.shape
    grad, before_gelu = grad_output.view(-1, width), fc1_output.view(-1, inner)
    grad_fc1_bias, grad_fc2_bias = grad.new_empty(inner), grad.new_empty(width)
    parts = grad.new_empty(-(-len(grad) // STRETCH), inner + width)
    grad_inner = grad @ fc2_weight
    kernel_for(grad.device, width, inner)(grad_inner, before_gelu, grad, parts, grad_fc1_bias, grad_fc2_bias)
    grad_fc1_weight, grad_fc2_weight = grad_inner.T @ x.view(-1, width), grad.T @ gelu_output.view(-1, inner)
    return (grad_inner @ fc1_weight).view(x.shape), grad_fc1_weight, grad_fc1_bias, grad_fc2_weight, grad_fc2_bias
