"""Causal grouped-query attention with one KV head, each sequence behind a short cached prefix, over single-token pages.

Inputs (full workload):

    q           [10847, 5, 128]      bf16   standard normal; the queries of 54 sequences, one below the other
    k_cache     [44264, 1, 1, 128]   bf16   standard normal; (page, slot, KV head, d)
    v_cache     [44264, 1, 1, 128]   bf16   standard normal
    qo_indptr   [55]                 int32  fixed: sequence b owns query rows qo_indptr[b] … qo_indptr[b+1] - 1
    kv_indptr   [55]                 int32  fixed: and entries kv_indptr[b] … kv_indptr[b+1] - 1 of kv_indices
    kv_indices  [10945]              int32  the cache tokens of all sequences: distinct, in random order
    sm_scale    float                       fixed

Outputs: output [10847, 5, 128] bf16, lse [10847, 5] fp32.

A sequence's keys and values are the cache tokens listed for it, in that order. It has 1 to 5 keys more than queries:
query i sees the keys up to i + that difference, so the last query sees the last key. The five query heads share the one
KV head. The logits are the dot products times sm_scale; lse is the log-sum-exp of the visible ones divided by ln 2; the
output is the softmax-weighted sum of the values. Everything is computed in fp32 and the output is rounded once. The
sequences have 1 to 5,139 queries; the two longest hold most of the work.
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

SUBJECT = (
    "Causal grouped-query prefill with one KV head and short cached prefixes over a paged cache of single-token pages."
)

PROVENANCE = Provenance(
    upstream="FlashInfer-Trace",
    definition="gqa_paged_prefill_causal_h5_kv1_d128_ps1",
    record="b84bca7b-dd0f-4315-a523-b106191c049e",
    licence="Apache-2.0",
    source_model="Llama-4-Scout-17B-16E (tensor parallel 8)",
)

SM_SCALE = 0.08838834764831843


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


# fmt: off
FULL = Workload(
    query_heads=5, kv_heads=1, head_size=128, pool=44264,
    query_offsets=(
        0, 5, 73, 74, 94, 113, 124, 153, 156, 162, 182, 216, 229, 338, 347, 353, 380, 389, 412, 432, 735, 1002,
        1250, 1325, 1373, 1394, 1402, 1406, 1840, 1855, 2171, 2191, 2205, 2222, 2270, 2274, 2286, 2292, 2441,
        2448, 2454, 2462, 3211, 5262, 5269, 5364, 5383, 5531, 5537, 5563, 5636, 5645, 5656, 5708, 10847,
    ),
    key_offsets=(
        0, 7, 76, 79, 100, 122, 134, 166, 170, 178, 200, 235, 250, 364, 376, 383, 414, 424, 448, 469, 774, 1043,
        1293, 1369, 1418, 1440, 1450, 1455, 1890, 1906, 2225, 2246, 2261, 2279, 2328, 2335, 2349, 2357, 2510,
        2519, 2526, 2536, 3289, 5341, 5350, 5449, 5469, 5619, 5626, 5653, 5727, 5737, 5752, 5805, 10945,
    ),
)
# fmt: on
SMOKE = Workload(
    query_heads=5, kv_heads=1, head_size=16, pool=40, query_offsets=(0, 3, 4, 13), key_offsets=(0, 5, 7, 17)
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
        hidden = hidden_keys(torch.arange(queries, device=q.device), keys, keys - queries)
        attended, lse[first:last] = attend(q[first:last].to(compute), k, v, sm_scale, hidden)
        output[first:last] = attended.to(q.dtype)
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
    """Still one sequence at a time, since the longest is nearly half of all queries, but without repeating keys and
    values for the heads that share them, and with one gather and one cast for all sequences."""
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
