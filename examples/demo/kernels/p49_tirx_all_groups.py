"""Wrong: the eight best experts of all groups, where only those of the four best groups may be chosen."""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

TOP_K = 8
NEVER = -3.0e38


@T.jit
def route(x: T.handle, b: T.handle, factor: T.float32, i: T.handle, w: T.handle, *, experts: T.constexpr):
    tokens = T.int32()
    logits = T.match_buffer(x, (tokens, experts), "float32")
    bias = T.match_buffer(b, (experts,), "bfloat16")
    indices = T.match_buffer(i, (tokens, TOP_K), "int64")
    weights = T.match_buffer(w, (tokens, TOP_K), "float32")
    score = T.alloc_buffer((experts,), "float32", scope="local")
    biased = T.alloc_buffer((experts,), "float32", scope="local")
    chosen = T.alloc_buffer((1,), "int32", scope="local")
    total = T.alloc_buffer((1,), "float32", scope="local")
    for token in T.serial(tokens):
        for e in T.serial(experts):
            score[e] = T.float32(1) / (T.float32(1) + T.exp(-logits[token, e]))
            biased[e] = score[e] + T.cast(bias[e], "float32")
        total[0] = T.float32(1e-20)
        for k in T.serial(TOP_K):
            chosen[0] = 0
            for e in T.serial(experts):
                if biased[e] > biased[chosen[0]]:
                    chosen[0] = e
            biased[chosen[0]] = T.float32(NEVER)
            indices[token, k] = T.cast(chosen[0], "int64")
            weights[token, k] = score[chosen[0]]
            total[0] = total[0] + score[chosen[0]]
        for k in T.serial(TOP_K):
            weights[token, k] = weights[token, k] / total[0] * factor


@cache
def kernel_for(experts: int):
    return tvm.compile(tvm.IRModule({"main": route.specialize(experts=experts)}), target="llvm")["main"]


def solve(
    hidden_states: torch.Tensor, weight: torch.Tensor, expert_bias: torch.Tensor, routed_scaling_factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, experts = hidden_states.shape[0], weight.shape[0]
    logits = torch.mm(hidden_states.float(), weight.float().t())
    indices = torch.empty(tokens, TOP_K, dtype=torch.int64)
    weights = torch.empty(tokens, TOP_K, dtype=torch.float32)
    kernel_for(experts)(logits, expert_bias, routed_scaling_factor, indices, weights)
    return indices, weights
