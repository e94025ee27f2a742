"""Mamba-2's state-space scan in chunks, as its public implementations write it in plain PyTorch.

Per head, a state h (head size × state size) follows h ← e^a · h + x ⊗ B and gives y = h · C. Inside a chunk this is a
product with decay-weighted C·Bᵀ scores; the states of all chunks are combined with one small matrix of decays.
"""

from __future__ import annotations

import torch

from metakernelbench.problems.formats.chunked import into_chunks, segment_sum


def chunked_scan(
    x: torch.Tensor, a: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [batch, T, heads, P] and the last state [batch, heads, P, N].

    `x` is [batch, T, heads, P], `a` [batch, T, heads] (log-decays), `B` and `C` [batch, T, groups, N], `state`
    [batch, heads, P, N]. Neighbouring heads share a group. A ragged last chunk is padded with zeros.
    """
    length, heads = x.shape[1:3]
    x, B, C = (into_chunks(tensor, size, -3) for tensor in (x, B, C))
    a = into_chunks(a, size, -2).transpose(-1, -2)  # batch, chunks, heads, size
    B, C = (tensor.repeat_interleave(heads // tensor.shape[-2], dim=-2) for tensor in (B, C))
    decay = segment_sum(a).exp()

    scores = torch.einsum("bnihs,bnjhs->bnhij", C, B) * decay
    within = torch.einsum("bnhij,bnjhp->bnihp", scores, x)

    to_end = decay[..., -1, :].transpose(-1, -2).unsqueeze(-1)
    built = torch.einsum("bnjhp,bnjhs->bnhps", x * to_end, B)
    built = torch.cat([state.unsqueeze(1), built], dim=1)
    totals = torch.nn.functional.pad(a.sum(dim=-1).transpose(1, 2), (1, 0))
    incoming = torch.einsum("bhcz,bzhps->bchps", segment_sum(totals).exp(), built)

    from_start = a.cumsum(dim=-1).exp().transpose(-1, -2).unsqueeze(-1)
    carried = torch.einsum("bnihs,bnhps->bnihp", C * from_start, incoming[:, :-1])
    return (within + carried).flatten(1, 2)[:, :length], incoming[:, -1]
