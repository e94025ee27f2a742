"""One decoding step of grouped-query attention over a cache in pages of 64 tokens, with very long contexts.

Inputs (full workload):

    q                 [64, 32, 128]         bf16   standard normal; one query token per sequence
    k_cache           [29441, 64, 8, 128]   bf16   standard normal; (page, slot, KV head, d)
    v_cache           [29441, 64, 8, 128]   bf16   standard normal
    kv_indptr         [65]                  int32  fixed: sequence b owns entries kv_indptr[b] … kv_indptr[b+1] - 1
    kv_indices        [27222]               int32  the pages of all sequences: distinct, in random order
    kv_last_page_len  [64]                  int32  fixed: all 1
    sm_scale          float                        fixed

Outputs: output [64, 32, 128] bf16, lse [64, 32] fp32.

A sequence's tokens are all slots of its pages in the order listed, except that of the last page only the first
kv_last_page_len[b] slots count; the slots after them hold unrelated data. Query head h reads KV head h // 4. The logits
are the dot products times sm_scale; lse is their log-sum-exp divided by ln 2; the output is the softmax-weighted sum of
the values. Everything is computed in fp32 and the output is rounded once. The contexts have 769 to 171,201 tokens.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats.grouped_attention import attend, attend_without_repeating
from metakernelbench.problems.formats.paged import random_pages, sequence_tokens, spans
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = "One decoding step of grouped-query attention over a paged cache (64-token pages) with very long contexts."

PROVENANCE = Provenance(
    upstream="FlashInfer-Trace",
    definition="gqa_paged_decode_h32_kv8_d128_ps64",
    record="8c88a86f-1843-42eb-9251-8a0ef4b6a1ee",
    licence="Apache-2.0",
    source_model="Llama-3.1-8B",
)

SM_SCALE = 0.08838834764831843


@dataclass(frozen=True)
class Workload:
    query_heads: int
    kv_heads: int
    head_size: int
    page_size: int
    pool: int
    page_offsets: tuple[int, ...]
    last_page_lengths: tuple[int, ...]

    @property
    def sequences(self) -> int:
        return len(self.last_page_lengths)

    @property
    def tokens(self) -> int:
        """Cache tokens that take part, over all sequences."""
        return self.page_size * (self.page_offsets[-1] - self.sequences) + sum(self.last_page_lengths)


# fmt: off
FULL = Workload(
    query_heads=32, kv_heads=8, head_size=128, page_size=64, pool=29441,
    page_offsets=(
        0, 46, 75, 149, 252, 534, 562, 591, 608, 670, 692, 712, 771, 786, 810, 841, 1193, 1275, 3349, 5940, 6987,
        8811, 10637, 11618, 12695, 13716, 13747, 13956, 13981, 14014, 14041, 14083, 14103, 14131, 14167, 14189, 14613,
        14758, 14951, 14972, 14992, 15018, 15073, 15109, 15150, 17537, 20213, 20539, 20565, 20969, 21115, 21131,
        21158, 21213, 23212, 23247, 24874, 25967, 26278, 26339, 26358, 26710, 27130, 27143, 27222,
    ),
    last_page_lengths=(1,) * 64,
)
SMOKE = Workload(
    query_heads=8, kv_heads=2, head_size=16, page_size=4, pool=24,
    page_offsets=(0, 3, 4, 9), last_page_lengths=(1, 1, 1),
)
# fmt: on

OUTPUTS = ("output", "lse")
FIXED = ("kv_indptr", "kv_last_page_len")


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    compute = wide(q)
    output = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=compute, device=q.device)
    last_lengths = kv_last_page_len.tolist()
    for b, (start, stop) in enumerate(spans(kv_indptr)):
        pages = kv_indices[start:stop]
        k = sequence_tokens(k_cache, pages, last_lengths[b], compute)
        v = sequence_tokens(v_cache, pages, last_lengths[b], compute)
        attended, lse[b : b + 1] = attend(q[b : b + 1].to(compute), k, v, sm_scale)
        output[b : b + 1] = attended.to(q.dtype)
    return output, lse


def vectorized(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Still one sequence at a time, since padding to the longest would move six times the bytes, but without repeating
    the keys and values for the query heads that share them, and without gathering the last page apart."""
    compute = wide(q)
    page_size = k_cache.shape[1]
    outputs, lses = [], []
    for query, (start, stop), last in zip(q, spans(kv_indptr), kv_last_page_len.tolist(), strict=True):
        pages = kv_indices[start:stop]
        tokens = page_size * (stop - start - 1) + last
        k = k_cache[pages].flatten(0, 1)[:tokens].to(compute)
        v = v_cache[pages].flatten(0, 1)[:tokens].to(compute)
        attended, lse = attend_without_repeating(query[None].to(compute), k, v, sm_scale)
        outputs.append(attended)
        lses.append(lse)
    return torch.cat(outputs).to(q.dtype), torch.cat(lses)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    q = torch.randn(workload.sequences, workload.query_heads, workload.head_size, dtype=torch.bfloat16, device=device)
    cache_shape = (workload.pool, workload.page_size, workload.kv_heads, workload.head_size)
    k_cache = torch.randn(cache_shape, dtype=torch.bfloat16, device=device)
    v_cache = torch.randn(cache_shape, dtype=torch.bfloat16, device=device)
    kv_indptr = torch.tensor(workload.page_offsets, dtype=torch.int32, device=device)
    kv_indices = random_pages(workload.page_offsets[-1], workload.pool, device)
    kv_last_page_len = torch.tensor(workload.last_page_lengths, dtype=torch.int32, device=device)
    return q, k_cache, v_cache, kv_indptr, kv_indices, kv_last_page_len, SM_SCALE


def cost(workload: Workload) -> Cost:
    heads = workload.sequences * workload.query_heads
    integers = workload.page_offsets[-1] + len(workload.page_offsets) + workload.sequences
    cache = 2 * 2 * workload.tokens * workload.kv_heads * workload.head_size
    return Cost(
        bytes_read=cache + 2 * heads * workload.head_size + 4 * integers,
        bytes_written=2 * heads * workload.head_size + 4 * heads,
        flops={"bf16": 4 * workload.tokens * workload.query_heads * workload.head_size},
    )
