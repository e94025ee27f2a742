"""Attention of one sequence with grouped heads: the core that the paged and ragged problems share.

Query heads h·G … h·G + G - 1 share KV head h, where G is the number of query heads per KV head.
"""

import math
from collections.abc import Iterable

import torch


def hidden_keys(rows: torch.Tensor, keys: int, offset: int) -> torch.Tensor:
    """[rows, keys], True where the query may not see the key: row i sees the keys up to i + `offset`.

    `rows` holds row numbers within the sequence; `offset` is its number of keys less its number of queries, so that the
    last query sees the last key.
    """
    return torch.arange(keys, device=rows.device) > rows[:, None] + offset


def visible_pairs(query_lengths: Iterable[int], key_lengths: Iterable[int]) -> int:
    """How many (query, key) pairs such a mask leaves, over all sequences."""
    pairs = 0
    for queries, keys in zip(query_lengths, key_lengths, strict=True):
        pairs += queries * (keys - queries) + queries * (queries + 1) // 2
    return pairs


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, hidden: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [rows, heads, d] over k and v [keys, kv_heads, d], all in the dtype to compute in.

    Returns the output [rows, heads, d] and the log-sum-exp of the logits divided by ln 2 [rows, heads]. The logits are
    the dot products, times `sm_scale` afterwards. The KV heads are repeated for the query heads that share them.
    """
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
    logits = torch.einsum("qhd,khd->hqk", q, k) * sm_scale
    if hidden is not None:
        logits = logits.masked_fill(hidden, -math.inf)
    lse = torch.logsumexp(logits, dim=-1) / math.log(2)
    output = torch.einsum("hqk,khd->qhd", torch.softmax(logits, dim=-1), v)
    return output, lse.transpose(0, 1)


def attend_without_repeating(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, hidden: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `attend` computes, with the query heads of a KV head as further rows: no key or value is repeated.

    All tensors may have a leading axis of sequences, padded to the longest, with `hidden` [sequences, rows, keys].
    """
    kv_heads = k.shape[-2]
    grouped = q.reshape(*q.shape[:-2], kv_heads, q.shape[-2] // kv_heads, q.shape[-1])
    logits = torch.einsum("...qhgd,...khd->...hgqk", grouped, k) * sm_scale
    if hidden is not None:
        logits = logits.masked_fill(hidden[..., None, None, :, :], -math.inf)
    lse = torch.logsumexp(logits, dim=-1) / math.log(2)
    output = torch.einsum("...hgqk,...khd->...qhgd", torch.softmax(logits, dim=-1), v)
    return output.flatten(-3, -2), lse.movedim(-1, -3).flatten(-2)
