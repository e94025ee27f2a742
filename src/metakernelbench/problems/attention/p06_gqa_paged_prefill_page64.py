"""Causal grouped-query attention of short query blocks over long contexts in pages of 64 tokens.

Inputs (full workload):

    q                 [6069, 24, 128]       bf16   standard normal; the queries of 15 sequences, one below the other
    k_cache           [32757, 64, 8, 128]   bf16   standard normal; (page, slot, KV head, d)
    v_cache           [32757, 64, 8, 128]   bf16   standard normal
    qo_indptr         [16]                  int32  fixed: sequence b owns query rows qo_indptr[b] … qo_indptr[b+1] - 1
    kv_indptr         [16]                  int32  fixed, the same numbers: its entries of kv_indices
    kv_indices        [6069]                int32  the pages of all sequences: distinct, in random order
    kv_last_page_len  [15]                  int32  fixed: all 1
    sm_scale          float                        fixed

Outputs: output [6069, 24, 128] bf16, lse [6069, 24] fp32.

A sequence's tokens are all slots of its pages in the order listed, except that of the last page only the first
kv_last_page_len[b] slots count; the slots after them hold unrelated data. A sequence of m pages has m queries and
64·(m - 1) + 1 keys; query i sees the keys up to i + 63·(m - 1), so the last query sees the last key. Query head h reads
KV head h // 3. The logits are the dot products times sm_scale; lse is the log-sum-exp of the visible ones divided by
ln 2; the output is the softmax-weighted sum of the values. Everything is computed in fp32 and the output is rounded
once. The sequences have 167 to 602 queries and 10,625 to 38,465 keys.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats.grouped_attention import (
    attend,
    attend_without_repeating,
    hidden_keys,
    visible_pairs,
)
from metakernelbench.problems.formats.paged import lengths_of, random_pages, sequence_tokens, spans
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = "Causal grouped-query prefill of short query blocks against long contexts in a paged cache of 64-token pages."

PROVENANCE = Provenance(
    upstream="FlashInfer-Trace",
    definition="gqa_paged_prefill_causal_h24_kv8_d128_ps64",
    record="022ad0c2-152e-4feb-abb2-c141f0e7eb52",
    licence="Apache-2.0",
    source_model="Llama-3.2-3B",
)

SM_SCALE = 0.08838834764831843

# Query rows that the reference handles at once; bounds its memory and has no effect on the values.
CHUNK = 512


@dataclass(frozen=True)
class Workload:
    query_heads: int
    kv_heads: int
    head_size: int
    page_size: int
    pool: int
    offsets: tuple[int, ...]
    """Of the query rows and, being as many in every sequence, of the pages."""
    last_page_lengths: tuple[int, ...]

    @property
    def key_lengths(self) -> tuple[int, ...]:
        pages = lengths_of(self.offsets)
        return tuple(self.page_size * (m - 1) + n for m, n in zip(pages, self.last_page_lengths, strict=True))

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs, over all sequences."""
        return visible_pairs(lengths_of(self.offsets), self.key_lengths)


# fmt: off
FULL = Workload(
    query_heads=24, kv_heads=8, head_size=128, page_size=64, pool=32757,
    offsets=(
        0, 206, 373, 612, 836, 1112, 1442, 1938, 2411, 2963, 3408, 3939, 4463, 4999, 5601, 6069,
    ),
    last_page_lengths=(1,) * 15,
)
SMOKE = Workload(
    query_heads=6, kv_heads=2, head_size=16, page_size=4, pool=32, offsets=(0, 4, 7, 12), last_page_lengths=(1, 1, 1),
)
# fmt: on

OUTPUTS = ("output", "lse")
FIXED = ("qo_indptr", "kv_indptr", "kv_last_page_len")


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    compute = wide(q)
    output = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=compute, device=q.device)
    group = q.shape[1] // k_cache.shape[2]
    sequences = zip(spans(qo_indptr), spans(kv_indptr), kv_last_page_len.tolist(), strict=True)
    for (first, last), (start, stop), last_length in sequences:
        k = sequence_tokens(k_cache, kv_indices[start:stop], last_length, compute)
        v = sequence_tokens(v_cache, kv_indices[start:stop], last_length, compute)
        keys, queries = k.shape[0], last - first
        for chunk in range(0, queries, CHUNK):
            rows = torch.arange(chunk, min(chunk + CHUNK, queries), device=q.device)
            place = slice(first + chunk, first + chunk + len(rows))
            hidden = hidden_keys(rows, keys, keys - queries)
            attended = torch.zeros(q[place].shape, dtype=compute, device=q.device)
            for kv_head in range(k.shape[1]):
                heads = slice(kv_head * group, (kv_head + 1) * group)
                one = slice(kv_head, kv_head + 1)
                attended[:, heads], lse[place, heads] = attend(
                    q[place, heads].to(compute), k[:, one], v[:, one], sm_scale, hidden
                )
            output[place] = attended.to(q.dtype)
    return output, lse


def vectorized(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Still one sequence at a time, each of which fills a GPU, but all its heads and queries at once, without gathering
    the last page apart."""
    compute = wide(q)
    page_size = k_cache.shape[1]
    outputs, lses = [], []
    sequences = zip(spans(qo_indptr), spans(kv_indptr), kv_last_page_len.tolist(), strict=True)
    for (first, last), (start, stop), last_length in sequences:
        pages = kv_indices[start:stop]
        keys, queries = page_size * (stop - start - 1) + last_length, last - first
        k = k_cache[pages].flatten(0, 1)[:keys].to(compute)
        v = v_cache[pages].flatten(0, 1)[:keys].to(compute)
        hidden = hidden_keys(torch.arange(queries, device=q.device), keys, keys - queries)
        attended, lse = attend_without_repeating(q[first:last].to(compute), k, v, sm_scale, hidden)
        outputs.append(attended)
        lses.append(lse)
    return torch.cat(outputs).to(q.dtype), torch.cat(lses)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    rows = workload.offsets[-1]
    cache_shape = (workload.pool, workload.page_size, workload.kv_heads, workload.head_size)
    q = torch.randn(rows, workload.query_heads, workload.head_size, dtype=torch.bfloat16, device=device)
    k_cache = torch.randn(cache_shape, dtype=torch.bfloat16, device=device)
    v_cache = torch.randn(cache_shape, dtype=torch.bfloat16, device=device)
    qo_indptr = torch.tensor(workload.offsets, dtype=torch.int32, device=device)
    kv_indptr = torch.tensor(workload.offsets, dtype=torch.int32, device=device)
    kv_indices = random_pages(rows, workload.pool, device)
    kv_last_page_len = torch.tensor(workload.last_page_lengths, dtype=torch.int32, device=device)
    return q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, SM_SCALE


def cost(workload: Workload) -> Cost:
    heads = workload.offsets[-1] * workload.query_heads
    integers = workload.offsets[-1] + 2 * len(workload.offsets) + len(workload.last_page_lengths)
    cache = 2 * 2 * sum(workload.key_lengths) * workload.kv_heads * workload.head_size
    return Cost(
        bytes_read=cache + 2 * heads * workload.head_size + 4 * integers,
        bytes_written=2 * heads * workload.head_size + 4 * heads,
        flops={"bf16": 4 * workload.pairs * workload.query_heads * workload.head_size},
    )
