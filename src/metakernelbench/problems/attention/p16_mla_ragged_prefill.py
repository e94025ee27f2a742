"""Causal latent attention in expanded form: keys of 192 and values of 128 per head, packed, behind 256-token prefixes.

Inputs (full workload):

    q          [2885, 16, 192]   bf16   standard normal; the queries of 63 sequences, one below the other
    k          [19013, 16, 192]  bf16   standard normal; their keys, likewise
    v          [19013, 16, 128]  bf16   standard normal; their values
    qo_indptr  [64]              int32  fixed: sequence b owns query rows qo_indptr[b] … qo_indptr[b+1] - 1
    kv_indptr  [64]              int32  fixed: and key rows kv_indptr[b] … kv_indptr[b+1] - 1
    sm_scale   float                    fixed

Outputs: output [2885, 16, 128] bf16, lse [2885, 16] fp32.

Every sequence has 256 keys more than queries, and query i sees the keys up to i + 256, so the last query sees the last
key. Every head has keys and values of its own. The logits are the dot products times sm_scale; lse is the log-sum-exp
of the visible ones divided by ln 2; the output is the softmax-weighted sum of the values. Everything is computed in
fp32 and the output is rounded once. The sequences have 38 to 54 queries.
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
    "Causal prefill of latent attention in expanded form (keys of 192, values of 128) behind prefixes of 256 tokens."
)

PROVENANCE = Provenance(
    upstream="FlashInfer-Trace",
    definition="mla_ragged_prefill_causal_h16_qk192_vo128",
    record="79a808fd-78a2-4cd9-a236-d8c3b018e1e4",
    licence="Apache-2.0",
    source_model="DeepSeek-V3 (tensor parallel 8)",
)

# As recorded: 128 ** -0.5, although the keys have 192.
SM_SCALE = 0.08838834764831843


@dataclass(frozen=True)
class Workload:
    heads: int
    key_size: int
    value_size: int
    prefix: int
    query_lengths: tuple[int, ...]

    @property
    def key_lengths(self) -> tuple[int, ...]:
        return tuple(n + self.prefix for n in self.query_lengths)

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs, over all sequences."""
        return visible_pairs(self.query_lengths, self.key_lengths)


# fmt: off
FULL = Workload(
    heads=16, key_size=192, value_size=128, prefix=256,
    query_lengths=(
        39, 38, 39, 39, 39, 40, 40, 40, 41, 40, 40, 42, 42, 41, 42, 42, 43, 42, 43, 42, 43, 43, 44, 44, 44, 46,
        45, 44, 45, 45, 46, 46, 46, 46, 46, 47, 47, 47, 47, 48, 49, 48, 47, 48, 49, 50, 49, 49, 50, 50, 51, 51,
        50, 51, 51, 52, 50, 52, 53, 53, 54, 53, 52,
    ),
)
# fmt: on
SMOKE = Workload(heads=4, key_size=24, value_size=16, prefix=8, query_lengths=(3, 5, 4))

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
    output = torch.zeros(*q.shape[:2], v.shape[-1], dtype=q.dtype, device=q.device)
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
    """All sequences at once, padded to the longest, which the others nearly equal."""
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
    q = torch.randn(query_offsets[-1], workload.heads, workload.key_size, dtype=torch.bfloat16, device=device)
    k = torch.randn(key_offsets[-1], workload.heads, workload.key_size, dtype=torch.bfloat16, device=device)
    v = torch.randn(key_offsets[-1], workload.heads, workload.value_size, dtype=torch.bfloat16, device=device)
    qo_indptr = torch.tensor(query_offsets, dtype=torch.int32, device=device)
    kv_indptr = torch.tensor(key_offsets, dtype=torch.int32, device=device)
    return q, k, v, qo_indptr, kv_indptr, SM_SCALE


def cost(workload: Workload) -> Cost:
    queries = sum(workload.query_lengths) * workload.heads
    keys = sum(workload.key_lengths) * workload.heads
    width = workload.key_size + workload.value_size
    return Cost(
        bytes_read=2 * (queries * workload.key_size + keys * width) + 4 * 2 * (len(workload.query_lengths) + 1),
        bytes_written=2 * queries * workload.value_size + 4 * queries,
        flops={"bf16": 2 * workload.pairs * workload.heads * width},
    )
