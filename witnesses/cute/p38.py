"""p38, backward pass of residual add and RMSNorm, in CuTe DSL. Input and residual have the same gradient: one tensor.

1. A thread block walks over many pairs of rows; a thread has 8 columns (16 bytes of the gradient) and keeps its part of
   the weight's gradient in registers until the end. The next pair is on its way while one is worked on.
2. The blocks' parts of the weight's gradient are added up, 32 columns a thread block.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

VECTOR = 8  # bfloat16 values in 16 bytes
DEPTH = 2  # rows that a thread block has at a time
LANES = 32
ROWS = 8  # of the parts, that a thread block of the second kernel reads at a time


@cute.jit
def load_rows(
    first: cutlass.Int32,
    grad: cute.Tensor,
    normalized: cute.Tensor,
    rstd: cute.Tensor,
    x: cute.Tensor,
    y: cute.Tensor,
    scale: cute.Tensor,
):
    """Rows `first` and on into registers, zeros beyond the last one."""
    thread, _, _ = cute.arch.thread_idx()
    x.fill(0.0)
    y.fill(0.0)
    scale.fill(0.0)
    for d in cutlass.range_constexpr(DEPTH):
        if first + d < grad.shape[0]:
            cute.autovec_copy(cute.local_tile(grad[first + d, None], (VECTOR,), (thread,)), x[None, d])
            cute.autovec_copy(cute.local_tile(normalized[first + d, None], (VECTOR,), (thread,)), y[None, d])
            scale[d] = rstd[first + d]


@cute.kernel
def rows_kernel(
    grad: cute.Tensor,
    normalized: cute.Tensor,
    rstd: cute.Tensor,
    weight: cute.Tensor,
    out: cute.Tensor,
    parts: cute.Tensor,
    threads: cutlass.Constexpr[int],
):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    rows, width, blocks = grad.shape[0], cutlass.const_expr(grad.shape[1]), parts.shape[0]
    lanes = cutlass.const_expr(min(threads, LANES))
    warps = cutlass.const_expr(threads // lanes)
    sums = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout((DEPTH, warps, 2)), 16)
    next_x = cute.make_rmem_tensor((VECTOR, DEPTH), cutlass.BFloat16)
    next_y = cute.make_rmem_tensor((VECTOR, DEPTH), cutlass.Float32)
    next_scale = cute.make_rmem_tensor(DEPTH, cutlass.Float32)
    x = cute.make_rmem_tensor((VECTOR, DEPTH), cutlass.BFloat16)
    y = cute.make_rmem_tensor((VECTOR, DEPTH), cutlass.Float32)
    scale = cute.make_rmem_tensor(DEPTH, cutlass.Float32)
    w = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    part = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    part.fill(0.0)
    cute.autovec_copy(cute.local_tile(weight, (VECTOR,), (thread,)), w)
    load_rows(block * DEPTH, grad, normalized, rstd, next_x, next_y, next_scale)
    half = cutlass.Int32(0)
    for first in cutlass.range(block * DEPTH, rows, blocks * DEPTH):
        x.store(next_x.load())
        y.store(next_y.load())
        scale.store(next_scale.load())
        load_rows(first + blocks * DEPTH, grad, normalized, rstd, next_x, next_y, next_scale)
        for d in cutlass.range_constexpr(DEPTH):
            g = x[None, d].load().to(cutlass.Float32)
            n = y[None, d].load()
            part.store(part.load() + g * n)
            projection = (g * w.load() * n).reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
            projection = cute.arch.warp_reduction_sum(projection, threads_in_group=lanes)
            if thread % lanes == 0:
                sums[d, thread // lanes, half] = projection
        cute.arch.sync_threads()  # one is enough: the next turn writes the other half of the sums
        for d in cutlass.range_constexpr(DEPTH):
            projection = cutlass.Float32(0.0)
            for k in cutlass.range_constexpr(warps):
                projection += sums[d, k, half]
            projection *= 1.0 / width
            g = x[None, d].load().to(cutlass.Float32)
            x[None, d].store((scale[d] * (g * w.load() - y[None, d].load() * projection)).to(cutlass.BFloat16))
            if first + d < rows:
                cute.autovec_copy(x[None, d], cute.local_tile(out[first + d, None], (VECTOR,), (thread,)))
        half = 1 - half
    cute.autovec_copy(part, cute.local_tile(parts[block, None], (VECTOR,), (thread,)))


@cute.kernel
def weight_kernel(parts: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    tile, _, _ = cute.arch.block_idx()
    lane, first = thread % LANES, thread // LANES
    sums = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout((LANES, ROWS)), 16)
    total = cutlass.Float32(0.0)
    for row in cutlass.range(first, parts.shape[0], ROWS):
        total += parts[row, tile * LANES + lane]
    sums[lane, first] = total
    cute.arch.sync_threads()
    if first == 0:
        total = cutlass.Float32(0.0)
        for k in cutlass.range_constexpr(ROWS):
            total += sums[lane, k]
        out[tile * LANES + lane] = total


@cute.jit
def backward(
    grad: cute.Tensor,
    normalized: cute.Tensor,
    rstd: cute.Tensor,
    weight: cute.Tensor,
    out: cute.Tensor,
    parts: cute.Tensor,
    grad_weight: cute.Tensor,
    stream,
):
    width = cutlass.const_expr(grad.shape[1])
    threads = cutlass.const_expr(width // VECTOR)
    rows_kernel(grad, normalized, rstd, weight, out, parts, threads).launch(
        grid=(parts.shape[0], 1, 1), block=(threads, 1, 1), stream=stream
    )
    weight_kernel(parts, grad_weight).launch(grid=(width // LANES, 1, 1), block=(LANES * ROWS, 1, 1), stream=stream)


def compile_for(arch: str, width: int = 2560):
    """Both kernels for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    threads = width // VECTOR
    assert width % LANES == 0 and (threads % LANES == 0 or threads in (4, 8, 16)), "a row must fill whole warps"
    rows, blocks = cute.sym_int(), cute.sym_int()

    def fake(dtype, *shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    return cute.compile(
        backward,
        fake(cutlass.BFloat16, rows, width),
        fake(cutlass.Float32, rows, width),
        fake(cutlass.Float32, rows),
        fake(cutlass.Float32, width),
        fake(cutlass.BFloat16, rows, width),
        fake(cutlass.Float32, blocks, width),
        fake(cutlass.Float32, width),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, width: int):
    """How many thread blocks walk over the rows, and the kernels."""
    properties = torch.cuda.get_device_properties(device)
    return 2 * properties.multi_processor_count, compile_for(f"sm_{properties.major}{properties.minor}a", width)


def solve(
    grad_output: torch.Tensor, normalized: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    width = len(weight)
    blocks, kernel = kernel_for(weight.device, width)
    grad_hidden, grad_weight = torch.empty_like(grad_output), torch.empty_like(weight)
    parts = weight.new_empty(blocks, width)
    rows = grad_output.view(-1, width), normalized.view(-1, width), rstd.view(-1)
    kernel(*rows, weight, grad_hidden.view(-1, width), parts, grad_weight)
    return grad_hidden, grad_hidden, grad_weight
