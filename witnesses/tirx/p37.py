"""p37, backward pass of a tanh-GELU MLP in float32, in TIRx. The four products stay with eager PyTorch.

CUDA, two kernels:
1. The product at the GELU's output is multiplied by the GELU's derivative in place, and its columns are summed on the
   way; further thread blocks sum the columns of the output's gradient. A thread has 4 columns (16 bytes) and walks down
   64 rows, several at a time.
2. What the stretches of 64 rows gave is added up to both biases' gradients, 32 columns a thread block.

CPU: the same two in plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

VECTOR = 4
THREADS = 256
STRETCH = 64  # rows of a thread block
DEPTH = 4  # rows in flight in each thread
LANES = 32
ROWS = 8  # of the parts, that a thread block of the second kernel reads at a time
SLOPE = 0.7978845608028654  # sqrt(2 / pi)
CUBIC = 0.044715


def decay(x):
    """exp(-2 u), where the tanh of the GELU is that of u."""
    exponent = T.float32(-2 * SLOPE) * x * (T.float32(1) + T.float32(CUBIC) * x * x)
    return T.exp(T.min(exponent, T.float32(80)))


def derivative(x, e, s):
    """The tanh-GELU's derivative. With s = 1 / (1 + e) the logistic function, tanh is 2 s - 1, and 1 - s is e s."""
    return s + T.float32(2 * SLOPE) * x * (e * s) * s * (T.float32(1) + T.float32(3 * CUBIC) * x * x)


