"""p49, group-limited top-k routing, in Triton. The router's product stays with eager PyTorch.

A program takes some tokens' logits through sigmoid, group ranking, ordered selection and weights.
"""

import torch
import triton
import triton.language as tl

GROUPS = 8
KEPT_GROUPS = 4
TOP_K = 8


@triton.jit
def route(
    logits,
    bias,
    indices,
    weights,
    tokens,
    factor,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    group = tl.arange(0, GROUPS)
    expert = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = (token < tokens)[:, None, None]
    place = token[:, None, None] * (GROUPS * SIZE) + expert[None, :, :]
    scores = 1.0 / (1.0 + tl.exp(-tl.load(logits + place, mask=inside, other=0.0)))
    biased = scores + tl.load(bias + expert).to(tl.float32)[None, :, :]

    best = tl.max(biased, axis=2)
    first = tl.argmax(biased, axis=2)[:, :, None] == tl.arange(0, SIZE)[None, None, :]
    group_score = best + tl.max(tl.where(first, float("-inf"), biased), axis=2)
    better = group_score[:, None, :] > group_score[:, :, None]
    kept = tl.sum(better.to(tl.int32), axis=2) < KEPT

    # An expert's place in the order is the number of experts before it; equal ones keep their own order.
    open_scores = tl.reshape(tl.where(kept[:, :, None], biased, float("-inf")), (TOKENS, GROUPS * SIZE))
    numbers = tl.arange(0, GROUPS * SIZE)
    other, own = open_scores[:, None, :], open_scores[:, :, None]
    before = (other > own) | ((other == own) & (numbers[None, None, :] < numbers[None, :, None]))
    rank = tl.sum(before.to(tl.int32), axis=2)
    places = tl.arange(0, TOP_K)
    here = rank[:, :, None] == places[None, None, :]
    selected = tl.sum(tl.where(here, numbers[None, :, None], 0), axis=1)
    flat_scores = tl.reshape(scores, (TOKENS, GROUPS * SIZE))
    values = tl.sum(tl.where(here, flat_scores[:, :, None], 0.0), axis=1)
    values = values / (tl.sum(values, axis=1) + 1e-20)[:, None] * factor
    target = token[:, None] * TOP_K + places[None, :]
    tl.store(indices + target, selected.to(tl.int64), mask=(token < tokens)[:, None])
    tl.store(weights + target, values, mask=(token < tokens)[:, None])


def solve(
    hidden_states: torch.Tensor, weight: torch.Tensor, expert_bias: torch.Tensor, routed_scaling_factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, experts = hidden_states.shape[0], weight.shape[0]
    if hidden_states.is_cuda:
        logits = torch.mm(hidden_states, weight.t(), out_dtype=torch.float32)
    else:
        logits = torch.mm(hidden_states.float(), weight.float().t())
    indices = torch.empty(tokens, TOP_K, dtype=torch.int64, device=weight.device)
    weights = torch.empty(tokens, TOP_K, dtype=torch.float32, device=weight.device)
    per_program = 1 if hidden_states.is_cuda else 16
    route[(triton.cdiv(tokens, per_program),)](
        logits,
        expert_bias,
        indices,
        weights,
        tokens,
        routed_scaling_factor,
        TOKENS=per_program,
        GROUPS=GROUPS,
        KEPT=KEPT_GROUPS,
        SIZE=experts // GROUPS,
        TOP_K=TOP_K,
    )
    return indices, weights
