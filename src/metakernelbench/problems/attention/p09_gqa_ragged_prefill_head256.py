"""Causal grouped-query attention with heads of 256 over packed keys and values of short sequences behind prefixes.

Inputs (full workload):

    q          [3053, 8, 256]  bf16   standard normal; the queries of 63 sequences, one below the other
    k          [4841, 1, 256]  bf16   standard normal; their keys, likewise
    v          [4841, 1, 256]  bf16   standard normal; their values
    qo_indptr  [64]            int32  fixed: sequence b owns query rows qo_indptr[b] … qo_indptr[b+1] - 1
    kv_indptr  [64]            int32  fixed: and key rows kv_indptr[b] … kv_indptr[b+1] - 1
    sm_scale   float                  fixed

Outputs: output [3053, 8, 256] bf16, lse [3053, 8] fp32.

A sequence has 0 to 64 keys more than queries, and query i sees the keys up to i + that difference, so the last query
sees the last key. The eight query heads share the one KV head. The logits are the dot products times sm_scale; lse is
the log-sum-exp of the visible ones divided by ln 2; the output is the softmax-weighted sum of the values. Everything is
computed in fp32 and the output is rounded once. The sequences have 13 to 102 queries.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats.grouped_attention import (
    attend,
    attend_without_repeating,
    hidden_keys,
    visible_pairs,
)
from metakernelbench.problems.formats.paged import offsets_of, padded_rows, spans
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "Causal grouped-query prefill with head size 256 over packed keys and values of short sequences behind prefixes."
)

PROVENANCE = Provenance(
    upstream="FlashInfer-Trace",
    definition="gqa_ragged_prefill_causal_h8_kv1_d256",
    record="96ee50a6-c16e-4231-9253-e4565ed6213d",
    licence="Apache-2.0",
    source_model="Qwen3-Next-80B-A3B (tensor parallel 2)",
    inferred=(
        "The prefix lengths are the benchmark's invention, so that sequences differ in them; the rest is recorded.",
    ),
)

# As recorded: 128 ** -0.5, although the heads have 256.
SM_SCALE = 0.08838834764831843


@dataclass(frozen=True)
class Workload:
    query_heads: int
    kv_heads: int
    head_size: int
    query_lengths: tuple[int, ...]
    prefix_lengths: tuple[int, ...]

    @property
    def key_lengths(self) -> tuple[int, ...]:
        return tuple(q + p for q, p in zip(self.query_lengths, self.prefix_lengths, strict=True))

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs, over all sequences."""
        return visible_pairs(self.query_lengths, self.key_lengths)


# fmt: off
FULL = Workload(
    query_heads=8, kv_heads=1, head_size=256,
    query_lengths=(
        35, 71, 76, 69, 62, 52, 61, 39, 102, 94, 64, 44, 63, 37, 49, 56, 53, 58, 47, 18, 61, 83, 49, 63, 64, 19,
        82, 63, 17, 39, 59, 46, 66, 86, 41, 58, 36, 41, 33, 18, 19, 25, 32, 39, 68, 47, 73, 41, 50, 13, 27, 59,
        22, 29, 66, 23, 20, 37, 32, 40, 19, 55, 43,
    ),
    prefix_lengths=(
        0, 64, 17, 39, 5, 58, 26, 44, 11, 0, 33, 61, 8, 22, 49, 0, 14, 55, 30, 3, 41, 64, 19, 7, 36, 0, 52, 24,
        60, 13, 28, 46, 1, 0, 57, 20, 35, 9, 63, 42, 16, 0, 50, 27, 4, 38, 59, 23, 12, 45, 0, 31, 54, 18, 6, 40,
        62, 29, 15, 48, 0, 34, 21,
    ),
)
# fmt: on
SMOKE = Workload(query_heads=4, kv_heads=1, head_size=32, query_lengths=(4, 7, 3), prefix_lengths=(0, 5, 2))

OUTPUTS = ("output", "lse")
FIXED = ("qo_indptr", "kv_indptr")


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    compute = wide(q)
    output = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=compute, device=q.device)
    for (first, last), (start, stop) in zip(spans(qo_indptr), spans(kv_indptr), strict=True):
        keys, queries = stop - start, last - first
        hidden = hidden_keys(torch.arange(queries, device=q.device), keys, keys - queries)
        attended, lse[first:last] = attend(
            q[first:last].to(compute), k[start:stop].to(compute), v[start:stop].to(compute), sm_scale, hidden
        )
        output[first:last] = attended.to(q.dtype)
    return output, lse


def vectorized(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All sequences at once, padded to the longest: four times the work, but a dozen launches instead of hundreds."""
    compute = wide(q)
    query_rows, query_padding = padded_rows(qo_indptr)
    key_rows, key_padding = padded_rows(kv_indptr)
    prefix = (kv_indptr.diff() - qo_indptr.diff())[:, None, None]
    row, key = torch.arange(query_rows.shape[1], device=q.device), torch.arange(key_rows.shape[1], device=q.device)
    hidden = (key > row[:, None] + prefix) | key_padding[:, None]
    output, lse = attend_without_repeating(
        q[query_rows].to(compute), k[key_rows].to(compute), v[key_rows].to(compute), sm_scale, hidden
    )
    return output[~query_padding].to(q.dtype), lse[~query_padding]


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    query_offsets, key_offsets = offsets_of(workload.query_lengths), offsets_of(workload.key_lengths)
    key_shape = (key_offsets[-1], workload.kv_heads, workload.head_size)
    q_shape = (query_offsets[-1], workload.query_heads, workload.head_size)
    q = torch.randn(q_shape, dtype=torch.bfloat16, device=device)
    k = torch.randn(key_shape, dtype=torch.bfloat16, device=device)
    v = torch.randn(key_shape, dtype=torch.bfloat16, device=device)
    qo_indptr = torch.tensor(query_offsets, dtype=torch.int32, device=device)
    kv_indptr = torch.tensor(key_offsets, dtype=torch.int32, device=device)
    return q, k, v, qo_indptr, kv_indptr, SM_SCALE


def cost(workload: Workload) -> Cost:
    heads = sum(workload.query_lengths) * workload.query_heads
    keys_and_values = 2 * 2 * sum(workload.key_lengths) * workload.kv_heads * workload.head_size
    return Cost(
        bytes_read=2 * heads * workload.head_size + keys_and_values + 4 * 2 * (len(workload.query_lengths) + 1),
        bytes_written=2 * heads * workload.head_size + 4 * heads,
        flops={"bf16": 4 * workload.pairs * workload.query_heads * workload.head_size},
    )
