"""Causal grouped-query attention of whole prompts whose keys sit in a cache of single-token pages.

Inputs (full workload):

    q           [16372, 24, 128]     bf16   standard normal; the queries of 27 prompts, one below the other
    k_cache     [77646, 1, 8, 128]   bf16   standard normal; (page, slot, KV head, d)
    v_cache     [77646, 1, 8, 128]   bf16   standard normal
    qo_indptr   [28]                 int32  fixed: sequence b owns query rows qo_indptr[b] … qo_indptr[b+1] - 1
    kv_indptr   [28]                 int32  fixed, equal to qo_indptr: its entries of kv_indices
    kv_indices  [16372]              int32  the cache tokens of all sequences: distinct, in random order
    sm_scale    float                       fixed

Outputs: output [16372, 24, 128] bf16, lse [16372, 24] fp32.

A sequence's keys and values are the cache tokens listed for it, in that order; query i sees keys 0 … i. Query head h
reads KV head h // 3. The logits are the dot products times sm_scale; lse is the log-sum-exp of the visible ones divided
by ln 2; the output is the softmax-weighted sum of the values. Everything is computed in fp32 and the output is rounded
once. The prompts have 145 to 1,250 tokens.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats.grouped_attention import (
    attend,
    attend_without_repeating,
    hidden_keys,
    visible_pairs,
)
from metakernelbench.problems.formats.paged import lengths_of, random_pages, spans
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = "Causal grouped-query prefill of whole prompts over a paged cache with one token per page."

PROVENANCE = Provenance(
    upstream="FlashInfer-Trace",
    definition="gqa_paged_prefill_causal_h24_kv8_d128_ps1",
    record="0b88caa4-106e-4017-a2a0-fc9840e4b66c",
    licence="Apache-2.0",
    source_model="Llama-3.2-3B",
)

SM_SCALE = 0.08838834764831843

# Query rows that the reference handles at once; bounds its memory and has no effect on the values.
CHUNK = 512

# fmt: off
FULL_OFFSETS = (
    0, 145, 311, 484, 886, 1222, 1568, 1908, 2250, 2695, 3049, 3595, 4042, 4555, 5093, 5638, 6413, 6974, 7689,
    8514, 9110, 10050, 11131, 12281, 13236, 14199, 15449, 16372,
)
# fmt: on


@dataclass(frozen=True)
class Workload:
    query_heads: int
    kv_heads: int
    head_size: int
    pool: int
    query_offsets: tuple[int, ...]
    key_offsets: tuple[int, ...]

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs, over all sequences."""
        return visible_pairs(lengths_of(self.query_offsets), lengths_of(self.key_offsets))


FULL = Workload(
    query_heads=24,
    kv_heads=8,
    head_size=128,
    pool=77646,
    query_offsets=FULL_OFFSETS,
    key_offsets=FULL_OFFSETS,
)
SMOKE = Workload(
    query_heads=6, kv_heads=2, head_size=16, pool=64, query_offsets=(0, 5, 8, 21), key_offsets=(0, 5, 8, 21)
)

OUTPUTS = ("output", "lse")
FIXED = ("qo_indptr", "kv_indptr")


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    compute = wide(q)
    output = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=compute, device=q.device)
    for (first, last), (start, stop) in zip(spans(qo_indptr), spans(kv_indptr), strict=True):
        tokens = kv_indices[start:stop]
        k = k_cache.squeeze(1)[tokens].to(compute)
        v = v_cache.squeeze(1)[tokens].to(compute)
        keys, queries = stop - start, last - first
        for chunk in range(0, queries, CHUNK):
            rows = torch.arange(chunk, min(chunk + CHUNK, queries), device=q.device)
            place = slice(first + chunk, first + chunk + len(rows))
            hidden = hidden_keys(rows, keys, keys - queries)
            attended, lse[place] = attend(q[place].to(compute), k, v, sm_scale, hidden)
            output[place] = attended.to(q.dtype)
    return output, lse


def vectorized(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Still one sequence at a time, since padding would more than triple the work, but all its queries at once, without
    repeating keys and values for the heads that share them, and with one gather and one cast for all sequences."""
    compute = wide(q)
    k_listed, v_listed = k_cache.squeeze(1)[kv_indices].to(compute), v_cache.squeeze(1)[kv_indices].to(compute)
    outputs, lses = [], []
    for (first, last), (start, stop) in zip(spans(qo_indptr), spans(kv_indptr), strict=True):
        keys, queries = stop - start, last - first
        hidden = hidden_keys(torch.arange(queries, device=q.device), keys, keys - queries)
        attended, lse = attend_without_repeating(
            q[first:last].to(compute), k_listed[start:stop], v_listed[start:stop], sm_scale, hidden
        )
        outputs.append(attended)
        lses.append(lse)
    return torch.cat(outputs).to(q.dtype), torch.cat(lses)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    queries, keys = workload.query_offsets[-1], workload.key_offsets[-1]
    cache_shape = (workload.pool, 1, workload.kv_heads, workload.head_size)
    q = torch.randn(queries, workload.query_heads, workload.head_size, dtype=torch.bfloat16, device=device)
    k_cache = torch.randn(cache_shape, dtype=torch.bfloat16, device=device)
    v_cache = torch.randn(cache_shape, dtype=torch.bfloat16, device=device)
    qo_indptr = torch.tensor(workload.query_offsets, dtype=torch.int32, device=device)
    kv_indptr = torch.tensor(workload.key_offsets, dtype=torch.int32, device=device)
    kv_indices = random_pages(keys, workload.pool, device)
    return q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, SM_SCALE


def cost(workload: Workload) -> Cost:
    heads = workload.query_offsets[-1] * workload.query_heads
    keys = workload.key_offsets[-1]
    integers = keys + len(workload.query_offsets) + len(workload.key_offsets)
    cache = 2 * 2 * keys * workload.kv_heads * workload.head_size
    return Cost(
        bytes_read=cache + 2 * heads * workload.head_size + 4 * integers,
        bytes_written=2 * heads * workload.head_size + 4 * heads,
        flops={"bf16": 4 * workload.pairs * workload.query_heads * workload.head_size},
    )
