"""p29, FLUX feed-forward, in TIRx. float32 products on the tensor cores, which PyTorch runs in float16.

A kernel splits each factor in two float16 numbers of 11 bits each, high and 2048 · low. Of their products, high · high
is summed over short stretches of the long axis and added up in float32 by a kernel, since tensor cores round their sums
towards zero; high · low and low · high, 2048 times smaller, are one product over both axes in a row. What is left out
is as small as float32's rounding. The sum goes together with what follows it: bias, tanh GELU and the next split in
one kernel, the last bias in another. Values must be smaller than 65504, the largest of float16.

CUDA: a thread has 8 neighbours (two or four times 16 bytes) or 4 of the output. CPU: plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

THREADS = 256
STRETCH = 768  # the longest sums left to the tensor cores
SCALE = 2048
SLOPE = 1.5957691216057308  # 2 · √(2/π)
CUBIC = 0.044715


def gelu(x):
    """x / 2 · (1 + tanh(y)) is x · sigmoid(2 y)."""
    return x / (T.float32(1) + T.exp(-T.float32(SLOPE) * (x + T.float32(CUBIC) * x * x * x)))


def rest(x, high):
    """What the high part leaves, scaled."""
    return T.cast((x - T.cast(high, "float32")) * T.float32(SCALE), "float16")


@T.jit
def split_cuda(s: T.handle, t: T.handle, *, width: T.constexpr, vectors: T.constexpr, high: T.constexpr):
    """The parts of a row follow one another; that of number `high` is the high one. `vectors` to a row."""
    rows = T.int32()
    source = T.match_buffer(s, (rows, width), "float32")
    target = T.match_buffer(t, (rows, 2, width), "float16")
    T.device_entry()
    block = T.cta_id([(rows * vectors + THREADS - 1) // THREADS])
    thread = T.thread_id([THREADS])
    x = T.alloc_local((8,), "float32")
    highs = T.alloc_local((8,), "float16")
    lows = T.alloc_local((8,), "float16")
    row = (block * THREADS + thread) // vectors
    vector = (block * THREADS + thread) % vectors
    if row < rows:
        for half in T.unroll(2):
            for e in T.vectorized(4):
                x[half * 4 + e] = source[row, vector * 8 + half * 4 + e]
        for e in T.unroll(8):
            highs[e] = T.cast(x[e], "float16")
            lows[e] = rest(x[e], highs[e])
        for e in T.vectorized(8):
            target[row, high, vector * 8 + e] = highs[e]
        for e in T.vectorized(8):
            target[row, 1 - high, vector * 8 + e] = lows[e]


@T.jit
def activate_cuda(
    p: T.handle, c: T.handle, b: T.handle, t: T.handle, *, parts: T.constexpr, width: T.constexpr, vectors: T.constexpr
):
    """Sum, bias, GELU and split; the high part comes first."""
    rows = T.int32()
    summands = T.int32()
    products = T.match_buffer(p, (summands, width), "float32")
    correction = T.match_buffer(c, (rows, width), "float32")
    bias = T.match_buffer(b, (width,), "float32")
    target = T.match_buffer(t, (rows, 2, width), "float16")
    T.device_entry()
    block = T.cta_id([(rows * vectors + THREADS - 1) // THREADS])
    thread = T.thread_id([THREADS])
    place = T.alloc_local((parts,), "int32")
    x = T.alloc_local((parts, 8), "float32")
    small = T.alloc_local((8,), "float32")
    offset = T.alloc_local((8,), "float32")
    highs = T.alloc_local((8,), "float16")
    lows = T.alloc_local((8,), "float16")
    row = (block * THREADS + thread) // vectors
    vector = (block * THREADS + thread) % vectors
    if row < rows:
        for part in T.unroll(parts):
            place[part] = part * rows + row
            for half in T.unroll(2):
                for e in T.vectorized(4):
                    x[part, half * 4 + e] = products[place[part], vector * 8 + half * 4 + e]
        for half in T.unroll(2):
            for e in T.vectorized(4):
                small[half * 4 + e] = correction[row, vector * 8 + half * 4 + e]
            for e in T.vectorized(4):
                offset[half * 4 + e] = bias[vector * 8 + half * 4 + e]
        for e in T.unroll(8):
            small[e] = small[e] * T.float32(1 / SCALE) + offset[e]
            for part in T.unroll(parts):
                small[e] = small[e] + x[part, e]
            small[e] = gelu(small[e])
            highs[e] = T.cast(small[e], "float16")
            lows[e] = rest(small[e], highs[e])
        for e in T.vectorized(8):
            target[row, 0, vector * 8 + e] = highs[e]
        for e in T.vectorized(8):
            target[row, 1, vector * 8 + e] = lows[e]


@T.jit
def finish_cuda(
    p: T.handle, c: T.handle, b: T.handle, o: T.handle, *, parts: T.constexpr, width: T.constexpr, vectors: T.constexpr
):
    """Sum and bias; vectors of 4."""
    rows = T.int32()
    summands = T.int32()
    products = T.match_buffer(p, (summands, width), "float32")
    correction = T.match_buffer(c, (rows, width), "float32")
    bias = T.match_buffer(b, (width,), "float32")
    out = T.match_buffer(o, (rows, width), "float32")
    T.device_entry()
    block = T.cta_id([(rows * vectors + THREADS - 1) // THREADS])
    thread = T.thread_id([THREADS])
    place = T.alloc_local((parts,), "int32")
    x = T.alloc_local((parts, 4), "float32")
    small = T.alloc_local((4,), "float32")
    offset = T.alloc_local((4,), "float32")
    row = (block * THREADS + thread) // vectors
    vector = (block * THREADS + thread) % vectors
    if row < rows:
        for part in T.unroll(parts):
            place[part] = part * rows + row
            for e in T.vectorized(4):
                x[part, e] = products[place[part], vector * 4 + e]
        for e in T.vectorized(4):
            small[e] = correction[row, vector * 4 + e]
        for e in T.vectorized(4):
            offset[e] = bias[vector * 4 + e]
        for e in T.unroll(4):
            small[e] = small[e] * T.float32(1 / SCALE) + offset[e]
            for part in T.unroll(parts):
                small[e] = small[e] + x[part, e]
        for e in T.vectorized(4):
            out[row, vector * 4 + e] = small[e]


@T.jit
def split_cpu(s: T.handle, t: T.handle, *, width: T.constexpr, high: T.constexpr):
    rows = T.int32()
    source = T.match_buffer(s, (rows, width), "float32")
    target = T.match_buffer(t, (rows, 2, width), "float16")
    for row, column in T.grid(rows, width):
        target[row, high, column] = T.cast(source[row, column], "float16")
        target[row, 1 - high, column] = rest(source[row, column], target[row, high, column])


@T.jit
def activate_cpu(p: T.handle, c: T.handle, b: T.handle, t: T.handle, *, parts: T.constexpr, width: T.constexpr):
    rows = T.int32()
    summands = T.int32()
    products = T.match_buffer(p, (summands, width), "float32")
    correction = T.match_buffer(c, (rows, width), "float32")
    bias = T.match_buffer(b, (width,), "float32")
    target = T.match_buffer(t, (rows, 2, width), "float16")
    x = T.alloc_buffer((1,), "float32", scope="local")
    for row, column in T.grid(rows, width):
        x[0] = correction[row, column] * T.float32(1 / SCALE) + bias[column]
        for part in T.serial(parts):
            x[0] = x[0] + products[part * rows + row, column]
        x[0] = gelu(x[0])
        target[row, 0, column] = T.cast(x[0], "float16")
        target[row, 1, column] = rest(x[0], target[row, 0, column])


@T.jit
def finish_cpu(p: T.handle, c: T.handle, b: T.handle, o: T.handle, *, parts: T.constexpr, width: T.constexpr):
    rows = T.int32()
    summands = T.int32()
    products = T.match_buffer(p, (summands, width), "float32")
    correction = T.match_buffer(c, (rows, width), "float32")
    bias = T.match_buffer(b, (width,), "float32")
    out = T.match_buffer(o, (rows, width), "float32")
    x = T.alloc_buffer((1,), "float32", scope="local")
    for row, column in T.grid(rows, width):
        x[0] = correction[row, column] * T.float32(1 / SCALE) + bias[column]
        for part in T.serial(parts):
            x[0] = x[0] + products[part * rows + row, column]
        out[row, column] = x[0]


def parts_for(width: int) -> int:
    """The smallest number of even stretches that are short enough."""
    return min(parts for parts in range(1, width + 1) if width % parts == 0 and width // parts <= STRETCH)


def compile_for(arch: str, width: int = 3072, inner: int = 12288) -> tvm.runtime.Executable:
    """The kernels for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    if arch == "llvm":
        kernels = {
            "split_hidden": split_cpu.specialize(width=width, high=0),
            "split_fc1": split_cpu.specialize(width=width, high=1),
            "split_fc2": split_cpu.specialize(width=inner, high=1),
            "activate": activate_cpu.specialize(parts=parts_for(width), width=inner),
            "finish": finish_cpu.specialize(parts=parts_for(inner), width=width),
        }
        target, pipeline = "llvm", None
    else:
        assert width % 8 == 0, "vectors must fill a row"
        assert inner % 8 == 0, "vectors must fill a row"
        kernels = {
            "split_hidden": split_cuda.specialize(width=width, vectors=width // 8, high=0),
            "split_fc1": split_cuda.specialize(width=width, vectors=width // 8, high=1),
            "split_fc2": split_cuda.specialize(width=inner, vectors=inner // 8, high=1),
            "activate": activate_cuda.specialize(parts=parts_for(width), width=inner, vectors=inner // 8),
            "finish": finish_cuda.specialize(parts=parts_for(inner), width=width, vectors=width // 4),
        }
        target, pipeline = tvm.target.Target({"kind": "cuda", "arch": arch}), "tirx"
    kernels = {name: kernel.with_attr("global_symbol", name) for name, kernel in kernels.items()}
    return tvm.compile(tvm.IRModule(kernels), target=target, tir_pipeline=pipeline)


@cache
def kernels_for(device: torch.device, width: int, inner: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    executable = compile_for(arch, width, inner)
    return [executable[name] for name in ("split_hidden", "split_fc1", "split_fc2", "activate", "finish")]


def split_by(kernel, source: torch.Tensor) -> torch.Tensor:
    target = torch.empty(source.shape[0], 2, source.shape[1], dtype=torch.float16, device=source.device)
    kernel(source, target)
    return target


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.bmm(a.float(), b.float())


def products(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of the high parts, which are first in `a` and last in `b`, by stretch, and the sum of the mixed ones."""
    parts = parts_for(a.shape[2])
    high_a = a[:, 0].unflatten(1, (parts, -1)).transpose(0, 1)
    high_b = b[:, 1].unflatten(1, (parts, -1)).permute(1, 2, 0)
    return multiply(high_a, high_b).flatten(0, 1), multiply(a.flatten(1)[None], b.flatten(1).T[None])[0]


def solve(
    hidden_states: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor,
    fc2_weight: torch.Tensor,
    fc2_bias: torch.Tensor,
) -> torch.Tensor:
    inner, width = fc1_weight.shape
    split_hidden, split_fc1, split_fc2, activate, finish = kernels_for(hidden_states.device, width, inner)
    x = split_by(split_hidden, hidden_states.view(-1, width))
    summands = products(x, split_by(split_fc1, fc1_weight))
    activated = torch.empty(x.shape[0], 2, inner, dtype=torch.float16, device=x.device)
    activate(*summands, fc1_bias, activated)
    del summands
    out = torch.empty_like(hidden_states)
    finish(*products(activated, split_by(split_fc2, fc2_weight)), fc2_bias, out.view(-1, width))
    return out
