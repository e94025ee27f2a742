"""p72, one decode step of the gated delta rule, in Triton: a program updates some rows of the states of a few
(request, head) pairs. A row (one value channel, all key channels) depends on itself alone and is read and written once.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def step(
    q,
    k,
    v,
    state,
    log_rate,
    gate,
    gate_bias,
    strength,
    out,
    new_state,
    scale,
    query_heads,
    key_heads,
    heads,
    pairs,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
):
    pair = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    inside = pair < pairs
    request, head = pair // heads, pair % heads
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SIZE)
    in_row = inside[:, None]

    rate = tl.load(gate + pair, mask=inside, other=0.0).to(tl.float32) + tl.load(gate_bias + head)
    tail = tl.exp(-tl.abs(rate))
    # log(1 + t) as exact as t: what 1 + t loses by rounding is put back in proportion (Kahan).
    near = 1.0 + tail
    rest = near - 1.0
    logarithm = tl.where(rest == 0.0, tail, tl.log(near) * tail / tl.where(rest == 0.0, 1.0, rest))
    step_size = tl.where(rate > 0.0, rate, 0.0) + logarithm
    decay = tl.exp(-tl.exp(tl.load(log_rate + head)) * step_size)
    beta = 1.0 / (1.0 + tl.exp(-tl.load(strength + pair, mask=inside, other=0.0).to(tl.float32)))

    key_head = request * key_heads + head // (heads // key_heads)
    query_head = request * query_heads + head // (heads // query_heads)
    key = tl.load(k + key_head[:, None] * SIZE + column[None, :], mask=in_row, other=0.0).to(tl.float32)
    query = tl.load(q + query_head[:, None] * SIZE + column[None, :], mask=in_row, other=0.0).to(tl.float32)
    value = tl.load(v + pair[:, None] * SIZE + row[None, :], mask=in_row, other=0.0).to(tl.float32)

    place = (pair[:, None] * SIZE + row[None, :])[:, :, None] * SIZE + column[None, None, :]
    decayed = tl.load(state + place, mask=in_row[:, :, None], other=0.0) * decay[:, None, None]
    predicted = tl.sum(decayed * key[:, None, :], axis=2)
    updated = decayed + (beta[:, None] * (value - predicted))[:, :, None] * key[:, None, :]
    tl.store(new_state + place, updated, mask=in_row[:, :, None])
    answer = tl.sum(updated * query[:, None, :], axis=2) * scale
    tl.store(out + pair[:, None] * SIZE + row[None, :], answer.to(tl.bfloat16), mask=in_row)


def solve(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    requests, _, heads, size = v.shape
    pairs = requests * heads
    per_program, rows = (1, min(32, size)) if q.is_cuda else (16, size)
    output, new_state = torch.empty_like(v), torch.empty_like(state)
    step[(size // rows, triton.cdiv(pairs, per_program))](
        q,
        k,
        v,
        state,
        A_log,
        a,
        dt_bias,
        b,
        output,
        new_state,
        scale,
        q.shape[2],
        k.shape[2],
        heads,
        pairs,
        PAIRS=per_program,
        ROWS=rows,
        SIZE=size,
    )
    return output, new_state
