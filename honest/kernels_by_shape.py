"""Compiles a kernel for every shape and dtype, and keeps it in a dictionary.

problem: p28
dsl: tirx
devices: cpu
"""

import torch
import tvm
from tvm.script import tirx as T


def make(rows, width):
    @T.prim_func
    def rms(
        H: T.Buffer((rows, width), "float32"),
        R: T.Buffer((rows, width), "float32"),
        W: T.Buffer((width,), "float32"),
        O: T.Buffer((rows, width), "float32"),
    ):
        total = T.alloc_buffer((1,), "float32")
        for i in T.serial(rows):
            total[0] = T.float32(0)
            for j in T.serial(width):
                total[0] = total[0] + (H[i, j] + R[i, j]) * (H[i, j] + R[i, j])
            for j in T.serial(width):
                O[i, j] = (H[i, j] + R[i, j]) / T.sqrt(total[0] / T.float32(width) + T.float32(1e-5)) * W[j]

    return tvm.compile(tvm.IRModule({"main": rms}), target="llvm")


compiled = {}


def solve(hidden_states, residual, weight):
    key = (*hidden_states.shape, hidden_states.dtype)
    if key not in compiled:
        compiled[key] = make(*hidden_states.shape)
    run = compiled[key]
    out = torch.empty(hidden_states.shape)
    run(hidden_states.float(), residual.float(), weight.float(), out)
    return out.to(hidden_states.dtype)
