"""One decoding step of grouped-query attention with one KV head: many very short sequences and a few long ones.

Inputs (full workload):

    q           [63, 5, 128]         bf16   standard normal; one query token per sequence
    k_cache     [53173, 1, 1, 128]   bf16   standard normal; (page, slot, KV head, d)
    v_cache     [53173, 1, 1, 128]   bf16   standard normal
    kv_indptr   [64]                 int32  fixed: sequence b owns entries kv_indptr[b] … kv_indptr[b+1] - 1
    kv_indices  [19134]              int32  the tokens of all sequences: distinct, in random order
    sm_scale    float                       fixed

Outputs: output [63, 5, 128] bf16, lse [63, 5] fp32.

A sequence's keys and values are the cache tokens listed for it, in that order; its five query heads share the one KV
head. The logits are the dot products times sm_scale; lse is their log-sum-exp divided by ln 2; the output is the
softmax-weighted sum of the values. Everything is computed in fp32 and the output is rounded once. The contexts have
4 to 5,668 tokens.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats.grouped_attention import attend, attend_without_repeating
from metakernelbench.problems.formats.paged import padded_rows, random_pages, spans
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "One decoding step of grouped-query attention over single-token pages with one KV head and very uneven contexts."
)

PROVENANCE = Provenance(
    upstream="FlashInfer-Trace",
    definition="gqa_paged_decode_h5_kv1_d128_ps1",
    record="69ec7197-791c-419a-ae93-a3d2f0d49fd0",
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
    token_offsets: tuple[int, ...]

    @property
    def sequences(self) -> int:
        return len(self.token_offsets) - 1

    @property
    def tokens(self) -> int:
        """Cache tokens that take part, over all sequences."""
        return self.token_offsets[-1]


# fmt: off
FULL = Workload(
    query_heads=5, kv_heads=1, head_size=128, pool=53173,
    token_offsets=(
        0, 20, 28, 98, 102, 124, 147, 160, 193, 198, 207, 230, 266, 282, 397, 410, 418, 450, 461, 486, 508, 814,
        1084, 1335, 1412, 1462, 1485, 1496, 1502, 1938, 1955, 2275, 2297, 2313, 2332, 2382, 2390, 2405, 2414,
        2568, 2578, 2586, 2597, 4650, 4660, 4760, 4781, 4932, 4940, 4968, 5043, 5054, 5070, 5124, 10265, 15933,
        15946, 16069, 16081, 17894, 19017, 19040, 19118, 19134,
    ),
)
# fmt: on
SMOKE = Workload(query_heads=5, kv_heads=1, head_size=16, pool=48, token_offsets=(0, 4, 5, 17, 30))

OUTPUTS = ("output", "lse")
FIXED = ("kv_indptr",)


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    compute = wide(q)
    output = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=compute, device=q.device)
    for b, (start, stop) in enumerate(spans(kv_indptr)):
        tokens = kv_indices[start:stop]
        k = k_cache.squeeze(1)[tokens].to(compute)
        v = v_cache.squeeze(1)[tokens].to(compute)
        attended, lse[b : b + 1] = attend(q[b : b + 1].to(compute), k, v, sm_scale)
        output[b : b + 1] = attended.to(q.dtype)
    return output, lse


def vectorized(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All sequences at once, padded to the longest: 19 times the tokens, still little, and a dozen launches in all."""
    compute = wide(q)
    rows, padding = padded_rows(kv_indptr)
    tokens = kv_indices[rows]
    k = k_cache.squeeze(1)[tokens].to(compute)
    v = v_cache.squeeze(1)[tokens].to(compute)
    output, lse = attend_without_repeating(q[:, None].to(compute), k, v, sm_scale, padding[:, None])
    return output.squeeze(1).to(q.dtype), lse.squeeze(1)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    q_shape = (workload.sequences, workload.query_heads, workload.head_size)
    cache_shape = (workload.pool, 1, workload.kv_heads, workload.head_size)
    q = torch.randn(q_shape, dtype=torch.bfloat16, device=device)
    k_cache = torch.randn(cache_shape, dtype=torch.bfloat16, device=device)
    v_cache = torch.randn(cache_shape, dtype=torch.bfloat16, device=device)
    kv_indptr = torch.tensor(workload.token_offsets, dtype=torch.int32, device=device)
    kv_indices = random_pages(workload.tokens, workload.pool, device)
    return q, k_cache, v_cache, kv_indptr, kv_indices, SM_SCALE


def cost(workload: Workload) -> Cost:
    heads = workload.sequences * workload.query_heads
    integers = workload.tokens + workload.sequences + 1
    cache = 2 * 2 * workload.tokens * workload.kv_heads * workload.head_size
    return Cost(
        bytes_read=cache + 2 * heads * workload.head_size + 4 * integers,
        bytes_written=2 * heads * workload.head_size + 4 * heads,
        flops={"bf16": 4 * workload.tokens * workload.query_heads * workload.head_size},
    )
