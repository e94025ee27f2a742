"""p31, GroupNorm, in CuTe DSL: a thread block has one group of one image in its registers, read and written once.

The group is contiguous, so that its place in memory and its channels follow from one index.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

GROUPS = 32
VECTOR = 4  # float32 values in 16 bytes


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


@cute.kernel
def norm_kernel(
    x: cute.Tensor,
    weight: cute.Tensor,
    bias: cute.Tensor,
    eps: cutlass.Float32,
    out: cute.Tensor,
    plane: cutlass.Constexpr[int],
    threads: cutlass.Constexpr[int],
):
    """`plane` values of a channel follow one another."""
    thread, _, _ = cute.arch.thread_idx()
    group, _, _ = cute.arch.block_idx()
    size = cutlass.const_expr(x.shape[1])
    channels = cutlass.const_expr(size // plane)
    chunks = cutlass.const_expr(size // VECTOR // threads)
    warps = cutlass.const_expr(threads // cute.arch.WARP_SIZE)
    shared = cutlass.utils.SmemAllocator()
    sums = shared.allocate_tensor(cutlass.Float32, cute.make_layout(warps), 16)
    squares = shared.allocate_tensor(cutlass.Float32, cute.make_layout(warps), 16)
    values = cute.make_rmem_tensor((VECTOR, chunks), cutlass.Float32)
    for c in cutlass.range_constexpr(chunks):
        cute.autovec_copy(cute.local_tile(x[group, None], (VECTOR,), (c * threads + thread,)), values[None, c])
    mean = block_sum(values.load().reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0), sums) / size
    centred = values.load() - mean
    variance = block_sum((centred * centred).reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0), squares) / size
    scale = 1.0 / cute.math.sqrt(variance + eps)
    values.store(centred * scale)
    for c in cutlass.range_constexpr(chunks):
        channel = (group % GROUPS) * channels + (c * threads + thread) * VECTOR // plane
        part = values[None, c].load() * weight[channel] + bias[channel]
        values[None, c].store(part)
        cute.autovec_copy(values[None, c], cute.local_tile(out[group, None], (VECTOR,), (c * threads + thread,)))


@cute.jit
def norm(
    x: cute.Tensor,
    weight: cute.Tensor,
    bias: cute.Tensor,
    eps: cutlass.Float32,
    out: cute.Tensor,
    stream,
    plane: cutlass.Constexpr[int],
):
    threads = cutlass.const_expr(threads_for(x.shape[1]))
    norm_kernel(x, weight, bias, eps, out, plane, threads).launch(
        grid=(x.shape[0], 1, 1), block=(threads, 1, 1), stream=stream
    )


def threads_for(size: int) -> int:
    """The largest block of whole warps, at most 512 threads, that splits a group evenly."""
    return max(threads for threads in range(32, 513, 32) if size % (VECTOR * threads) == 0)


def compile_for(arch: str, channels: int = 1280, plane: int = 64):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU. 4 neighbours must be of one channel."""
    assert plane % VECTOR == 0
    groups, size = cute.sym_int(), channels // GROUPS * plane

    def fake(*shape: int):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(cutlass.Float32, shape, stride_order=order, assumed_align=16)

    return cute.compile(
        norm,
        fake(groups, size),
        fake(channels),
        fake(channels),
        cutlass.Float32(0.0),
        fake(groups, size),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        plane,
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, channels: int, plane: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", channels, plane)


def solve(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    images, channels, height, breadth = x.shape
    out = torch.empty_like(x)
    groups = images * GROUPS
    kernel_for(x.device, channels, height * breadth)(x.view(groups, -1), weight, bias, eps, out.view(groups, -1))
    return out
