"""Correct, with one program for every row: in Triton's interpreter each program costs as much as all of its work."""

import torch
import triton
import triton.language as tl


@triton.jit
def norm(hidden, residual, weight, out, width, EPS: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    inside = column < width
    place = tl.program_id(0) * width + column
    x = tl.load(hidden + place, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / width + EPS)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (x * scale * w).to(tl.bfloat16), mask=inside)


def solve(hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows, width = hidden_states.shape
    out = torch.empty_like(hidden_states)
    norm[(rows,)](hidden_states, residual, weight, out, width, EPS=1e-5, WIDTH=triton.next_power_of_2(width))
    return out
