"""SwiGLU experts applied to the tokens that were routed to them, in the rounding order of Hugging Face's layers."""

from __future__ import annotations

import torch
from torch.nn.functional import grouped_mm, silu


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """(silu(x · gateᵀ) * (x · upᵀ)) · downᵀ; every product, the silu and the elementwise product round to x's dtype."""
    return (silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def routed_loop(
    x: torch.Tensor,
    selected: torch.Tensor,
    weights: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """[tokens, width]: the weighted sum of each token's experts, one expert after the other in ascending order.

    `x` is [tokens, width], `selected` and `weights` are [tokens, k], the projections are [experts, out, in]. Weighted
    rows are rounded to x's dtype and added in x's dtype.
    """
    out = torch.zeros_like(x)
    for expert in range(len(gate)):
        token, slot = torch.where(selected == expert)
        if len(token) == 0:
            continue
        rows = swiglu(x[token], gate[expert], up[expert], down[expert])
        out.index_add_(0, token, rows * weights[token, slot, None])
    return out


def routed_grouped(
    x: torch.Tensor,
    selected: torch.Tensor,
    weights: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """`routed_loop` with one grouped product per projection: pairs are sorted by expert and summed per token."""
    experts = selected.flatten()
    order = torch.argsort(experts, stable=True)
    ends = torch.bincount(experts, minlength=len(gate)).cumsum(0).to(torch.int32)
    rows = x[order // selected.shape[1]]
    hidden = silu(grouped_mm(rows, gate.transpose(1, 2), offs=ends)) * grouped_mm(rows, up.transpose(1, 2), offs=ends)
    unsorted = torch.empty_like(rows)
    unsorted[order] = grouped_mm(hidden, down.transpose(1, 2), offs=ends)
    return (unsorted.view(*selected.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)
