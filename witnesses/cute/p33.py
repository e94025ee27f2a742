"""p33, residual add, RMSNorm and SiLU-gated MLP, in CuTe DSL. The three products stay with eager PyTorch.

1. Sum and norm: a thread block has one row in its registers, read and written once, 16 bytes at a time.
2. silu(gate) · up in place, 8 values (16 bytes) a thread.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from torch.nn.functional import linear

VECTOR = 8  # bfloat16 values in 16 bytes
THREADS = 256


@cute.kernel
def norm_kernel(
    hidden: cute.Tensor,
    residual: cute.Tensor,
    weight: cute.Tensor,
    eps: cutlass.Float32,
    out: cute.Tensor,
    threads: cutlass.Constexpr[int],
):
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    width = cutlass.const_expr(hidden.shape[1])
    chunks = cutlass.const_expr(width // VECTOR // threads)
    warps = cutlass.const_expr(max(1, threads // cute.arch.WARP_SIZE))
    partial = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(warps), 16)
    a = cute.make_rmem_tensor((VECTOR, chunks), cutlass.BFloat16)
    b = cute.make_rmem_tensor((VECTOR, chunks), cutlass.BFloat16)
    x = cute.make_rmem_tensor((VECTOR, chunks), cutlass.Float32)
    for c in cutlass.range_constexpr(chunks):
        cute.autovec_copy(cute.local_tile(hidden[row, None], (VECTOR,), (c * threads + thread,)), a[None, c])
        cute.autovec_copy(cute.local_tile(residual[row, None], (VECTOR,), (c * threads + thread,)), b[None, c])
    x.store(a.load().to(cutlass.Float32) + b.load().to(cutlass.Float32))
    for c in cutlass.range_constexpr(chunks):
        cute.autovec_copy(cute.local_tile(weight, (VECTOR,), (c * threads + thread,)), b[None, c])
    values = x.load()
    total = (values * values).reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
    total = cute.arch.warp_reduction_sum(total, threads_in_group=min(threads, cute.arch.WARP_SIZE))
    if thread % cute.arch.WARP_SIZE == 0:
        partial[thread // cute.arch.WARP_SIZE] = total
    cute.arch.sync_threads()
    total = cutlass.Float32(0.0)
    for w in cutlass.range_constexpr(warps):
        total += partial[w]
    scale = cute.math.rsqrt(total / width + eps)
    a.store((x.load() * scale * b.load().to(cutlass.Float32)).to(cutlass.BFloat16))
    for c in cutlass.range_constexpr(chunks):
        cute.autovec_copy(a[None, c], cute.local_tile(out[row, None], (VECTOR,), (c * threads + thread,)))


@cute.kernel
def gate_kernel(gate: cute.Tensor, up: cute.Tensor):
    """Both [vectors, 8]."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    index = block * THREADS + thread
    if index < gate.shape[0]:
        a = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
        b = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
        sigmoid = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
        cute.autovec_copy(gate[index, None], a)
        cute.autovec_copy(up[index, None], b)
        x = a.load().to(cutlass.Float32)
        sigmoid.store(1.0 + cute.math.exp(-x, fastmath=True))
        for e in cutlass.range_constexpr(VECTOR):
            sigmoid[e] = cute.arch.rcp_approx(sigmoid[e])
        a.store((x * sigmoid.load() * b.load().to(cutlass.Float32)).to(cutlass.BFloat16))
        cute.autovec_copy(a, gate[index, None])


@cute.jit
def norm(
    hidden: cute.Tensor, residual: cute.Tensor, weight: cute.Tensor, eps: cutlass.Float32, out: cute.Tensor, stream
):
    threads = cutlass.const_expr(threads_for(hidden.shape[1]))
    norm_kernel(hidden, residual, weight, eps, out, threads).launch(
        grid=(hidden.shape[0], 1, 1), block=(threads, 1, 1), stream=stream
    )


@cute.jit
def gated(gate: cute.Tensor, up: cute.Tensor, stream):
    blocks = (gate.shape[0] + THREADS - 1) // THREADS
    gate_kernel(gate, up).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)


def threads_for(width: int) -> int:
    """The largest block of at most 512 threads, a power of two, that splits a row evenly."""
    threads = 512
    while threads > 1 and width % (VECTOR * threads):
        threads //= 2
    return threads


def compile_for(arch: str, width: int = 16384):
    """The two kernels for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert width % VECTOR == 0, "vectors must fill a row"
    rows, vectors = cute.sym_int(), cute.sym_int()

    def fake(*shape: int):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(cutlass.BFloat16, shape, stride_order=order, assumed_align=16)

    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {arch}"
    matrix, values = fake(rows, width), fake(vectors, VECTOR)
    return (
        cute.compile(norm, matrix, matrix, fake(width), cutlass.Float32(0.0), matrix, stream, options=options),
        cute.compile(gated, values, values, stream, options=options),
    )


@cache
def kernels_for(device: torch.device, width: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", width)


def solve(
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    width = hidden_states.shape[-1]
    normalise, multiply = kernels_for(hidden_states.device, width)
    x = torch.empty_like(hidden_states).view(-1, width)
    normalise(hidden_states.view(-1, width), residual.view(-1, width), norm_weight, eps, x)
    gate, up = linear(x, gate_weight), linear(x, up_weight)
    multiply(gate.view(-1, VECTOR), up.view(-1, VECTOR))
    return linear(gate, down_weight).view(hidden_states.shape)
