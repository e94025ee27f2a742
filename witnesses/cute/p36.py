"""p36, RMSNorm of very many short rows, in CuTe DSL.

16 threads share a row, 8 values (16 bytes) each, and have several rows on their way. The reduction stays within the 16.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

EPS = 1e-6
VECTOR = 8  # bfloat16 values in 16 bytes
THREADS = 256
DEPTH = 4  # rows in flight in each thread


@cute.kernel
def norm_kernel(x: cute.Tensor, weight: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    width = cutlass.const_expr(x.shape[1])
    lanes = cutlass.const_expr(width // VECTOR)
    rows = cutlass.const_expr(THREADS // lanes)  # that a thread block has at a time
    lane, first = thread % lanes, block * rows * DEPTH + thread // lanes
    values = cute.make_rmem_tensor((VECTOR, DEPTH), cutlass.BFloat16)
    w = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    values.fill(0.0)
    cute.autovec_copy(cute.local_tile(weight, (VECTOR,), (lane,)), w)
    for d in cutlass.range_constexpr(DEPTH):
        if first + d * rows < x.shape[0]:
            cute.autovec_copy(cute.local_tile(x[first + d * rows, None], (VECTOR,), (lane,)), values[None, d])
    for d in cutlass.range_constexpr(DEPTH):
        # Every thread takes part in the reduction, also those beyond the last row.
        y = values[None, d].load().to(cutlass.Float32)
        total = (y * y).reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
        total = cute.arch.warp_reduction_sum(total, threads_in_group=lanes)
        scaled = y * cute.math.rsqrt(total / width + EPS) * w.load().to(cutlass.Float32)
        values[None, d].store(scaled.to(cutlass.BFloat16))
    for d in cutlass.range_constexpr(DEPTH):
        if first + d * rows < x.shape[0]:
            cute.autovec_copy(values[None, d], cute.local_tile(out[first + d * rows, None], (VECTOR,), (lane,)))


@cute.jit
def norm(x: cute.Tensor, weight: cute.Tensor, out: cute.Tensor, stream):
    rows = cutlass.const_expr(THREADS // (x.shape[1] // VECTOR) * DEPTH)
    norm_kernel(x, weight, out).launch(
        grid=(cute.ceil_div(x.shape[0], rows), 1, 1), block=(THREADS, 1, 1), stream=stream
    )


def compile_for(arch: str, width: int = 128):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU. A row must take a power of two of threads."""
    assert width // VECTOR in (1, 2, 4, 8, 16, 32) and width % VECTOR == 0
    rows = cute.sym_int()
    matrices = [
        make_fake_compact_tensor(cutlass.BFloat16, (rows, width), stride_order=(1, 0), assumed_align=16) for _ in "xo"
    ]
    weight = make_fake_compact_tensor(cutlass.BFloat16, (width,), assumed_align=16)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {arch}"
    return cute.compile(norm, matrices[0], weight, matrices[1], stream, options=options)


@cache
def kernel_for(device: torch.device, width: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", width)


def solve(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(hidden_states)
    kernel_for(weight.device, weight.shape[0])(hidden_states, weight, out)
    return out
