"""p36, RMSNorm of very many short rows, in TIRx.

CUDA: 16 threads a row, 8 values (16 bytes) a thread, several rows a thread so that enough is on its way. The reduction
stays within the 16. CPU: plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

EPS = 1e-6
VECTOR = 8
THREADS = 256
DEPTH = 4  # rows in flight in each thread


@T.jit
def norm_cuda(x: T.handle, w: T.handle, o: T.handle, *, width: T.constexpr, lanes: T.constexpr, together: T.constexpr):
    """`lanes` threads a row, `together` rows of a thread block at a time."""
    rows = T.int32()
    source = T.match_buffer(x, (rows, width), "bfloat16")
    weight = T.match_buffer(w, (width,), "bfloat16")
    out = T.match_buffer(o, (rows, width), "bfloat16")
    T.device_entry()
    block = T.cta_id([T.ceildiv(rows, together * DEPTH)])
    thread = T.thread_id([THREADS])
    values = T.alloc_local((DEPTH, VECTOR), "bfloat16")
    ws = T.alloc_local((VECTOR,), "bfloat16")
    y = T.alloc_local((VECTOR,), "float32")
    total = T.alloc_local((1,), "float32")
    lane = T.alloc_local((1,), "int32")
    first = T.alloc_local((1,), "int32")
    lane[0] = thread % lanes
    first[0] = block * (together * DEPTH) + thread // lanes
    for e in T.vectorized(VECTOR):
        ws[e] = weight[lane[0] * VECTOR + e]
    for d in T.unroll(DEPTH):
        if first[0] + d * together < rows:
            for e in T.vectorized(VECTOR):
                values[d, e] = source[first[0] + d * together, lane[0] * VECTOR + e]
    for d in T.unroll(DEPTH):
        total[0] = T.float32(0)
        if first[0] + d * together < rows:
            for e in T.unroll(VECTOR):
                y[e] = T.cast(values[d, e], "float32")
                total[0] = total[0] + y[e] * y[e]
        # Every thread takes part in the reduction, also those beyond the last row.
        total[0] = T.cuda.warp_sum(total[0], lanes)
        total[0] = T.rsqrt(total[0] / T.float32(width) + T.float32(EPS))
        if first[0] + d * together < rows:
            for e in T.unroll(VECTOR):
                values[d, e] = T.cast(y[e] * total[0] * T.cast(ws[e], "float32"), "bfloat16")
            for e in T.vectorized(VECTOR):
                out[first[0] + d * together, lane[0] * VECTOR + e] = values[d, e]


@T.jit
def norm_cpu(x: T.handle, w: T.handle, o: T.handle, *, width: T.constexpr):
    rows = T.int32()
    source = T.match_buffer(x, (rows, width), "bfloat16")
    weight = T.match_buffer(w, (width,), "bfloat16")
    out = T.match_buffer(o, (rows, width), "bfloat16")
    total = T.alloc_buffer((1,), "float32", scope="local")
    for row in T.serial(rows):
        total[0] = T.float32(0)
        for c in T.serial(width):
            total[0] = total[0] + T.cast(source[row, c], "float32") * T.cast(source[row, c], "float32")
        total[0] = T.float32(1) / T.sqrt(total[0] / T.float32(width) + T.float32(EPS))
        for c in T.serial(width):
            out[row, c] = T.cast(
                T.cast(source[row, c], "float32") * total[0] * T.cast(weight[c], "float32"), "bfloat16"
            )


def compile_for(arch: str, width: int = 128) -> tvm.runtime.Executable:
    """The kernel for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    if arch == "llvm":
        return tvm.compile(tvm.IRModule({"main": norm_cpu.specialize(width=width)}), target="llvm")
    lanes = width // VECTOR
    assert width % VECTOR == 0 and lanes in (1, 2, 4, 8, 16, 32), "a row must take a power of two of threads"
    kernel = norm_cuda.specialize(width=width, lanes=lanes, together=THREADS // lanes)
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx")


@cache
def kernel_for(device: torch.device, width: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return compile_for(arch, width)["main"]


def solve(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(hidden_states)
    kernel_for(weight.device, weight.shape[0])(hidden_states, weight, out)
    return out
