"""Scores in a kernel and selects with torch's topk.

problem: p49
dsl: tirx
devices: cpu
"""

import torch
import tvm
from tvm.script import tirx as T


@T.prim_func
def product(a: T.handle, b: T.handle, c: T.handle):
    rows, columns, depth = T.int32(), T.int32(), T.int32()
    A = T.match_buffer(a, (rows, depth), "float32")
    B = T.match_buffer(b, (columns, depth), "float32")
    C = T.match_buffer(c, (rows, columns), "float32")
    for i, j in T.grid(rows, columns):
        C[i, j] = T.float32(0)
        for k in T.serial(depth):
            C[i, j] = C[i, j] + A[i, k] * B[j, k]


compiled = tvm.compile(tvm.IRModule({"main": product}), target="llvm")


def logits(hidden_states, weight):
    out = torch.empty(len(hidden_states), len(weight))
    compiled(hidden_states.float(), weight.float(), out)
    return out


def solve(hidden_states, weight, expert_bias, routed_scaling_factor):
    scores = logits(hidden_states, weight).sigmoid()
    biased = scores + expert_bias.float()
    grouped = biased.view(len(biased), 8, -1)
    best = grouped.topk(2, dim=-1).values.sum(-1).topk(4, dim=-1).indices
    kept = torch.zeros(len(biased), 8, dtype=torch.bool).scatter(1, best, True)
    chosen = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1).topk(8, dim=-1).indices
    selected = scores.gather(1, chosen)
    return chosen, selected / (selected.sum(-1, keepdim=True) + 1e-20) * routed_scaling_factor
