"""Prologue of latent attention: project queries, rotate their positional part and the positional key, fill the cache.

Inputs (full workload):

    qkv_lora       [2048, 2112]        bf16   standard normal; 1536 of the query, 512 of the latent, 64 of the
                                              positional key
    q_b_weight     [3072, 1536]        bf16   0.02 * standard normal; row head · 192 + d
    positions      [2048]              int64  uniform in 0 … 4095
    cos_sin_cache  [4096, 64]          bf16   fixed: row p holds cos, then sin, of p / 10000 ** (2i / 64), i < 32
    slot_mapping   [2048]              int64  distinct random slots of 0 … 4095; the last 1 to 128 are -1 (padding)
    kv_cache       [256, 16, 1, 576]   bf16   standard normal; (page, offset, one head, latent and positional key)

Outputs: q [2048, 16, 192] bf16; kv_cache, updated in place (the input tensor itself).

The query part times q_b_weight, accumulated in fp32 and rounded to bf16, gives 16 heads of 128 plain and 64 positional
dimensions. The positional dimensions of every head, and the token's one positional key, are rotated by its position:
(a, b) → (a·cos - b·sin, b·cos + a·sin) on the halves of 32, in bf16 arithmetic, each product and sum rounded. q holds
all tokens, padding too. A token with slot s writes its latent as it is, then its rotated key, to page s // 16, offset
s % 16; slot -1 writes nothing. Nothing is normalised.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats.paged import random_slots
from metakernelbench.problems.formats.rotary import expected_table_rows, rotary_table, rotate_halves
from metakernelbench.problems.problem import Cost, Inputs, Provenance

SUBJECT = (
    "Project low-rank queries, rotate their positional part and the shared positional key, and write latent and key "
    "into a paged cache."
)

PROVENANCE = Provenance(
    upstream="vLLM at b9b6306ebe0f5fa5046553667192e56bb3934af0",
    definition="tests/compile/passes/test_mla_rope_kvcache_cat_fusion.py::test_mla_rope_kvcache_cat_fusion",
    licence="Apache-2.0",
    source_model="DeepSeek-V3 (16 heads)",
)

HEADS = 16
ROTARY_BASE = 10000.0


@dataclass(frozen=True)
class Workload:
    tokens: int
    query_rank: int
    latent: int
    plain: int
    rotary: int
    page_size: int
    pages: int
    positions: int
    most_padding: int


# fmt: off
FULL = Workload(
    tokens=2048, query_rank=1536, latent=512, plain=128, rotary=64, page_size=16, pages=256, positions=4096,
    most_padding=128,
)
SMOKE = Workload(
    tokens=12, query_rank=24, latent=16, plain=8, rotary=8, page_size=4, pages=6, positions=32, most_padding=3,
)
# fmt: on

OUTPUTS = ("q", "kv_cache")
FIXED = ("cos_sin_cache",)


def reference(
    qkv_lora: torch.Tensor,
    q_b_weight: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    query_rank, rotary, page_size = q_b_weight.shape[1], cos_sin_cache.shape[1], kv_cache.shape[1]
    q = (qkv_lora[:, :query_rank] @ q_b_weight.T).view(len(qkv_lora), HEADS, -1)
    latent, k_pe = qkv_lora[:, query_rank:-rotary], qkv_lora[:, -rotary:]
    cos, sin = cos_sin_cache[positions].to(qkv_lora.dtype).chunk(2, dim=-1)
    q_pe = rotate_halves(q[..., -rotary:], cos[:, None], sin[:, None])
    entry = torch.cat([latent, rotate_halves(k_pe, cos, sin)], dim=-1)
    valid = slot_mapping >= 0
    slots = slot_mapping[valid]
    kv_cache[slots // page_size, slots % page_size, 0] = entry[valid]
    return torch.cat([q[..., :-rotary], q_pe], dim=-1), kv_cache


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    tokens, query_rank, entry = workload.tokens, workload.query_rank, workload.latent + workload.rotary
    head_size = workload.plain + workload.rotary
    qkv_lora = torch.randn(tokens, query_rank + entry, dtype=torch.bfloat16, device=device)
    q_b_weight = 0.02 * torch.randn(HEADS * head_size, query_rank, dtype=torch.bfloat16, device=device)
    positions = torch.randint(0, workload.positions, (tokens,), device=device)
    cos_sin_cache = rotary_table(workload.positions, workload.rotary, ROTARY_BASE, device)
    slots = random_slots(tokens, workload.pages * workload.page_size, workload.most_padding, device)
    kv_cache = torch.randn(workload.pages, workload.page_size, 1, entry, dtype=torch.bfloat16, device=device)
    return qkv_lora, q_b_weight, positions, cos_sin_cache, slots, kv_cache


def cost(workload: Workload) -> Cost:
    """For the mean number of valid tokens and of different positions; no other cache entry moves bytes."""
    tokens, query_rank = workload.tokens, workload.query_rank
    q_width = HEADS * (workload.plain + workload.rotary)
    valid = tokens - (1 + workload.most_padding) / 2
    entries = valid * 2 * (workload.latent + workload.rotary)
    table = expected_table_rows(workload.positions, tokens) * 2 * workload.rotary
    return Cost(
        bytes_read=round(2 * tokens * query_rank + 2 * q_width * query_rank + entries + 2 * 8 * tokens + table),
        bytes_written=round(2 * tokens * q_width + entries),
        flops={"bf16": 2 * tokens * query_rank * q_width},
    )
