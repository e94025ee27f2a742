"""p33, residual add, RMSNorm and SiLU-gated MLP, in TIRx. The three products stay with eager PyTorch.

1. Sum and norm. CUDA: a thread block has one row in its registers, read and written once, 16 bytes at a time.
2. silu(gate) · up in place. CUDA: 8 values (16 bytes) a thread.

CPU: plain loops.
"""

from functools import cache

import torch
import tvm
from torch.nn.functional import linear
from tvm.script import tirx as T  # noqa: N812

VECTOR = 8  # bfloat16 values in 16 bytes
THREADS = 256


def gated(gate, up):
    return T.cast(gate, "float32") / (T.float32(1) + T.exp(-T.cast(gate, "float32"))) * T.cast(up, "float32")


@T.jit
def norm_cuda(
    h: T.handle,
    r: T.handle,
    w: T.handle,
    eps: T.float32,
    o: T.handle,
    *,
    width: T.constexpr,
    threads: T.constexpr,
    chunks: T.constexpr,
):
    rows = T.int32()
    hidden = T.match_buffer(h, (rows, width), "bfloat16")
    residual = T.match_buffer(r, (rows, width), "bfloat16")
    weight = T.match_buffer(w, (width,), "bfloat16")
    out = T.match_buffer(o, (rows, width), "bfloat16")
    T.device_entry()
    row = T.cta_id([rows])
    thread = T.thread_id([threads])
    x = T.alloc_local((chunks, VECTOR), "float32")
    a = T.alloc_local((chunks, VECTOR), "bfloat16")
    b = T.alloc_local((chunks, VECTOR), "bfloat16")
    total = T.alloc_local((1,), "float32")
    partial = T.alloc_shared((threads // 32,), "float32")
    total[0] = T.float32(0)
    for c in T.unroll(chunks):
        if (c * threads + thread) * VECTOR < width:
            for e in T.vectorized(VECTOR):
                a[c, e] = hidden[row, (c * threads + thread) * VECTOR + e]
            for e in T.vectorized(VECTOR):
                b[c, e] = residual[row, (c * threads + thread) * VECTOR + e]
    for c in T.unroll(chunks):
        if (c * threads + thread) * VECTOR < width:
            for e in T.unroll(VECTOR):
                x[c, e] = T.cast(a[c, e], "float32") + T.cast(b[c, e], "float32")
                total[0] = total[0] + x[c, e] * x[c, e]
            for e in T.vectorized(VECTOR):
                b[c, e] = weight[(c * threads + thread) * VECTOR + e]
    total[0] = T.cuda.warp_sum(total[0])
    if thread % 32 == 0:
        partial[thread // 32] = total[0]
    T.cuda.cta_sync()
    total[0] = T.float32(0)
    for k in T.unroll(threads // 32):
        total[0] = total[0] + partial[k]
    total[0] = T.rsqrt(total[0] / T.float32(width) + eps)
    for c in T.unroll(chunks):
        if (c * threads + thread) * VECTOR < width:
            for e in T.unroll(VECTOR):
                a[c, e] = T.cast(x[c, e] * total[0] * T.cast(b[c, e], "float32"), "bfloat16")
            for e in T.vectorized(VECTOR):
                out[row, (c * threads + thread) * VECTOR + e] = a[c, e]


@T.jit
def gate_cuda(g: T.handle, u: T.handle):
    """Both [vectors, 8]."""
    vectors = T.int32()
    gate = T.match_buffer(g, (vectors, VECTOR), "bfloat16")
    up = T.match_buffer(u, (vectors, VECTOR), "bfloat16")
    T.device_entry()
    block = T.cta_id([(vectors + THREADS - 1) // THREADS])
    thread = T.thread_id([THREADS])
    a = T.alloc_local((VECTOR,), "bfloat16")
    b = T.alloc_local((VECTOR,), "bfloat16")
    if block * THREADS + thread < vectors:
        for e in T.vectorized(VECTOR):
            a[e] = gate[block * THREADS + thread, e]
        for e in T.vectorized(VECTOR):
            b[e] = up[block * THREADS + thread, e]
        for e in T.unroll(VECTOR):
            a[e] = T.cast(gated(a[e], b[e]), "bfloat16")
        for e in T.vectorized(VECTOR):
            gate[block * THREADS + thread, e] = a[e]


@T.jit
def norm_cpu(h: T.handle, r: T.handle, w: T.handle, eps: T.float32, o: T.handle, *, width: T.constexpr):
    rows = T.int32()
    hidden = T.match_buffer(h, (rows, width), "bfloat16")
    residual = T.match_buffer(r, (rows, width), "bfloat16")
    weight = T.match_buffer(w, (width,), "bfloat16")
    out = T.match_buffer(o, (rows, width), "bfloat16")
    x = T.alloc_buffer((width,), "float32", scope="local")
    total = T.alloc_buffer((1,), "float32", scope="local")
    for row in T.serial(rows):
        total[0] = T.float32(0)
        for c in T.serial(width):
            x[c] = T.cast(hidden[row, c], "float32") + T.cast(residual[row, c], "float32")
            total[0] = total[0] + x[c] * x[c]
        total[0] = T.float32(1) / T.sqrt(total[0] / T.float32(width) + eps)
        for c in T.serial(width):
            out[row, c] = T.cast(x[c] * total[0] * T.cast(weight[c], "float32"), "bfloat16")


@T.jit
def gate_cpu(g: T.handle, u: T.handle):
    vectors = T.int32()
    gate = T.match_buffer(g, (vectors, VECTOR), "bfloat16")
    up = T.match_buffer(u, (vectors, VECTOR), "bfloat16")
    for i, e in T.grid(vectors, VECTOR):
        gate[i, e] = T.cast(gated(gate[i, e], up[i, e]), "bfloat16")


def compile_for(arch: str, width: int = 16384) -> tvm.runtime.Executable:
    """The two kernels for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    if arch == "llvm":
        kernels = {"norm": norm_cpu.specialize(width=width), "gate": gate_cpu.specialize()}
        return tvm.compile(tvm.IRModule(kernels), target="llvm")
    assert width % VECTOR == 0, "vectors must fill a row"
    threads = min(512, max(32, width // VECTOR // 32 * 32))
    chunks = -(-width // (VECTOR * threads))
    kernels = {
        "norm": norm_cuda.specialize(width=width, threads=threads, chunks=chunks),
        "gate": gate_cuda.specialize(),
    }
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return tvm.compile(tvm.IRModule(kernels), target=target, tir_pipeline="tirx")


@cache
def kernels_for(device: torch.device, width: int):
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        executable = compile_for(f"sm_{major}{minor}a", width)
        return executable["norm_cuda"], executable["gate_cuda"]
    executable = compile_for("llvm", width)
    return executable["norm_cpu"], executable["gate_cpu"]


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
