"""A first draft, and wrong: it normalises the hidden states alone, and adds the residual to the result."""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

EPS = 1e-5


@T.jit
def norm(h: T.handle, r: T.handle, w: T.handle, o: T.handle, *, width: T.constexpr):
    rows = T.int32()
    hidden = T.match_buffer(h, (rows, width), "bfloat16")
    residual = T.match_buffer(r, (rows, width), "bfloat16")
    weight = T.match_buffer(w, (width,), "bfloat16")
    out = T.match_buffer(o, (rows, width), "bfloat16")
    total = T.alloc_buffer((1,), "float32", scope="local")
    for row in T.serial(rows):
        total[0] = T.float32(0)
        for c in T.serial(width):
            total[0] = total[0] + T.cast(hidden[row, c], "float32") * T.cast(hidden[row, c], "float32")
        total[0] = T.float32(1) / T.sqrt(total[0] / T.float32(width) + T.float32(EPS))
        for c in T.serial(width):
            out[row, c] = T.cast(
                T.cast(hidden[row, c], "float32") * total[0] * T.cast(weight[c], "float32")
                + T.cast(residual[row, c], "float32"),
                "bfloat16",
            )


@cache
def kernel_for(width: int):
    return tvm.compile(tvm.IRModule({"main": norm.specialize(width=width)}), target="llvm")["main"]


def solve(hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(hidden_states)
    kernel_for(hidden_states.shape[-1])(hidden_states, residual, weight, out)
    return out
