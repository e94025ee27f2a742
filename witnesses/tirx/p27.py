"""p27, vision patch merger, in TIRx. The two products and the exact GELU between them stay with eager PyTorch.

The kernel normalises a patch and writes it where the first product reads it. CUDA: a thread block has one patch, a
thread 8 values (16 bytes), and the row is read and written once. It finds the patch's place in the merged layout from
the grids on the device, so that nothing waits for them to reach the host. CPU: plain loops.
"""

from functools import cache

import torch
import tvm
from torch.nn.functional import gelu, linear
from tvm.script import tirx as T  # noqa: N812

MERGE = 2
VECTOR = 8


def merged_place(start, patch, columns):
    """Where a patch goes, counted in patches, as an expression: its neighbourhood's row, times four, and its corner.

    `start` and `columns` are those of its image; the rows of all frames follow one after another."""
    row, column = (patch - start) // columns, (patch - start) % columns
    corner = (row % MERGE) * MERGE + column % MERGE
    return start + (row // MERGE) * columns * MERGE + (column // MERGE) * (MERGE * MERGE) + corner


@T.jit
def norm_and_merge_cuda(
    h: T.handle,
    g: T.handle,
    w: T.handle,
    b: T.handle,
    eps: T.float32,
    o: T.handle,
    *,
    width: T.constexpr,
    threads: T.constexpr,
):
    patches = T.int32()
    images = T.int32()
    hidden = T.match_buffer(h, (patches, width), "bfloat16")
    grids = T.match_buffer(g, (images, 3), "int64")
    weight = T.match_buffer(w, (width,), "bfloat16")
    bias = T.match_buffer(b, (width,), "bfloat16")
    merged = T.match_buffer(o, (patches, width), "bfloat16")
    T.device_entry()
    patch = T.cta_id([patches])
    thread = T.thread_id([threads])
    x = T.alloc_local((VECTOR,), "bfloat16")
    ws = T.alloc_local((VECTOR,), "bfloat16")
    bs = T.alloc_local((VECTOR,), "bfloat16")
    y = T.alloc_local((VECTOR,), "float32")
    total = T.alloc_local((1,), "float32")
    start = T.alloc_local((1,), "int32")
    place = T.alloc_local((1,), "int32")
    sums = T.alloc_shared((threads // 32,), "float32")
    squares = T.alloc_shared((threads // 32,), "float32")
    for e in T.vectorized(VECTOR):
        x[e] = hidden[patch, thread * VECTOR + e]
    for e in T.vectorized(VECTOR):
        ws[e] = weight[thread * VECTOR + e]
    for e in T.vectorized(VECTOR):
        bs[e] = bias[thread * VECTOR + e]
    start[0] = 0
    place[0] = 0
    for image in T.serial(images):
        if patch >= start[0]:  # the last image for which this holds is the patch's
            place[0] = merged_place(start[0], patch, T.cast(grids[image, 2], "int32"))
        start[0] = start[0] + T.cast(grids[image, 0] * grids[image, 1] * grids[image, 2], "int32")
    total[0] = T.float32(0)
    for e in T.unroll(VECTOR):
        y[e] = T.cast(x[e], "float32")
        total[0] = total[0] + y[e]
    total[0] = T.cuda.warp_sum(total[0])
    if thread % 32 == 0:
        sums[thread // 32] = total[0]
    T.cuda.cta_sync()
    total[0] = T.float32(0)
    for k in T.unroll(threads // 32):
        total[0] = total[0] + sums[k]
    total[0] = total[0] / T.float32(width)
    for e in T.unroll(VECTOR):
        y[e] = y[e] - total[0]
    total[0] = T.float32(0)
    for e in T.unroll(VECTOR):
        total[0] = total[0] + y[e] * y[e]
    total[0] = T.cuda.warp_sum(total[0])
    if thread % 32 == 0:
        squares[thread // 32] = total[0]
    T.cuda.cta_sync()
    total[0] = T.float32(0)
    for k in T.unroll(threads // 32):
        total[0] = total[0] + squares[k]
    total[0] = T.rsqrt(total[0] / T.float32(width) + eps)
    for e in T.unroll(VECTOR):
        x[e] = T.cast(y[e] * total[0] * T.cast(ws[e], "float32") + T.cast(bs[e], "float32"), "bfloat16")
    for e in T.vectorized(VECTOR):
        merged[place[0], thread * VECTOR + e] = x[e]


@T.jit
def norm_and_merge_cpu(
    h: T.handle, g: T.handle, w: T.handle, b: T.handle, eps: T.float32, o: T.handle, *, width: T.constexpr
):
    patches = T.int32()
    images = T.int32()
    hidden = T.match_buffer(h, (patches, width), "bfloat16")
    grids = T.match_buffer(g, (images, 3), "int64")
    weight = T.match_buffer(w, (width,), "bfloat16")
    bias = T.match_buffer(b, (width,), "bfloat16")
    merged = T.match_buffer(o, (patches, width), "bfloat16")
    total = T.alloc_buffer((2,), "float32", scope="local")
    start = T.alloc_buffer((1,), "int32", scope="local")
    place = T.alloc_buffer((1,), "int32", scope="local")
    for patch in T.serial(patches):
        start[0] = 0
        place[0] = 0
        for image in T.serial(images):
            if patch >= start[0]:
                place[0] = merged_place(start[0], patch, T.cast(grids[image, 2], "int32"))
            start[0] = start[0] + T.cast(grids[image, 0] * grids[image, 1] * grids[image, 2], "int32")
        total[0] = T.float32(0)
        for c in T.serial(width):
            total[0] = total[0] + T.cast(hidden[patch, c], "float32")
        total[0] = total[0] / T.float32(width)
        total[1] = T.float32(0)
        for c in T.serial(width):
            total[1] = total[1] + (T.cast(hidden[patch, c], "float32") - total[0]) * (
                T.cast(hidden[patch, c], "float32") - total[0]
            )
        total[1] = T.float32(1) / T.sqrt(total[1] / T.float32(width) + eps)
        for c in T.serial(width):
            merged[place[0], c] = T.cast(
                (T.cast(hidden[patch, c], "float32") - total[0]) * total[1] * T.cast(weight[c], "float32")
                + T.cast(bias[c], "float32"),
                "bfloat16",
            )


def compile_for(arch: str, width: int = 1536) -> tvm.runtime.Executable:
    """The kernel for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    if arch == "llvm":
        return tvm.compile(tvm.IRModule({"main": norm_and_merge_cpu.specialize(width=width)}), target="llvm")
    assert width % (32 * VECTOR) == 0, "a row must fill whole warps"
    kernel = norm_and_merge_cuda.specialize(width=width, threads=width // VECTOR)
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx")


@cache
def kernel_for(device: torch.device, width: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return compile_for(arch, width)["main"]


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
