"""Times two variants in its first calls and keeps the faster one.

problem: p28
dsl: tirx
devices: cpu
"""

import time

import torch
import tvm
from tvm.script import tirx as T


@T.prim_func
def squares(h: T.handle, r: T.handle, s: T.handle):
    rows, width = T.int32(), T.int32()
    H = T.match_buffer(h, (rows, width), "float32")
    R = T.match_buffer(r, (rows, width), "float32")
    S = T.match_buffer(s, (rows,), "float32")
    for i in T.serial(rows):
        S[i] = T.float32(0)
        for j in T.serial(width):
            S[i] = S[i] + (H[i, j] + R[i, j]) * (H[i, j] + R[i, j])


@T.prim_func
def scale(h: T.handle, r: T.handle, w: T.handle, s: T.handle, o: T.handle):
    rows, width = T.int32(), T.int32()
    H = T.match_buffer(h, (rows, width), "float32")
    R = T.match_buffer(r, (rows, width), "float32")
    W = T.match_buffer(w, (width,), "float32")
    S = T.match_buffer(s, (rows,), "float32")
    O = T.match_buffer(o, (rows, width), "float32")
    for i, j in T.grid(rows, width):
        O[i, j] = (H[i, j] + R[i, j]) / T.sqrt(S[i] / T.Cast("float32", width) + T.float32(1e-5)) * W[j]


@T.prim_func
def rms(h: T.handle, r: T.handle, w: T.handle, o: T.handle):
    rows, width = T.int32(), T.int32()
    H = T.match_buffer(h, (rows, width), "float32")
    R = T.match_buffer(r, (rows, width), "float32")
    W = T.match_buffer(w, (width,), "float32")
    O = T.match_buffer(o, (rows, width), "float32")
    total = T.alloc_buffer((1,), "float32")
    for i in T.serial(rows):
        total[0] = T.float32(0)
        for j in T.serial(width):
            total[0] = total[0] + (H[i, j] + R[i, j]) * (H[i, j] + R[i, j])
        for j in T.serial(width):
            O[i, j] = (H[i, j] + R[i, j]) / T.sqrt(total[0] / T.Cast("float32", width) + T.float32(1e-5)) * W[j]


compiled = tvm.compile(tvm.IRModule({"main": rms}), target="llvm")


compiled_squares = tvm.compile(tvm.IRModule({"main": squares}), target="llvm")
compiled_scale = tvm.compile(tvm.IRModule({"main": scale}), target="llvm")


def fused(h, r, w, out):
    compiled(h, r, w, out)


def split(h, r, w, out):
    sums = torch.empty(len(h))
    compiled_squares(h, r, sums)
    compiled_scale(h, r, w, sums, out)


spent = {fused: [], split: []}


def solve(hidden_states, residual, weight):
    untried = [variant for variant, times in spent.items() if len(times) < 3]
    variant = untried[0] if untried else min(spent, key=lambda v: min(spent[v]))
    out = torch.empty(hidden_states.shape)
    start = time.perf_counter()
    variant(hidden_states.float(), residual.float(), weight.float(), out)
    spent[variant].append(time.perf_counter() - start)
    return out.to(hidden_states.dtype)
