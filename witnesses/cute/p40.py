"""p40, collapse of three streams into one, in CuTe DSL. The two projections stay with eager PyTorch, in bfloat16.

One kernel does the rest: a thread block has one token, a thread 8 values (16 bytes) of each stream, and the three mean
squares are found together, so that every stream is read once and only the mean is written.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from torch.nn.functional import linear

VECTOR = 8  # bfloat16 values in 16 bytes
STREAMS = 3


@cute.kernel
def collapse_kernel(
    hidden: cute.Tensor,
    first: cute.Tensor,
    second: cute.Tensor,
    epsilon: cutlass.Float32,
    out: cute.Tensor,
    threads: cutlass.Constexpr[int],
):
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    width = cutlass.const_expr(out.shape[1])
    lanes = cutlass.const_expr(min(threads, cute.arch.WARP_SIZE))
    warps = cutlass.const_expr(threads // lanes)
    sums = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout((STREAMS, warps)), 16)
    x = cute.make_rmem_tensor((VECTOR, STREAMS), cutlass.BFloat16)
    squares = cute.make_rmem_tensor(STREAMS, cutlass.Float32)
    cute.autovec_copy(cute.local_tile(hidden[0, row, None], (VECTOR,), (thread,)), x[None, 0])
    cute.autovec_copy(cute.local_tile(first[row, None], (VECTOR,), (thread,)), x[None, 1])
    cute.autovec_copy(cute.local_tile(second[row, None], (VECTOR,), (thread,)), x[None, 2])
    for s in cutlass.range_constexpr(STREAMS):
        values = x[None, s].load().to(cutlass.Float32)
        total = (values * values).reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
        total = cute.arch.warp_reduction_sum(total, threads_in_group=lanes)
        if thread % lanes == 0:
            sums[s, thread // lanes] = total
    cute.arch.sync_threads()
    for s in cutlass.range_constexpr(STREAMS):
        total = cutlass.Float32(0.0)
        for k in cutlass.range_constexpr(warps):
            total += sums[s, k]
        squares[s] = total * (1.0 / width)
    collapsed = x[None, 0].load().to(cutlass.Float32)
    magnitude = cute.math.sqrt(squares[0])
    for s in cutlass.range_constexpr(1, STREAMS):
        scale = magnitude * cute.math.rsqrt(cute.arch.fmax(squares[s], epsilon))
        collapsed += x[None, s].load().to(cutlass.Float32) * scale
    x[None, 0].store((collapsed * (1.0 / STREAMS)).to(cutlass.BFloat16))
    cute.autovec_copy(x[None, 0], cute.local_tile(out[row, None], (VECTOR,), (thread,)))


@cute.jit
def collapse(
    hidden: cute.Tensor, first: cute.Tensor, second: cute.Tensor, epsilon: cutlass.Float32, out: cute.Tensor, stream
):
    threads = cutlass.const_expr(out.shape[1] // VECTOR)
    collapse_kernel(hidden, first, second, epsilon, out, threads).launch(
        grid=(out.shape[0], 1, 1), block=(threads, 1, 1), stream=stream
    )


def compile_for(arch: str, width: int = 3072):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    threads = width // VECTOR
    assert width % VECTOR == 0 and threads <= 1024
    assert threads % 32 == 0 or threads in (1, 2, 4, 8, 16), "a row must fill whole warps"
    rows = cute.sym_int()

    def fake(*shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(cutlass.BFloat16, shape, stride_order=order, assumed_align=16)

    return cute.compile(
        collapse,
        fake(STREAMS, rows, width),
        fake(rows, width),
        fake(rows, width),
        cutlass.Float32(0.0),
        fake(rows, width),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, width: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", width)


def solve(
    hidden_states: torch.Tensor, unembed_weight_1: torch.Tensor, unembed_weight_2: torch.Tensor, epsilon: float
) -> torch.Tensor:
    width = hidden_states.shape[-1]
    hidden = hidden_states.view(STREAMS, -1, width)
    first, second = linear(hidden[1], unembed_weight_1), linear(hidden[2], unembed_weight_2)
    collapsed = torch.empty_like(hidden_states[0])
    kernel_for(hidden.device, width)(hidden, first, second, epsilon, collapsed.view(-1, width))
    return collapsed
