"""One decoding step of grouped-query attention over a cache of single-token pages.

Inputs (full workload):

    q           [64, 32, 128]        bf16   standard normal; one query token per sequence
    k_cache     [68237, 1, 8, 128]   bf16   standard normal; (page, slot, KV head, d)
    v_cache     [68237, 1, 8, 128]   bf16   standard normal
    kv_indptr   [65]                 int32  fixed: sequence b owns entries kv_indptr[b] … kv_indptr[b+1] - 1
    kv_indices  [58966]              int32  the tokens of all sequences: distinct, in random order
    sm_scale    float                       fixed

Outputs: output [64, 32, 128] bf16, lse [64, 32] fp32.

A sequence's keys and values are the cache tokens listed for it, in that order. Query head h reads KV head h // 4. The
logits are the dot products times sm_scale; lse is their log-sum-exp divided by ln 2; the output is the softmax-weighted
sum of the values. Everything is computed in fp32 and the output is rounded once.
The contexts have 509 to 3,172 tokens.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats.grouped_attention import attend, attend_without_repeating
from metakernelbench.problems.formats.paged import padded_rows, random_pages, spans
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "One decoding step of grouped-query attention over a paged cache with one token per page (32 query, 8 KV heads)."
)

PROVENANCE = Provenance(
    upstream="FlashInfer-Trace",
    definition="gqa_paged_decode_h32_kv8_d128_ps1",
    record="5444fc56-b282-4228-b233-ee170d1bd127",
    licence="Apache-2.0",
    source_model="Llama-3.1-8B",
)

# As recorded; not exactly 128 ** -0.5.
SM_SCALE = 0.0883883461356163


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
    query_heads=32, kv_heads=8, head_size=128, pool=68237,
    token_offsets=(
        0, 542, 1067, 1637, 2236, 3014, 3538, 4063, 4576, 5134, 5652, 6168, 6723, 7234, 7754, 8281, 9129, 9707,
        12277, 15364, 16907, 19227, 21549, 23026, 24599, 26116, 26643, 27348, 27869, 28398, 28921, 29459, 29975,
        30499, 31031, 31549, 32469, 33110, 33799, 34316, 34832, 35354, 35905, 36437, 36974, 39857, 43029, 43851,
        44373, 45273, 45915, 46427, 46950, 47501, 49996, 50527, 52650, 54239, 55046, 55603, 56118, 56966, 57882,
        58391, 58966,
    ),
)
# fmt: on
SMOKE = Workload(query_heads=8, kv_heads=2, head_size=16, pool=64, token_offsets=(0, 5, 6, 23))

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
    """All sequences at once, padded to the longest: 3.4 times the tokens, but a dozen launches instead of hundreds."""
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
