"""p31, GroupNorm, in TIRx.

CUDA: a thread block has one group of one image in its registers, read and written once. The group is contiguous, so
that its place in memory and its channels follow from one index. CPU: plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

GROUPS = 32
VECTOR = 4


@T.jit
def norm_cuda(
    x: T.handle,
    w: T.handle,
    b: T.handle,
    eps: T.float32,
    o: T.handle,
    *,
    channels: T.constexpr,
    plane: T.constexpr,
    threads: T.constexpr,
    chunks: T.constexpr,
):
    """`plane` values of a channel follow one another; a thread has `chunks` vectors."""
    groups = T.int32()
    source = T.match_buffer(x, (groups, channels // GROUPS * plane), "float32")
    weight = T.match_buffer(w, (channels,), "float32")
    bias = T.match_buffer(b, (channels,), "float32")
    out = T.match_buffer(o, (groups, channels // GROUPS * plane), "float32")
    T.device_entry()
    group = T.cta_id([groups])
    thread = T.thread_id([threads])
    y = T.alloc_local((chunks, VECTOR), "float32")
    total = T.alloc_local((1,), "float32")
    scale = T.alloc_local((2,), "float32")
    channel = T.alloc_local((1,), "int32")
    sums = T.alloc_shared((threads // 32,), "float32")
    squares = T.alloc_shared((threads // 32,), "float32")
    total[0] = T.float32(0)
    for c in T.unroll(chunks):
        for e in T.vectorized(VECTOR):
            y[c, e] = source[group, (c * threads + thread) * VECTOR + e]
    for c in T.unroll(chunks):
        for e in T.unroll(VECTOR):
            total[0] = total[0] + y[c, e]
    total[0] = T.cuda.warp_sum(total[0])
    if thread % 32 == 0:
        sums[thread // 32] = total[0]
    T.cuda.cta_sync()
    total[0] = T.float32(0)
    for k in T.unroll(threads // 32):
        total[0] = total[0] + sums[k]
    total[0] = total[0] * T.float32(1 / (channels // GROUPS * plane))
    for c in T.unroll(chunks):
        for e in T.unroll(VECTOR):
            y[c, e] = y[c, e] - total[0]
    total[0] = T.float32(0)
    for c in T.unroll(chunks):
        for e in T.unroll(VECTOR):
            total[0] = total[0] + y[c, e] * y[c, e]
    total[0] = T.cuda.warp_sum(total[0])
    if thread % 32 == 0:
        squares[thread // 32] = total[0]
    T.cuda.cta_sync()
    total[0] = T.float32(0)
    for k in T.unroll(threads // 32):
        total[0] = total[0] + squares[k]
    total[0] = total[0] * T.float32(1 / (channels // GROUPS * plane)) + eps
    # The hardware's reciprocal root, made as good as float32 by one step of Newton's.
    scale[0] = T.rsqrt(total[0])
    scale[1] = total[0] * scale[0]
    T.ptx.fma_f32(T.address_of(scale[1]), -scale[1], scale[0], T.float32(1))
    scale[1] = scale[1] * T.float32(0.5)
    T.ptx.fma_f32(T.address_of(scale[0]), scale[0], scale[1], scale[0])
    for c in T.unroll(chunks):
        channel[0] = (group % GROUPS) * (channels // GROUPS) + (c * threads + thread) * VECTOR // plane
        for e in T.unroll(VECTOR):
            y[c, e] = y[c, e] * scale[0] * weight[channel[0]] + bias[channel[0]]
        for e in T.vectorized(VECTOR):
            out[group, (c * threads + thread) * VECTOR + e] = y[c, e]


@T.jit
def norm_cpu(
    x: T.handle, w: T.handle, b: T.handle, eps: T.float32, o: T.handle, *, channels: T.constexpr, plane: T.constexpr
):
    groups = T.int32()
    source = T.match_buffer(x, (groups, channels // GROUPS, plane), "float32")
    weight = T.match_buffer(w, (channels,), "float32")
    bias = T.match_buffer(b, (channels,), "float32")
    out = T.match_buffer(o, (groups, channels // GROUPS, plane), "float32")
    sums = T.alloc_buffer((2,), "float32", scope="local")
    for group in T.serial(groups):
        sums[0] = T.float32(0)
        for c, p in T.grid(channels // GROUPS, plane):
            sums[0] = sums[0] + source[group, c, p]
        sums[0] = sums[0] / T.float32(channels // GROUPS * plane)
        sums[1] = T.float32(0)
        for c, p in T.grid(channels // GROUPS, plane):
            sums[1] = sums[1] + (source[group, c, p] - sums[0]) * (source[group, c, p] - sums[0])
        sums[1] = T.float32(1) / T.sqrt(sums[1] / T.float32(channels // GROUPS * plane) + eps)
        for c, p in T.grid(channels // GROUPS, plane):
            out[group, c, p] = (source[group, c, p] - sums[0]) * sums[1] * weight[
                (group % GROUPS) * (channels // GROUPS) + c
            ] + bias[(group % GROUPS) * (channels // GROUPS) + c]


def threads_for(size: int) -> int:
    """The largest block of whole warps, at most 512 threads, that splits a group evenly."""
    return max(threads for threads in range(32, 513, 32) if size % (VECTOR * threads) == 0)


def compile_for(arch: str, channels: int = 1280, plane: int = 64) -> tvm.runtime.Executable:
    """The kernel for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    if arch == "llvm":
        kernel = norm_cpu.specialize(channels=channels, plane=plane)
        return tvm.compile(tvm.IRModule({"main": kernel}), target="llvm")
    assert plane % VECTOR == 0, "4 neighbours must be of one channel"
    size = channels // GROUPS * plane
    threads = threads_for(size)
    kernel = norm_cuda.specialize(channels=channels, plane=plane, threads=threads, chunks=size // VECTOR // threads)
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx")


@cache
def kernel_for(device: torch.device, channels: int, plane: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return compile_for(arch, channels, plane)["main"]


def solve(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    images, channels, height, breadth = x.shape
    out = torch.empty_like(x)
    groups = (images * GROUPS, -1) if x.is_cuda else (images * GROUPS, channels // GROUPS, -1)
    kernel_for(x.device, channels, height * breadth)(x.view(groups), weight, bias, eps, out.view(groups))
    return out
