"""p52, block-scaled FP8 projection, in TIRx. The product stays with eager PyTorch, on CUDA in bfloat16.

CUDA: two kernels replace every operand by what its FP8 codes and scales stand for, each in one pass: a block's largest
magnitude, its scale, the nearest code, and its value times the scale, rounded to bfloat16, which is far finer than
E4M3. An activation block has 16 threads with 8 values (16 bytes) each; a weight block has a thread block, which holds
its 128 × 128 values in registers. CPU: the same for blocks of any height, in plain loops, without rounding.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

BLOCK = 128
VECTOR = 8
LANES = BLOCK // VECTOR
THREADS = 256
ROWS = THREADS // LANES  # rows of 128 that a thread block has at a time
PASSES = BLOCK // ROWS  # until a thread block has seen a weight block
SMALLEST_SCALE = 1e-12


def e4m3(y):
    """The E4M3 value nearest to y, as a float32; y beyond ±448 saturates. An expression, for any target."""
    bits = T.reinterpret("uint32", T.min(T.max(y, T.float32(-448)), T.float32(448)))
    magnitude = bits & T.uint32(0x7FFFFFFF)
    odd = (magnitude >> T.uint32(20)) & T.uint32(1)
    normal = T.reinterpret("float32", (magnitude + T.uint32(0x7FFFF) + odd) & T.uint32(0xFFF00000))
    # Below 2^-6 the grid has the constant step 2^-9, which is the step of float32 at 2^14.
    steps = T.reinterpret("uint32", T.reinterpret("float32", magnitude) + T.float32(16384)) & T.uint32(0xFF)
    subnormal = T.cast(steps, "float32") * T.float32(2**-9)
    rounded = T.if_then_else(magnitude < T.uint32(0x3C800000), subnormal, normal)
    return T.if_then_else(bits >= T.uint32(0x80000000), -rounded, rounded)


def scale_of(largest):
    return T.max(largest / T.float32(448), T.float32(SMALLEST_SCALE))


@T.jit
def activation_cuda(x: T.handle, y: T.handle):
    blocks = T.int32()
    source = T.match_buffer(x, (blocks, BLOCK), "bfloat16")
    target = T.match_buffer(y, (blocks, BLOCK), "bfloat16")
    T.device_entry()
    group = T.cta_id([T.ceildiv(blocks, ROWS)])
    thread = T.thread_id([THREADS])
    values = T.alloc_local((VECTOR,), "bfloat16")
    block = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    largest = T.alloc_local((1,), "float32")
    scale = T.alloc_local((2,), "float32")
    block[0] = group * ROWS + thread // LANES
    lane[0] = thread % LANES
    largest[0] = T.float32(0)
    if block[0] < blocks:
        for e in T.vectorized(VECTOR):
            values[e] = source[block[0], lane[0] * VECTOR + e]
        for e in T.unroll(VECTOR):
            largest[0] = T.max(largest[0], T.abs(T.cast(values[e], "float32")))
    largest[0] = T.cuda.warp_max(largest[0], LANES)
    if block[0] < blocks:
        scale[0] = scale_of(largest[0])
        scale[1] = T.float32(1) / scale[0]
        for e in T.unroll(VECTOR):
            values[e] = T.cast(e4m3(T.cast(values[e], "float32") * scale[1]) * scale[0], "bfloat16")
        for e in T.vectorized(VECTOR):
            target[block[0], lane[0] * VECTOR + e] = values[e]


@T.jit
def weight_cuda(x: T.handle, y: T.handle, *, columns: T.constexpr):
    rows = T.int32()
    source = T.match_buffer(x, (rows, columns), "bfloat16")
    target = T.match_buffer(y, (rows, columns), "bfloat16")
    T.device_entry()
    column, row = T.cta_id([columns // BLOCK, rows // BLOCK])
    thread = T.thread_id([THREADS])
    values = T.alloc_local((PASSES, VECTOR), "bfloat16")
    first = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    largest = T.alloc_local((1,), "float32")
    scale = T.alloc_local((2,), "float32")
    partial = T.alloc_shared((THREADS // 32,), "float32")
    first[0] = row * BLOCK + thread // LANES
    lane[0] = column * LANES + thread % LANES
    largest[0] = T.float32(0)
    for p in T.unroll(PASSES):
        for e in T.vectorized(VECTOR):
            values[p, e] = source[first[0] + p * ROWS, lane[0] * VECTOR + e]
    for p in T.unroll(PASSES):
        for e in T.unroll(VECTOR):
            largest[0] = T.max(largest[0], T.abs(T.cast(values[p, e], "float32")))
    largest[0] = T.cuda.warp_max(largest[0])
    if thread % 32 == 0:
        partial[thread // 32] = largest[0]
    T.cuda.cta_sync()
    for k in T.unroll(THREADS // 32):
        largest[0] = T.max(largest[0], partial[k])
    scale[0] = scale_of(largest[0])
    scale[1] = T.float32(1) / scale[0]
    for p in T.unroll(PASSES):
        for e in T.unroll(VECTOR):
            values[p, e] = T.cast(e4m3(T.cast(values[p, e], "float32") * scale[1]) * scale[0], "bfloat16")
        for e in T.vectorized(VECTOR):
            target[first[0] + p * ROWS, lane[0] * VECTOR + e] = values[p, e]


@T.jit
def quantise_cpu(x: T.handle, y: T.handle, *, columns: T.constexpr, height: T.constexpr):
    rows = T.int32()
    source = T.match_buffer(x, (rows, columns), "bfloat16")
    target = T.match_buffer(y, (rows, columns), "float32")
    largest = T.alloc_buffer((1,), "float32", scope="local")
    for row, column in T.grid(rows // height, columns // BLOCK):
        largest[0] = T.float32(0)
        for r, c in T.grid(height, BLOCK):
            largest[0] = T.max(largest[0], T.abs(T.cast(source[row * height + r, column * BLOCK + c], "float32")))
        for r, c in T.grid(height, BLOCK):
            target[row * height + r, column * BLOCK + c] = e4m3(
                T.cast(source[row * height + r, column * BLOCK + c], "float32") / scale_of(largest[0])
            ) * scale_of(largest[0])


def compile_for(arch: str, columns: int = 7680) -> list[tvm.runtime.Executable]:
    """The kernel for activations and the one for weights, for `arch` (`llvm`, `sm_90a`, ...); needs no GPU."""
    if arch == "llvm":
        kernels = [quantise_cpu.specialize(columns=columns, height=height) for height in (1, BLOCK)]
        return [tvm.compile(tvm.IRModule({"main": kernel}), target="llvm") for kernel in kernels]
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    kernels = [activation_cuda.specialize(), weight_cuda.specialize(columns=columns)]
    return [tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx") for kernel in kernels]


@cache
def kernels_for(device: torch.device, columns: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return [executable["main"] for executable in compile_for(arch, columns)]


def solve(attn_output: torch.Tensor, o_proj_weight: torch.Tensor, o_proj_bias: torch.Tensor) -> torch.Tensor:
    quantise_activations, quantise_weight = kernels_for(o_proj_weight.device, o_proj_weight.shape[1])
    if attn_output.is_cuda:
        tokens, weight = torch.empty_like(attn_output), torch.empty_like(o_proj_weight)
        quantise_activations(attn_output.view(-1, BLOCK), tokens.view(-1, BLOCK))
        quantise_weight(o_proj_weight, weight)
        return torch.addmm(o_proj_bias, tokens, weight.t())
    tokens = torch.empty_like(attn_output, dtype=torch.float32)
    weight = torch.empty_like(o_proj_weight, dtype=torch.float32)
    quantise_activations(attn_output, tokens)
    quantise_weight(o_proj_weight, weight)
    return torch.addmm(o_proj_bias.float(), tokens, weight.t()).to(attn_output.dtype)
