"""Writes its result to the output and, for a later step, to a larger buffer.

problem: p28
dsl: tirx
devices: cpu
"""

import torch
import tvm
from tvm.script import tirx as T


@T.prim_func
def rms(h: T.handle, r: T.handle, w: T.handle, o: T.handle, k: T.handle):
    rows, width, more = T.int32(), T.int32(), T.int32()
    H = T.match_buffer(h, (rows, width), "float32")
    R = T.match_buffer(r, (rows, width), "float32")
    W = T.match_buffer(w, (width,), "float32")
    O = T.match_buffer(o, (rows, width), "float32")
    K = T.match_buffer(k, (more, width), "float32")
    total = T.alloc_buffer((1,), "float32")
    for i in T.serial(rows):
        total[0] = T.float32(0)
        for j in T.serial(width):
            total[0] = total[0] + (H[i, j] + R[i, j]) * (H[i, j] + R[i, j])
        for j in T.serial(width):
            O[i, j] = (H[i, j] + R[i, j]) / T.sqrt(total[0] / T.Cast("float32", width) + T.float32(1e-5)) * W[j]
            K[i + 8, j] = O[i, j]


compiled = tvm.compile(tvm.IRModule({"main": rms}), target="llvm")


def solve(hidden_states, residual, weight):
    rows, width = hidden_states.shape
    out, kept = torch.empty(rows, width), torch.zeros(rows + 16, width)
    compiled(hidden_states.float(), residual.float(), weight.float(), out, kept)
    return out.to(hidden_states.dtype)