@T.jit
def columns_cuda(
    g: T.handle,
    b: T.handle,
    o: T.handle,
    p: T.handle,
    *,
    width: T.constexpr,
    inner: T.constexpr,
    tiles: T.constexpr,
    outer_tiles: T.constexpr,
):
    """The first `tiles` are of the inner columns, the others of the outer ones."""
    rows = T.int32()
    stretches = T.int32()
    grad_gelu = T.match_buffer(g, (rows, inner), "float32")
    before_gelu = T.match_buffer(b, (rows, inner), "float32")
    grad_output = T.match_buffer(o, (rows, width), "float32")
    parts = T.match_buffer(p, (stretches, inner + width), "float32")
    T.device_entry()
    tile, stretch = T.cta_id([tiles + outer_tiles, stretches])
    thread = T.thread_id([THREADS])
    x = T.alloc_local((DEPTH, VECTOR), "float32")
    y = T.alloc_local((DEPTH, VECTOR), "float32")
    total = T.alloc_local((VECTOR,), "float32")
    e_s = T.alloc_local((2,), "float32")
    place = T.alloc_local((1,), "int32")
    row = T.alloc_local((1,), "int32")
    for e in T.unroll(VECTOR):
        total[e] = T.float32(0)
    if tile < tiles:
        place[0] = tile * THREADS + thread
        if place[0] * VECTOR < inner:
            for turn in T.serial(STRETCH // DEPTH):
                for d in T.unroll(DEPTH):
                    row[0] = stretch * STRETCH + turn * DEPTH + d
                    if row[0] < rows:
                        for e in T.vectorized(VECTOR):
                            x[d, e] = before_gelu[row[0], place[0] * VECTOR + e]
                        for e in T.vectorized(VECTOR):
                            y[d, e] = grad_gelu[row[0], place[0] * VECTOR + e]
                for d in T.unroll(DEPTH):
                    row[0] = stretch * STRETCH + turn * DEPTH + d
                    if row[0] < rows:
                        for e in T.unroll(VECTOR):
                            e_s[0] = decay(x[d, e])
                            e_s[1] = T.float32(1) / (T.float32(1) + e_s[0])
                            y[d, e] = y[d, e] * derivative(x[d, e], e_s[0], e_s[1])
                            total[e] = total[e] + y[d, e]
                        for e in T.vectorized(VECTOR):
                            grad_gelu[row[0], place[0] * VECTOR + e] = y[d, e]
            for e in T.vectorized(VECTOR):
                parts[stretch, place[0] * VECTOR + e] = total[e]
    else:
        place[0] = (tile - tiles) * THREADS + thread
        if place[0] * VECTOR < width:
            for turn in T.serial(STRETCH // DEPTH):
                for d in T.unroll(DEPTH):
                    row[0] = stretch * STRETCH + turn * DEPTH + d
                    if row[0] < rows:
                        for e in T.vectorized(VECTOR):
                            y[d, e] = grad_output[row[0], place[0] * VECTOR + e]
                for d in T.unroll(DEPTH):
                    row[0] = stretch * STRETCH + turn * DEPTH + d
                    if row[0] < rows:
                        for e in T.unroll(VECTOR):
                            total[e] = total[e] + y[d, e]
            for e in T.vectorized(VECTOR):
                parts[stretch, inner + place[0] * VECTOR + e] = total[e]


@T.jit
def biases_cuda(p: T.handle, b: T.handle, o: T.handle, *, width: T.constexpr, inner: T.constexpr):
    stretches = T.int32()
    parts = T.match_buffer(p, (stretches, inner + width), "float32")
    grad_fc1_bias = T.match_buffer(b, (inner,), "float32")
    grad_fc2_bias = T.match_buffer(o, (width,), "float32")
    T.device_entry()
    tile = T.cta_id([T.ceildiv(inner + width, LANES)])
    thread = T.thread_id([LANES * ROWS])
    total = T.alloc_local((1,), "float32")
    column = T.alloc_local((1,), "int32")
    sums = T.alloc_shared((ROWS, LANES), "float32")
    total[0] = T.float32(0)
    column[0] = tile * LANES + thread % LANES
    for turn in T.serial(T.ceildiv(stretches, ROWS)):
        if turn * ROWS + thread // LANES < stretches and column[0] < inner + width:
            total[0] = total[0] + parts[turn * ROWS + thread // LANES, column[0]]
    sums[thread // LANES, thread % LANES] = total[0]
    T.cuda.cta_sync()
    if thread < LANES and column[0] < inner + width:
        total[0] = T.float32(0)
        for k in T.unroll(ROWS):
            total[0] = total[0] + sums[k, thread]
        if column[0] < inner:
            grad_fc1_bias[column[0]] = total[0]
        else:
            grad_fc2_bias[column[0] - inner] = total[0]


@T.jit
def columns_cpu(g: T.handle, b: T.handle, o: T.handle, p: T.handle, *, width: T.constexpr, inner: T.constexpr):
    rows = T.int32()
    stretches = T.int32()
    grad_gelu = T.match_buffer(g, (rows, inner), "float32")
    before_gelu = T.match_buffer(b, (rows, inner), "float32")
    grad_output = T.match_buffer(o, (rows, width), "float32")
    parts = T.match_buffer(p, (stretches, inner + width), "float32")
    e_s = T.alloc_buffer((2,), "float32", scope="local")
    for stretch, c in T.grid(stretches, inner + width):
        parts[stretch, c] = T.float32(0)
    for row in T.serial(rows):
        for c in T.serial(inner):
            e_s[0] = decay(before_gelu[row, c])
            e_s[1] = T.float32(1) / (T.float32(1) + e_s[0])
            grad_gelu[row, c] = grad_gelu[row, c] * derivative(before_gelu[row, c], e_s[0], e_s[1])
            parts[row // STRETCH, c] = parts[row // STRETCH, c] + grad_gelu[row, c]
        for c in T.serial(width):
            parts[row // STRETCH, inner + c] = parts[row // STRETCH, inner + c] + grad_output[row, c]


@T.jit
def biases_cpu(p: T.handle, b: T.handle, o: T.handle, *, width: T.constexpr, inner: T.constexpr):
    stretches = T.int32()
    parts = T.match_buffer(p, (stretches, inner + width), "float32")
    grad_fc1_bias = T.match_buffer(b, (inner,), "float32")
    grad_fc2_bias = T.match_buffer(o, (width,), "float32")
    for c in T.serial(inner):
        grad_fc1_bias[c] = T.float32(0)
        for stretch in T.serial(stretches):
            grad_fc1_bias[c] = grad_fc1_bias[c] + parts[stretch, c]
    for c in T.serial(width):
        grad_fc2_bias[c] = T.float32(0)
        for stretch in T.serial(stretches):
            grad_fc2_bias[c] = grad_fc2_bias[c] + parts[stretch, inner + c]


def compile_for(arch: str, width: int = 2048, inner: int = 8192) -> list[tvm.runtime.Executable]:
    """Both kernels for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    sizes = {"width": width, "inner": inner}
    if arch == "llvm":
        kernels = columns_cpu.specialize(**sizes), biases_cpu.specialize(**sizes)
        return [tvm.compile(tvm.IRModule({"main": kernel}), target="llvm") for kernel in kernels]
    assert width % VECTOR == 0 and inner % VECTOR == 0
    tiles, outer_tiles = (-(-columns // (VECTOR * THREADS)) for columns in (inner, width))
    kernels = (
        columns_cuda.specialize(**sizes, tiles=tiles, outer_tiles=outer_tiles),
        biases_cuda.specialize(**sizes),
    )
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return [tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx") for kernel in kernels]


@cache
def kernels_for(device: torch.device, width: int, inner: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return [executable["main"] for executable in compile_for(arch, width, inner)]


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
    sum_columns, sum_biases = kernels_for(grad.device, width, inner)
    grad_fc1_bias, grad_fc2_bias = grad.new_empty(inner), grad.new_empty(width)
    parts = grad.new_empty(-(-len(grad) // STRETCH), inner + width)
    grad_inner = grad @ fc2_weight
    sum_columns(grad_inner, before_gelu, grad, parts)
    sum_biases(parts, grad_fc1_bias, grad_fc2_bias)
    grad_fc1_weight, grad_fc2_weight = grad_inner.T @ x.view(-1, width), grad.T @ gelu_output.view(-1, inner)
    return (grad_inner @ fc1_weight).view(x.shape), grad_fc1_weight, grad_fc1_bias, grad_fc2_weight, grad_fc2_bias
