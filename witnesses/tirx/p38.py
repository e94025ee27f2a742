"""p38, backward pass of residual add and RMSNorm, in TIRx. Input and residual have the same gradient: one tensor.

CUDA, two kernels:
1. A thread block walks over many pairs of rows; a thread has 8 columns (16 bytes of the gradient) and keeps its part of
   the weight's gradient in registers until the end. The next pair is on its way while one is worked on.
2. The blocks' parts of the weight's gradient are added up, 32 columns a thread block.

CPU: the same two in plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

VECTOR = 8
DEPTH = 2  # rows that a thread block has at a time
LANES = 32
ROWS = 8  # of the parts, that a thread block of the second kernel reads at a time


def float32(x):
    return T.cast(x, "float32")


@T.jit
def rows_cuda(
    g: T.handle,
    n: T.handle,
    r: T.handle,
    w: T.handle,
    o: T.handle,
    p: T.handle,
    *,
    width: T.constexpr,
    threads: T.constexpr,
    lanes: T.constexpr,
):
    rows = T.int32()
    blocks = T.int32()
    grad = T.match_buffer(g, (rows, width), "bfloat16")
    normalized = T.match_buffer(n, (rows, width), "float32")
    rstd = T.match_buffer(r, (rows,), "float32")
    weight = T.match_buffer(w, (width,), "float32")
    out = T.match_buffer(o, (rows, width), "bfloat16")
    parts = T.match_buffer(p, (blocks, width), "float32")
    T.device_entry()
    block = T.cta_id([blocks])
    thread = T.thread_id([threads])
    next_grad = T.alloc_local((DEPTH, VECTOR), "bfloat16")
    next_row = T.alloc_local((DEPTH, VECTOR), "float32")
    next_scale = T.alloc_local((DEPTH,), "float32")
    x = T.alloc_local((DEPTH, VECTOR), "bfloat16")
    y = T.alloc_local((DEPTH, VECTOR), "float32")
    scale = T.alloc_local((DEPTH,), "float32")
    ws = T.alloc_local((VECTOR,), "float32")
    part = T.alloc_local((VECTOR,), "float32")
    projection = T.alloc_local((DEPTH,), "float32")
    turns = T.alloc_local((1,), "int32")
    row = T.alloc_local((1,), "int32")
    sums = T.alloc_shared((2, threads // lanes, DEPTH), "float32")
    for e in T.vectorized(VECTOR):
        ws[e] = weight[thread * VECTOR + e]
    for e in T.unroll(VECTOR):
        part[e] = T.float32(0)
    turns[0] = T.ceildiv(T.ceildiv(rows, DEPTH) - block, blocks)
    # Turn t loads the rows of turn t and works on those of turn t - 1.
    for turn in T.serial(turns[0] + 1):
        for d in T.unroll(DEPTH):
            scale[d] = next_scale[d]
            for e in T.unroll(VECTOR):
                x[d, e] = next_grad[d, e]
                y[d, e] = next_row[d, e]
        for d in T.unroll(DEPTH):
            row[0] = (turn * blocks + block) * DEPTH + d
            if row[0] < rows:
                for e in T.vectorized(VECTOR):
                    next_grad[d, e] = grad[row[0], thread * VECTOR + e]
                for e in T.vectorized(VECTOR):
                    next_row[d, e] = normalized[row[0], thread * VECTOR + e]
                next_scale[d] = rstd[row[0]]
            else:
                for e in T.unroll(VECTOR):
                    next_grad[d, e] = T.bfloat16(0)
                    next_row[d, e] = T.float32(0)
                next_scale[d] = T.float32(0)
        if turn > 0:
            for d in T.unroll(DEPTH):
                projection[d] = T.float32(0)
                for e in T.unroll(VECTOR):
                    part[e] = part[e] + float32(x[d, e]) * y[d, e]
                    projection[d] = projection[d] + float32(x[d, e]) * ws[e] * y[d, e]
                projection[d] = T.cuda.warp_sum(projection[d], lanes)
                if thread % lanes == 0:
                    sums[turn % 2, thread // lanes, d] = projection[d]
            T.cuda.cta_sync()  # one is enough: the next turn writes the other half of the sums
            for d in T.unroll(DEPTH):
                projection[d] = T.float32(0)
                for k in T.unroll(threads // lanes):
                    projection[d] = projection[d] + sums[turn % 2, k, d]
                projection[d] = projection[d] * T.float32(1 / width)
                row[0] = ((turn - 1) * blocks + block) * DEPTH + d
                if row[0] < rows:
                    for e in T.unroll(VECTOR):
                        x[d, e] = T.cast(scale[d] * (float32(x[d, e]) * ws[e] - y[d, e] * projection[d]), "bfloat16")
                    for e in T.vectorized(VECTOR):
                        out[row[0], thread * VECTOR + e] = x[d, e]
    for e in T.vectorized(VECTOR):
        parts[block, thread * VECTOR + e] = part[e]


@T.jit
def weight_cuda(p: T.handle, o: T.handle, *, width: T.constexpr):
    blocks = T.int32()
    parts = T.match_buffer(p, (blocks, width), "float32")
    out = T.match_buffer(o, (width,), "float32")
    T.device_entry()
    tile = T.cta_id([width // LANES])
    thread = T.thread_id([LANES * ROWS])
    total = T.alloc_local((1,), "float32")
    sums = T.alloc_shared((ROWS, LANES), "float32")
    total[0] = T.float32(0)
    for turn in T.serial(T.ceildiv(blocks, ROWS)):
        if turn * ROWS + thread // LANES < blocks:
            total[0] = total[0] + parts[turn * ROWS + thread // LANES, tile * LANES + thread % LANES]
    sums[thread // LANES, thread % LANES] = total[0]
    T.cuda.cta_sync()
    if thread < LANES:
        total[0] = T.float32(0)
        for k in T.unroll(ROWS):
            total[0] = total[0] + sums[k, thread]
        out[tile * LANES + thread] = total[0]


@T.jit
def rows_cpu(g: T.handle, n: T.handle, r: T.handle, w: T.handle, o: T.handle, p: T.handle, *, width: T.constexpr):
    rows = T.int32()
    blocks = T.int32()
    grad = T.match_buffer(g, (rows, width), "bfloat16")
    normalized = T.match_buffer(n, (rows, width), "float32")
    rstd = T.match_buffer(r, (rows,), "float32")
    weight = T.match_buffer(w, (width,), "float32")
    out = T.match_buffer(o, (rows, width), "bfloat16")
    parts = T.match_buffer(p, (blocks, width), "float32")
    projection = T.alloc_buffer((1,), "float32", scope="local")
    for block, c in T.grid(blocks, width):
        parts[block, c] = T.float32(0)
    for row in T.serial(rows):
        projection[0] = T.float32(0)
        for c in T.serial(width):
            parts[row % blocks, c] = parts[row % blocks, c] + float32(grad[row, c]) * normalized[row, c]
            projection[0] = projection[0] + float32(grad[row, c]) * weight[c] * normalized[row, c]
        projection[0] = projection[0] / T.float32(width)
        for c in T.serial(width):
            out[row, c] = T.cast(
                rstd[row] * (float32(grad[row, c]) * weight[c] - normalized[row, c] * projection[0]), "bfloat16"
            )


@T.jit
def weight_cpu(p: T.handle, o: T.handle, *, width: T.constexpr):
    blocks = T.int32()
    parts = T.match_buffer(p, (blocks, width), "float32")
    out = T.match_buffer(o, (width,), "float32")
    for c in T.serial(width):
        out[c] = T.float32(0)
    for block, c in T.grid(blocks, width):
        out[c] = out[c] + parts[block, c]


def compile_for(arch: str, width: int = 2560) -> list[tvm.runtime.Executable]:
    """Both kernels for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    if arch == "llvm":
        kernels = rows_cpu.specialize(width=width), weight_cpu.specialize(width=width)
        return [tvm.compile(tvm.IRModule({"main": kernel}), target="llvm") for kernel in kernels]
    threads = width // VECTOR
    assert width % LANES == 0 and (threads % LANES == 0 or threads in (4, 8, 16)), "a row must fill whole warps"
    kernels = (
        rows_cuda.specialize(width=width, threads=threads, lanes=min(threads, LANES)),
        weight_cuda.specialize(width=width),
    )
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return [tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx") for kernel in kernels]


@cache
def kernels_for(device: torch.device, width: int):
    """How many thread blocks walk over the rows, and the two kernels."""
    arch, blocks = "llvm", 3
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        arch, blocks = f"sm_{properties.major}{properties.minor}a", 2 * properties.multi_processor_count
    return blocks, *(executable["main"] for executable in compile_for(arch, width))


def solve(
    grad_output: torch.Tensor, normalized: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    width = len(weight)
    blocks, walk_rows, sum_parts = kernels_for(weight.device, width)
    grad_hidden, grad_weight = torch.empty_like(grad_output), torch.empty_like(weight)
    parts = weight.new_empty(blocks, width)
    rows = grad_output.view(-1, width), normalized.view(-1, width), rstd.view(-1)
    walk_rows(*rows, weight, grad_hidden.view(-1, width), parts)
    sum_parts(parts, grad_weight)
    return grad_hidden, grad_hidden, grad_weight
