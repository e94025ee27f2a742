"""p27, vision patch merger, in CuTe DSL. The two products and the exact GELU between them stay with eager PyTorch.

The kernel normalises a patch and writes it where the first product reads it: a thread block has one patch, a thread 8
values (16 bytes), and the row is read and written once. It finds the patch's place in the merged layout from the grids
on the device, so that nothing waits for them to reach the host.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from torch.nn.functional import gelu, linear

MERGE = 2
VECTOR = 8  # bfloat16 values in 16 bytes


@cute.jit
def block_sum(value: cutlass.Float32, partial: cute.Tensor):
    """The sum over the thread block, for every thread of it."""
    thread, _, _ = cute.arch.thread_idx()
    value = cute.arch.warp_reduction_sum(value)
    if thread % cute.arch.WARP_SIZE == 0:
        partial[thread // cute.arch.WARP_SIZE] = value
    cute.arch.sync_threads()
    total = cutlass.Float32(0.0)
    for w in cutlass.range_constexpr(cute.size(partial)):
        total += partial[w]
    return total


@cute.jit
def merged_place(patch: cutlass.Int32, grids: cute.Tensor):
    """Where a patch goes, counted in patches: its neighbourhood's row, times four, and its corner in it."""
    start, place = cutlass.Int32(0), cutlass.Int32(0)
    for image in cutlass.range(grids.shape[0]):
        frames, rows = grids[image, 0].to(cutlass.Int32), grids[image, 1].to(cutlass.Int32)
        columns = grids[image, 2].to(cutlass.Int32)
        if patch >= start:  # the last image for which this holds is the patch's
            row, column = (patch - start) // columns, (patch - start) % columns  # rows of all frames, one after another
            place = start + (row // MERGE) * columns * MERGE + (column // MERGE) * MERGE * MERGE
            place += (row % MERGE) * MERGE + column % MERGE
        start += frames * rows * columns
    return place


@cute.kernel
def norm_and_merge_kernel(
    hidden: cute.Tensor,
    grids: cute.Tensor,
    weight: cute.Tensor,
    bias: cute.Tensor,
    eps: cutlass.Float32,
    merged: cute.Tensor,
):
    thread, _, _ = cute.arch.thread_idx()
    patch, _, _ = cute.arch.block_idx()
    width = cutlass.const_expr(hidden.shape[1])
    warps = cutlass.const_expr(width // VECTOR // cute.arch.WARP_SIZE)
    shared = cutlass.utils.SmemAllocator()
    sums = shared.allocate_tensor(cutlass.Float32, cute.make_layout(warps), 16)
    squares = shared.allocate_tensor(cutlass.Float32, cute.make_layout(warps), 16)
    x = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    w = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    b = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    cute.autovec_copy(cute.local_tile(hidden[patch, None], (VECTOR,), (thread,)), x)
    cute.autovec_copy(cute.local_tile(weight, (VECTOR,), (thread,)), w)
    cute.autovec_copy(cute.local_tile(bias, (VECTOR,), (thread,)), b)
    place = merged_place(patch, grids)
    values = x.load().to(cutlass.Float32)
    mean = block_sum(values.reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0), sums) / width
    centred = values - mean
    square = block_sum((centred * centred).reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0), squares) / width
    scaled = centred * cute.math.rsqrt(square + eps)
    x.store((scaled * w.load().to(cutlass.Float32) + b.load().to(cutlass.Float32)).to(cutlass.BFloat16))
    cute.autovec_copy(x, cute.local_tile(merged[place, None], (VECTOR,), (thread,)))


@cute.jit
def norm_and_merge(
    hidden: cute.Tensor,
    grids: cute.Tensor,
    weight: cute.Tensor,
    bias: cute.Tensor,
    eps: cutlass.Float32,
    merged: cute.Tensor,
    stream,
):
    norm_and_merge_kernel(hidden, grids, weight, bias, eps, merged).launch(
        grid=(hidden.shape[0], 1, 1), block=(hidden.shape[1] // VECTOR, 1, 1), stream=stream
    )


def compile_for(arch: str, width: int = 1536):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU. A row must fill whole warps."""
    assert width % (32 * VECTOR) == 0
    patches, images = cute.sym_int(), cute.sym_int()

    def fake(dtype, *shape: int):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    return cute.compile(
        norm_and_merge,
        fake(cutlass.BFloat16, patches, width),
        fake(cutlass.Int64, images, 3),
        fake(cutlass.BFloat16, width),
        fake(cutlass.BFloat16, width),
        cutlass.Float32(0.0),
        fake(cutlass.BFloat16, patches, width),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, width: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", width)


def solve(
    hidden: torch.Tensor,
    grid_thw: torch.Tensor,
    ln_weight: torch.Tensor,
    ln_bias: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor,
    fc2_weight: torch.Tensor,
    fc2_bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    width = hidden.shape[1]
    merged = torch.empty_like(hidden)
    kernel_for(hidden.device, width)(hidden, grid_thw, ln_weight, ln_bias, eps, merged)
    return linear(gelu(linear(merged.view(-1, MERGE * MERGE * width), fc1_weight, fc1_bias)), fc2_weight, fc2_bias)
