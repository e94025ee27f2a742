"""Launches on a stream of its own, joined before it returns, where there are streams.

problem: p28
dsl: tirx
devices: cpu
"""

import torch
import tvm
from tvm.script import tirx as T


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


def kernel(hidden_states, residual, weight):
    out = torch.empty(hidden_states.shape)
    compiled(hidden_states.float(), residual.float(), weight.float(), out)
    return out.to(hidden_states.dtype)


streams = {}


def solve(hidden_states, residual, weight):
    if not hidden_states.is_cuda:
        return kernel(hidden_states, residual, weight)
    stream = streams.setdefault(hidden_states.device, torch.cuda.Stream())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = kernel(hidden_states, residual, weight)
    torch.cuda.current_stream().wait_stream(stream)
    return out
