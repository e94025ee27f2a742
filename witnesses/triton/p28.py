"""p28, fused add RMSNorm, in Triton: a program normalises a few whole rows, which it reads once."""

import torch
import triton
import triton.language as tl

EPS = 1e-5


@triton.jit
def norm(hidden, residual, weight, out, rows, width, EPS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    place = row[:, None] * width + column[None, :]
    x = tl.load(hidden + place, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / width + EPS)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + place, (x * scale[:, None] * w[None, :]).to(tl.bfloat16), mask=inside)


def solve(hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows, width = hidden_states.shape
    per_program = 1 if hidden_states.is_cuda else 16
    out = torch.empty_like(hidden_states)
    norm[(triton.cdiv(rows, per_program),)](
        hidden_states,
        residual,
        weight,
        out,
        rows,
        width,
        EPS=EPS,
        ROWS=per_program,
        WIDTH=triton.next_power_of_2(width),
    )
    return out
