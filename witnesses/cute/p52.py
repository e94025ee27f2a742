"""p52, block-scaled FP8 projection, in CuTe DSL. The product stays with eager PyTorch, in bfloat16.

Two kernels replace every operand by what its FP8 codes and scales stand for, each in one pass: a block's largest
magnitude, its scale, the codes by the hardware's conversion, and their value times the scale, rounded to bfloat16,
which is far finer than E4M3. An activation block has 16 threads with 8 values (16 bytes) each; a weight block has a
thread block, which holds its 128 × 128 values in registers.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

BLOCK = 128
VECTOR = 8  # bfloat16 values in 16 bytes
LANES = BLOCK // VECTOR
THREADS = 256
ROWS = THREADS // LANES  # rows of 128 that a thread block has at a time
PASSES = BLOCK // ROWS  # until a thread block has seen a weight block
LARGEST = 448.0
SMALLEST_SCALE = 1e-12


@cute.jit
def largest_magnitude(x: cute.Tensor) -> cutlass.Float32:
    values = x.load().to(cutlass.Float32)
    largest = cutlass.Float32(0.0)
    for e in cutlass.range_constexpr(cute.size(x)):
        largest = cute.arch.fmax(largest, cute.arch.fmax(values[e], -values[e]))
    return largest


@cute.jit
def quantise(x: cute.Tensor, largest: cutlass.Float32):
    """Replace 8 values by what their codes stand for, given the largest magnitude of their block."""
    scale = cute.arch.fmax(largest / LARGEST, cutlass.Float32(SMALLEST_SCALE))
    codes = cute.make_rmem_tensor(VECTOR, cutlass.Float8E4M3FN)
    # The reciprocal may move a value that lies half way between two codes; the conversion saturates at 448.
    codes.store((x.load().to(cutlass.Float32) * (1.0 / scale)).to(cutlass.Float8E4M3FN))
    x.store((codes.load().to(cutlass.Float32) * scale).to(cutlass.BFloat16))


@cute.kernel
def activation_kernel(source: cute.Tensor, target: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    group, _, _ = cute.arch.block_idx()
    block, lane = group * ROWS + thread // LANES, thread % LANES
    if block < source.shape[0]:
        x = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
        cute.autovec_copy(cute.local_tile(source[block, None], (VECTOR,), (lane,)), x)
        largest = cute.arch.warp_reduction_max(largest_magnitude(x), threads_in_group=LANES)
        quantise(x, largest)
        cute.autovec_copy(x, cute.local_tile(target[block, None], (VECTOR,), (lane,)))


@cute.kernel
def weight_kernel(source: cute.Tensor, target: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    column, row, _ = cute.arch.block_idx()
    lane, first = column * LANES + thread % LANES, row * BLOCK + thread // LANES
    x = cute.make_rmem_tensor((VECTOR, PASSES), cutlass.BFloat16)
    for p in cutlass.range_constexpr(PASSES):
        cute.autovec_copy(cute.local_tile(source[first + p * ROWS, None], (VECTOR,), (lane,)), x[None, p])
    largest = cute.arch.warp_reduction_max(largest_magnitude(x))
    warps = cutlass.const_expr(THREADS // cute.arch.WARP_SIZE)
    partial = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(warps), 16)
    if thread % cute.arch.WARP_SIZE == 0:
        partial[thread // cute.arch.WARP_SIZE] = largest
    cute.arch.sync_threads()
    for w in cutlass.range_constexpr(warps):
        largest = cute.arch.fmax(largest, partial[w])
    for p in cutlass.range_constexpr(PASSES):
        quantise(x[None, p], largest)
        cute.autovec_copy(x[None, p], cute.local_tile(target[first + p * ROWS, None], (VECTOR,), (lane,)))


@cute.jit
def quantise_both(blocks: cute.Tensor, new_blocks: cute.Tensor, weight: cute.Tensor, new_weight: cute.Tensor, stream):
    activation_kernel(blocks, new_blocks).launch(
        grid=(cute.ceil_div(blocks.shape[0], ROWS), 1, 1), block=(THREADS, 1, 1), stream=stream
    )
    weight_kernel(weight, new_weight).launch(
        grid=(weight.shape[1] // BLOCK, weight.shape[0] // BLOCK, 1), block=(THREADS, 1, 1), stream=stream
    )


def compile_for(arch: str, in_features: int = 7680):
    """Both kernels for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    blocks, out_features = cute.sym_int(), cute.sym_int()
    activations = [
        make_fake_compact_tensor(cutlass.BFloat16, (blocks, BLOCK), stride_order=(1, 0), assumed_align=16) for _ in "st"
    ]
    weights = [
        make_fake_compact_tensor(cutlass.BFloat16, (out_features, in_features), stride_order=(1, 0), assumed_align=16)
        for _ in "st"
    ]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {arch}"
    return cute.compile(quantise_both, *activations, *weights, stream, options=options)


@cache
def kernel_for(device: torch.device, in_features: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", in_features)


def solve(attn_output: torch.Tensor, o_proj_weight: torch.Tensor, o_proj_bias: torch.Tensor) -> torch.Tensor:
    tokens, weight = torch.empty_like(attn_output), torch.empty_like(o_proj_weight)
    kernel = kernel_for(weight.device, weight.shape[1])
    kernel(attn_output.view(-1, BLOCK), tokens.view(-1, BLOCK), o_proj_weight, weight)
    return torch.addmm(o_proj_bias, tokens, weight.t())
