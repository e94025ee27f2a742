"""p40, collapse of three streams into one, in TIRx. The two projections stay with eager PyTorch, in bfloat16.

One kernel does the rest. CUDA: a thread block has one token, a thread 8 values (16 bytes) of each stream, and the three
mean squares are found together, so that every stream is read once and only the mean is written. CPU: plain loops.
"""

from functools import cache

import torch
import tvm
from torch.nn.functional import linear
from tvm.script import tirx as T  # noqa: N812

VECTOR = 8
STREAMS = 3


def float32(x):
    return T.cast(x, "float32")


@T.jit
def collapse_cuda(
    h: T.handle,
    a: T.handle,
    b: T.handle,
    epsilon: T.float32,
    o: T.handle,
    *,
    width: T.constexpr,
    threads: T.constexpr,
    lanes: T.constexpr,
):
    rows = T.int32()
    hidden = T.match_buffer(h, (STREAMS, rows, width), "bfloat16")
    first = T.match_buffer(a, (rows, width), "bfloat16")
    second = T.match_buffer(b, (rows, width), "bfloat16")
    out = T.match_buffer(o, (rows, width), "bfloat16")
    T.device_entry()
    row = T.cta_id([rows])
    thread = T.thread_id([threads])
    x = T.alloc_local((STREAMS, VECTOR), "bfloat16")
    squares = T.alloc_local((STREAMS,), "float32")
    sums = T.alloc_shared((STREAMS, threads // lanes), "float32")
    for e in T.vectorized(VECTOR):
        x[0, e] = hidden[0, row, thread * VECTOR + e]
    for e in T.vectorized(VECTOR):
        x[1, e] = first[row, thread * VECTOR + e]
    for e in T.vectorized(VECTOR):
        x[2, e] = second[row, thread * VECTOR + e]
    for s in T.unroll(STREAMS):
        squares[s] = T.float32(0)
        for e in T.unroll(VECTOR):
            squares[s] = squares[s] + float32(x[s, e]) * float32(x[s, e])
        squares[s] = T.cuda.warp_sum(squares[s], lanes)
        if thread % lanes == 0:
            sums[s, thread // lanes] = squares[s]
    T.cuda.cta_sync()
    for s in T.unroll(STREAMS):
        squares[s] = T.float32(0)
        for k in T.unroll(threads // lanes):
            squares[s] = squares[s] + sums[s, k]
        squares[s] = squares[s] * T.float32(1 / width)
    squares[1] = T.sqrt(squares[0] / T.max(squares[1], epsilon))
    squares[2] = T.sqrt(squares[0] / T.max(squares[2], epsilon))
    for e in T.unroll(VECTOR):
        x[0, e] = T.cast(
            (float32(x[0, e]) + float32(x[1, e]) * squares[1] + float32(x[2, e]) * squares[2]) * T.float32(1 / STREAMS),
            "bfloat16",
        )
    for e in T.vectorized(VECTOR):
        out[row, thread * VECTOR + e] = x[0, e]


@T.jit
def collapse_cpu(h: T.handle, a: T.handle, b: T.handle, epsilon: T.float32, o: T.handle, *, width: T.constexpr):
    rows = T.int32()
    hidden = T.match_buffer(h, (STREAMS, rows, width), "bfloat16")
    first = T.match_buffer(a, (rows, width), "bfloat16")
    second = T.match_buffer(b, (rows, width), "bfloat16")
    out = T.match_buffer(o, (rows, width), "bfloat16")
    squares = T.alloc_buffer((STREAMS,), "float32", scope="local")
    for row in T.serial(rows):
        for s in T.serial(STREAMS):
            squares[s] = T.float32(0)
        for c in T.serial(width):
            squares[0] = squares[0] + float32(hidden[0, row, c]) * float32(hidden[0, row, c])
            squares[1] = squares[1] + float32(first[row, c]) * float32(first[row, c])
            squares[2] = squares[2] + float32(second[row, c]) * float32(second[row, c])
        for s in T.serial(STREAMS):
            squares[s] = squares[s] / T.float32(width)
        squares[1] = T.sqrt(squares[0] / T.max(squares[1], epsilon))
        squares[2] = T.sqrt(squares[0] / T.max(squares[2], epsilon))
        for c in T.serial(width):
            out[row, c] = T.cast(
                (
                    float32(hidden[0, row, c])
                    + float32(first[row, c]) * squares[1]
                    + float32(second[row, c]) * squares[2]
                )
                / T.float32(STREAMS),
                "bfloat16",
            )


def compile_for(arch: str, width: int = 3072) -> tvm.runtime.Executable:
    """The kernel for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    if arch == "llvm":
        return tvm.compile(tvm.IRModule({"main": collapse_cpu.specialize(width=width)}), target="llvm")
    threads = width // VECTOR
    assert width % VECTOR == 0 and threads <= 1024
    assert threads % 32 == 0 or threads in (2, 4, 8, 16), "a row must fill whole warps"
    kernel = collapse_cuda.specialize(width=width, threads=threads, lanes=min(threads, 32))
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
    hidden_states: torch.Tensor, unembed_weight_1: torch.Tensor, unembed_weight_2: torch.Tensor, epsilon: float
) -> torch.Tensor:
    width = hidden_states.shape[-1]
    hidden = hidden_states.view(STREAMS, -1, width)
    first, second = linear(hidden[1], unembed_weight_1), linear(hidden[2], unembed_weight_2)
    collapsed = torch.empty_like(hidden_states[0])
    kernel_for(hidden.device, width)(hidden, first, second, epsilon, collapsed.view(-1, width))
    return collapsed
