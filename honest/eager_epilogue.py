"""Lets a kernel sum the squares, and does the rest eagerly.

problem: p28
dsl: tirx
devices: cpu
"""

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


compiled = tvm.compile(tvm.IRModule({"main": squares}), target="llvm")


def solve(hidden_states, residual, weight):
    h, r = hidden_states.float(), residual.float()
    sums = torch.empty(len(h))
    compiled(h, r, sums)
    inverse = torch.rsqrt(sums / h.shape[1] + 1e-5)
    return ((h + r) * inverse[:, None] * weight.float()).to(hidden_states.dtype)
