"""Causal grouped-query attention over packed keys and values of very uneven sequences behind short prefixes.

Inputs (full workload):

    q          [15687, 16, 128]  bf16   standard normal; the queries of 71 sequences, one below the other
    k          [17699, 2, 128]   bf16   standard normal; their keys, likewise
    v          [17699, 2, 128]   bf16   standard normal; their values
    qo_indptr  [72]              int32  fixed: sequence b owns query rows qo_indptr[b] … qo_indptr[b+1] - 1
    kv_indptr  [72]              int32  fixed: and key rows kv_indptr[b] … kv_indptr[b+1] - 1
    sm_scale   float                    fixed

Outputs: output [15687, 16, 128] bf16, lse [15687, 16] fp32.

A sequence has 0 to 64 keys more than queries, and query i sees the keys up to i + that difference, so the last query
sees the last key. Query head h reads KV head h // 8. The logits are the dot products times sm_scale; lse is the
log-sum-exp of the visible ones divided by ln 2; the output is the softmax-weighted sum of the values. Everything is
computed in fp32 and the output is rounded once. The sequences have 1 to 2,678 queries.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats.grouped_attention import (
    attend,
    attend_without_repeating,
    hidden_keys,
    visible_pairs,
)
from metakernelbench.problems.formats.paged import offsets_of, spans
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = "Causal grouped-query prefill over packed keys and values of very uneven sequences with short prefixes."

PROVENANCE = Provenance(
    upstream="FlashInfer-Trace",
    definition="gqa_ragged_prefill_causal_h16_kv2_d128",
    record="560c22ab-7115-40f8-b2d8-63b98563e53f",
    licence="Apache-2.0",
    source_model="Qwen3-32B (tensor parallel 4)",
    inferred=(
        "The prefix lengths are the benchmark's invention, so that sequences differ in them; the rest is recorded.",
    ),
)

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
    query_heads=16, kv_heads=2, head_size=128,
    query_lengths=(
        133, 181, 9, 8, 14, 43, 24, 29, 2383, 2678, 314, 14, 420, 134, 4, 15, 43, 2024, 23, 1618, 1086, 300, 49,
        7, 340, 422, 1, 68, 18, 7, 74, 3, 20, 21, 12, 31, 3, 7, 21, 40, 14, 107, 11, 6, 30, 9, 26, 24, 301, 266,
        247, 75, 49, 23, 9, 4, 441, 15, 349, 27, 14, 17, 54, 6, 13, 8, 147, 8, 7, 9, 730,
    ),
    prefix_lengths=(
        0, 64, 17, 39, 5, 58, 26, 44, 11, 0, 33, 61, 8, 22, 49, 0, 14, 55, 30, 3, 41, 64, 19, 7, 36, 0, 52, 24,
        60, 13, 28, 46, 1, 0, 57, 20, 35, 9, 63, 42, 16, 0, 50, 27, 4, 38, 59, 23, 12, 45, 0, 31, 54, 18, 6, 40,
        62, 29, 15, 48, 0, 34, 21, 51, 10, 56, 2, 43, 25, 37, 0,
    ),
)
# fmt: on
SMOKE = Workload(query_heads=8, kv_heads=2, head_size=16, query_lengths=(5, 1, 12, 3), prefix_lengths=(0, 4, 3, 2))

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
    """Still one sequence at a time, since padding to the longest would multiply the work, but without repeating keys
    and values for the heads that share them, and with one cast for all sequences."""
    compute = wide(q)
    q_wide, k_wide, v_wide = q.to(compute), k.to(compute), v.to(compute)
    outputs, lses = [], []
    for (first, last), (start, stop) in zip(spans(qo_indptr), spans(kv_indptr), strict=True):
        keys, queries = stop - start, last - first
        hidden = hidden_keys(torch.arange(queries, device=q.device), keys, keys - queries)
        attended, lse = attend_without_repeating(
            q_wide[first:last], k_wide[start:stop], v_wide[start:stop], sm_scale, hidden
        )
        outputs.append(attended)
        lses.append(lse)
    return torch.cat(outputs).to(q.dtype), torch.cat(lses)


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
