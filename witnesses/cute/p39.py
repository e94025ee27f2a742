"""p39, modulated LayerNorm and output projection, in CuTe DSL. The two linear layers stay with eager PyTorch.

One kernel normalises and modulates what the projection reads. A thread block has a few rows of one batch item in its
registers, all on their way together, so that scale and shift are read once for them, and a row is read exactly once.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from torch.nn.functional import linear, silu

VECTOR = 4  # float32 values in 16 bytes
DEPTH = 4  # rows of a thread block


@cute.jit
def block_sums(values: cute.Tensor, partial: cute.Tensor, threads: cutlass.Constexpr[int]):
    """The sum of each row's value over the thread block, for every thread of it, in the place of the values."""
    thread, _, _ = cute.arch.thread_idx()
    lanes = cutlass.const_expr(min(threads, cute.arch.WARP_SIZE))
    for d in cutlass.range_constexpr(DEPTH):
        total = cute.arch.warp_reduction_sum(values[d], threads_in_group=lanes)
        if thread % lanes == 0:
            partial[d, thread // lanes] = total
    cute.arch.sync_threads()
    for d in cutlass.range_constexpr(DEPTH):
        total = cutlass.Float32(0.0)
        for k in cutlass.range_constexpr(threads // lanes):
            total += partial[d, k]
        values[d] = total


@cute.kernel
def modulate_kernel(
    hidden: cute.Tensor,
    modulation: cute.Tensor,
    eps: cutlass.Float32,
    out: cute.Tensor,
    threads: cutlass.Constexpr[int],
):
    thread, _, _ = cute.arch.thread_idx()
    block, item, _ = cute.arch.block_idx()
    length, width = hidden.shape[1], cutlass.const_expr(hidden.shape[2])
    chunks = cutlass.const_expr(width // VECTOR // threads)
    warps = cutlass.const_expr(max(1, threads // cute.arch.WARP_SIZE))
    shared = cutlass.utils.SmemAllocator()
    partial_sums = shared.allocate_tensor(cutlass.Float32, cute.make_layout((DEPTH, warps)), 16)
    partial_squares = shared.allocate_tensor(cutlass.Float32, cute.make_layout((DEPTH, warps)), 16)
    x = cute.make_rmem_tensor((VECTOR, chunks, DEPTH), cutlass.Float32)
    scale = cute.make_rmem_tensor((VECTOR, chunks), cutlass.Float32)
    shift = cute.make_rmem_tensor((VECTOR, chunks), cutlass.Float32)
    sums = cute.make_rmem_tensor(DEPTH, cutlass.Float32)
    x.fill(0.0)
    for d in cutlass.range_constexpr(DEPTH):
        row = block * DEPTH + d
        if row < length:
            for c in cutlass.range_constexpr(chunks):
                place = (c * threads + thread,)
                cute.autovec_copy(cute.local_tile(hidden[item, row, None], (VECTOR,), place), x[None, c, d])
    for d in cutlass.range_constexpr(DEPTH):
        sums[d] = x[None, None, d].load().reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
    block_sums(sums, partial_sums, threads)
    for d in cutlass.range_constexpr(DEPTH):
        centred = x[None, None, d].load() - sums[d] / width
        x[None, None, d].store(centred)
        sums[d] = (centred * centred).reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
    block_sums(sums, partial_squares, threads)
    for c in cutlass.range_constexpr(chunks):
        place = (c * threads + thread,)
        cute.autovec_copy(cute.local_tile(modulation[item, 0, None], (VECTOR,), place), scale[None, c])
        cute.autovec_copy(cute.local_tile(modulation[item, 1, None], (VECTOR,), place), shift[None, c])
    for d in cutlass.range_constexpr(DEPTH):
        row = block * DEPTH + d
        normal = x[None, None, d].load() * (1.0 / cute.math.sqrt(sums[d] / width + eps))
        x[None, None, d].store(normal * (scale.load() + 1.0) + shift.load())
        if row < length:
            for c in cutlass.range_constexpr(chunks):
                place = (c * threads + thread,)
                cute.autovec_copy(x[None, c, d], cute.local_tile(out[item, row, None], (VECTOR,), place))


@cute.jit
def modulate(hidden: cute.Tensor, modulation: cute.Tensor, eps: cutlass.Float32, out: cute.Tensor, stream):
    threads = cutlass.const_expr(threads_for(hidden.shape[2]))
    modulate_kernel(hidden, modulation, eps, out, threads).launch(
        grid=(cute.ceil_div(hidden.shape[1], DEPTH), hidden.shape[0], 1), block=(threads, 1, 1), stream=stream
    )


def threads_for(width: int) -> int:
    """The largest block of at most 256 threads, a power of two, that splits a row evenly."""
    threads = 256
    while threads > 1 and width % (VECTOR * threads):
        threads //= 2
    return threads


def compile_for(arch: str, width: int = 3072):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert width % VECTOR == 0
    batch, length = cute.sym_int(), cute.sym_int()

    def fake(*shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(cutlass.Float32, shape, stride_order=order, assumed_align=16)

    return cute.compile(
        modulate,
        fake(batch, length, width),
        fake(batch, 2, width),
        cutlass.Float32(0.0),
        fake(batch, length, width),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, width: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", width)


def solve(
    hidden_states: torch.Tensor,
    conditioning: torch.Tensor,
    mod_weight: torch.Tensor,
    mod_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    batch, _, width = hidden_states.shape
    modulation = linear(silu(conditioning), mod_weight, mod_bias).view(batch, 2, width)  # scale and shift
    modulated = torch.empty_like(hidden_states)
    kernel_for(modulated.device, width)(hidden_states, modulation, eps, modulated)
    return linear(modulated, proj_weight, proj_bias)
