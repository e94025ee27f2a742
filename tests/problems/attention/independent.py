"""Attention by other means: torch's own kernel in float64, on tokens collected one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention

type Attended = tuple[torch.Tensor, torch.Tensor]


def listed_tokens(cache: torch.Tensor, pages: list[int], count: int) -> torch.Tensor:
    """The first `count` slots of `pages`, looked up one at a time: [count, ...]."""
    page_size = cache.shape[1]
    return torch.stack([cache[pages[i // page_size], i % page_size] for i in range(count)])


def pieces(x: torch.Tensor, offsets: torch.Tensor) -> list[torch.Tensor]:
    """The rows of every sequence."""
    return [x[start:stop] for start, stop in pairwise(offsets.tolist())]


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool = False, shift: int = 0
) -> Attended:
    """q [rows, heads, d] over k, v [keys, kv_heads, d]: float64 output and base-2 log-sum-exp.

    Causal: the last row sees the last key (and `shift` keys more, to get it wrong).
    """
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    rows, keys = q.shape[1], k.shape[1]
    visible = torch.ones(rows, keys, dtype=torch.bool)
    if causal:
        visible = visible.tril(keys - rows + shift)
    output = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=visible, scale=scale, enable_gqa=True)
    lse = torch.empty(rows, q.shape[0], dtype=torch.float64)
    for h in range(q.shape[0]):
        logits = q[h] @ k[h // (q.shape[0] // k.shape[0])].T * scale
        for i in range(rows):
            lse[i, h] = math.log2(sum(math.exp(x) for x in logits[i, visible[i]].tolist()))
    return output[0].transpose(0, 1), lse


def packed(dtype: torch.dtype, parts: Iterable[Attended]) -> Attended:
    """The outputs of all sequences, one below the other, in the dtypes of the references."""
    outputs, lses = zip(*parts, strict=True)
    return torch.cat(outputs).to(dtype), torch.cat(lses).float()


def natural_lse(reference: Callable[..., Attended]) -> Callable[..., Attended]:
    """`reference` with the log-sum-exp in natural units."""

    def implementation(*inputs):
        output, lse = reference(*inputs)
        return output, lse * math.log(2)

    return implementation


def query_scaled_in_its_own_dtype(reference: Callable[..., Attended]) -> Callable[..., Attended]:
    """`reference` with the scale folded into a query that is rounded again. The query is the first argument and the
    scale the last, as in all the grouped-query problems."""

    def implementation(q, *others):
        return reference((q * others[-1]).to(q.dtype), *others[:-1], 1.0)

    return implementation


def heads_interleaved(reference: Callable[..., Attended], kv_heads: int) -> Callable[..., Attended]:
    """`reference` with query head h on KV head h mod `kv_heads` instead of consecutive heads sharing one."""

    def implementation(q, *others):
        heads = torch.arange(q.shape[1]).view(-1, kv_heads).T.flatten()  # the order in which equal remainders meet
        back = heads.argsort()
        output, lse = reference(q[:, heads], *others)
        return output[:, back], lse[:, back]

    return implementation


def last_entry_repeats_the_one_before(offsets: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A change of a page list that loses the last entry of every sequence of at least two."""

    def change(entries):
        entries = entries.clone()
        for start, stop in pairwise(offsets.tolist()):
            if stop - start > 1:
                entries[stop - 1] = entries[stop - 2]
        return entries

    return change
