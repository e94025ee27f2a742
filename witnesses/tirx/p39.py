"""p39, modulated LayerNorm and output projection, in TIRx. The two linear layers stay with eager PyTorch.

One kernel normalises and modulates what the projection reads. CUDA: a thread block has a few rows of one batch item in
its registers, all on their way together, so that scale and shift are read once for them, and a row is read exactly
once. CPU: plain loops.
"""

from functools import cache

import torch
import tvm
from torch.nn.functional import linear, silu
from tvm.script import tirx as T  # noqa: N812

VECTOR = 4
DEPTH = 4  # rows of a thread block


@T.jit
def modulate_cuda(
    h: T.handle,
    m: T.handle,
    eps: T.float32,
    o: T.handle,
    *,
    width: T.constexpr,
    threads: T.constexpr,
    chunks: T.constexpr,
    lanes: T.constexpr,
):
    batch = T.int32()
    length = T.int32()
    hidden = T.match_buffer(h, (batch, length, width), "float32")
    modulation = T.match_buffer(m, (batch, 2, width), "float32")
    out = T.match_buffer(o, (batch, length, width), "float32")
    T.device_entry()
    block, item = T.cta_id([T.ceildiv(length, DEPTH), batch])
    thread = T.thread_id([threads])
    x = T.alloc_local((DEPTH, chunks, VECTOR), "float32")
    scale = T.alloc_local((chunks, VECTOR), "float32")
    shift = T.alloc_local((chunks, VECTOR), "float32")
    total = T.alloc_local((1,), "float32")
    root = T.alloc_local((2,), "float32")
    sums = T.alloc_shared((DEPTH, threads // lanes), "float32")
    squares = T.alloc_shared((DEPTH, threads // lanes), "float32")
    for d in T.unroll(DEPTH):
        for c in T.unroll(chunks):
            for e in T.unroll(VECTOR):
                x[d, c, e] = T.float32(0)
        if block * DEPTH + d < length:
            for c in T.unroll(chunks):
                for e in T.vectorized(VECTOR):
                    x[d, c, e] = hidden[item, block * DEPTH + d, (c * threads + thread) * VECTOR + e]
    for d in T.unroll(DEPTH):
        total[0] = T.float32(0)
        for c in T.unroll(chunks):
            for e in T.unroll(VECTOR):
                total[0] = total[0] + x[d, c, e]
        total[0] = T.cuda.warp_sum(total[0], lanes)
        if thread % lanes == 0:
            sums[d, thread // lanes] = total[0]
    T.cuda.cta_sync()
    for d in T.unroll(DEPTH):
        total[0] = T.float32(0)
        for k in T.unroll(threads // lanes):
            total[0] = total[0] + sums[d, k]
        total[0] = total[0] * T.float32(1 / width)
        for c in T.unroll(chunks):
            for e in T.unroll(VECTOR):
                x[d, c, e] = x[d, c, e] - total[0]
        total[0] = T.float32(0)
        for c in T.unroll(chunks):
            for e in T.unroll(VECTOR):
                total[0] = total[0] + x[d, c, e] * x[d, c, e]
        total[0] = T.cuda.warp_sum(total[0], lanes)
        if thread % lanes == 0:
            squares[d, thread // lanes] = total[0]
    T.cuda.cta_sync()
    for c in T.unroll(chunks):
        for e in T.vectorized(VECTOR):
            scale[c, e] = modulation[item, 0, (c * threads + thread) * VECTOR + e]
        for e in T.vectorized(VECTOR):
            shift[c, e] = modulation[item, 1, (c * threads + thread) * VECTOR + e]
    for d in T.unroll(DEPTH):
        total[0] = T.float32(0)
        for k in T.unroll(threads // lanes):
            total[0] = total[0] + squares[d, k]
        total[0] = total[0] * T.float32(1 / width) + eps
        # The hardware's reciprocal root, made as good as float32 by one step of Newton's.
        root[0] = T.rsqrt(total[0])
        root[1] = total[0] * root[0]
        T.ptx.fma_f32(T.address_of(root[1]), -root[1], root[0], T.float32(1))
        root[1] = root[1] * T.float32(0.5)
        T.ptx.fma_f32(T.address_of(root[0]), root[0], root[1], root[0])
        for c in T.unroll(chunks):
            for e in T.unroll(VECTOR):
                x[d, c, e] = x[d, c, e] * root[0] * (scale[c, e] + T.float32(1)) + shift[c, e]
        if block * DEPTH + d < length:
            for c in T.unroll(chunks):
                for e in T.vectorized(VECTOR):
                    out[item, block * DEPTH + d, (c * threads + thread) * VECTOR + e] = x[d, c, e]


@T.jit
def modulate_cpu(h: T.handle, m: T.handle, eps: T.float32, o: T.handle, *, width: T.constexpr):
    batch = T.int32()
    length = T.int32()
    hidden = T.match_buffer(h, (batch, length, width), "float32")
    modulation = T.match_buffer(m, (batch, 2, width), "float32")
    out = T.match_buffer(o, (batch, length, width), "float32")
    total = T.alloc_buffer((2,), "float32", scope="local")
    for item, row in T.grid(batch, length):
        total[0] = T.float32(0)
        for c in T.serial(width):
            total[0] = total[0] + hidden[item, row, c]
        total[0] = total[0] / T.float32(width)
        total[1] = T.float32(0)
        for c in T.serial(width):
            total[1] = total[1] + (hidden[item, row, c] - total[0]) * (hidden[item, row, c] - total[0])
        total[1] = T.float32(1) / T.sqrt(total[1] / T.float32(width) + eps)
        for c in T.serial(width):
            out[item, row, c] = (hidden[item, row, c] - total[0]) * total[1] * (
                modulation[item, 0, c] + T.float32(1)
            ) + modulation[item, 1, c]


def threads_for(width: int) -> int:
    """The largest block of at most 256 threads, a power of two, that splits a row evenly."""
    threads = 256
    while threads > 1 and width % (VECTOR * threads):
        threads //= 2
    return threads


def compile_for(arch: str, width: int = 3072) -> tvm.runtime.Executable:
    """The kernel for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    if arch == "llvm":
        return tvm.compile(tvm.IRModule({"main": modulate_cpu.specialize(width=width)}), target="llvm")
    assert width % VECTOR == 0
    threads = threads_for(width)
    kernel = modulate_cuda.specialize(
        width=width, threads=threads, chunks=width // VECTOR // threads, lanes=min(threads, 32)
    )
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
