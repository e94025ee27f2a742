"""Normalise and rotate queries and keys, and write keys and values into a paged cache.

Inputs (full workload):

    qkv            [2048, 6144]             bf16   standard normal; 32 query heads, then 8 key heads, then 8 value heads
                                                   of 128
    positions      [2048]                   int64  uniform in 0 … 4095
    q_norm_weight  [128]                    bf16   standard normal
    k_norm_weight  [128]                    bf16   standard normal
    cos_sin_cache  [4096, 64]               bf16   fixed: row p holds cos, then sin, of p / 10000 ** (2i / 64), i < 32
    slot_mapping   [2048]                   int64  distinct random slots of 0 … 4095; the last 1 to 128 are -1 (padding)
    kv_cache       [2, 256, 16, 8, 128]     bf16   standard normal; (key or value, page, offset, KV head, d)
    eps            float                           1e-5

Outputs: q [2048, 32, 128] bf16; kv_cache, updated in place (the input tensor itself).

Every query and key head x becomes n = x / rms(x) in fp32 (eps inside the root), rounded to bf16, then n · weight in
bf16. Of the result the first 64 dimensions are rotated by the token's position: (a, b) → (a·cos - b·sin, b·cos +
a·sin) on the halves of 32, in bf16 arithmetic, each product and sum rounded. q holds all tokens, padding too. A token
with slot s writes its rotated keys to kv_cache[0] and its values as they are to kv_cache[1], page s // 16, offset s %
16; slot -1 writes nothing.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats.paged import random_slots
from metakernelbench.problems.formats.rotary import expected_table_rows, rotary_table, rotate_halves
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "RMS-normalise query and key heads, rotate half of each by position, and write keys and values into a paged cache."
)

PROVENANCE = Provenance(
    upstream="vLLM at b9b6306ebe0f5fa5046553667192e56bb3934af0",
    definition="tests/compile/passes/test_rocm_aiter_qk_norm_rope_kvcache_fusion.py::test_qk_norm_rope_kvcache_fusion",
    licence="Apache-2.0",
    source_model="GLM-4.5",
)

ROTARY_BASE = 10000.0
EPS = 1e-5


@dataclass(frozen=True)
class Workload:
    tokens: int
    query_heads: int
    kv_heads: int
    head_size: int
    rotary: int
    page_size: int
    pages: int
    positions: int
    most_padding: int


# fmt: off
FULL = Workload(
    tokens=2048, query_heads=32, kv_heads=8, head_size=128, rotary=64, page_size=16, pages=256, positions=4096,
    most_padding=128,
)
SMOKE = Workload(
    tokens=12, query_heads=4, kv_heads=2, head_size=16, rotary=8, page_size=4, pages=6, positions=32, most_padding=3,
)
# fmt: on

OUTPUTS = ("q", "kv_cache")
FIXED = ("cos_sin_cache",)


def normalise(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    u = x.to(wide(x))
    normalised = u * torch.rsqrt(u.square().mean(dim=-1, keepdim=True) + eps)
    return (normalised.to(weight.dtype) * weight).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rotary = 2 * cos.shape[-1]
    return torch.cat([rotate_halves(x[..., :rotary], cos, sin), x[..., rotary:]], dim=-1)


def reference(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    page_size, kv_heads, head_size = kv_cache.shape[2:]
    heads = qkv.view(len(qkv), -1, head_size)
    q, k, v = heads[:, : -2 * kv_heads], heads[:, -2 * kv_heads : -kv_heads], heads[:, -kv_heads:]
    cos, sin = cos_sin_cache[positions][:, None].to(qkv.dtype).chunk(2, dim=-1)
    q = rotate(normalise(q, q_norm_weight, eps), cos, sin)
    k = rotate(normalise(k, k_norm_weight, eps), cos, sin)
    valid = slot_mapping >= 0
    page, offset = slot_mapping[valid] // page_size, slot_mapping[valid] % page_size
    kv_cache[0, page, offset] = k[valid]
    kv_cache[1, page, offset] = v[valid]
    return q, kv_cache


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    tokens, head_size, kv_heads = workload.tokens, workload.head_size, workload.kv_heads
    width = (workload.query_heads + 2 * kv_heads) * head_size
    qkv = torch.randn(tokens, width, dtype=torch.bfloat16, device=device)
    positions = torch.randint(0, workload.positions, (tokens,), device=device)
    q_norm_weight = torch.randn(head_size, dtype=torch.bfloat16, device=device)
    k_norm_weight = torch.randn(head_size, dtype=torch.bfloat16, device=device)
    cos_sin_cache = rotary_table(workload.positions, workload.rotary, ROTARY_BASE, device)
    slots = random_slots(tokens, workload.pages * workload.page_size, workload.most_padding, device)
    cache_shape = (2, workload.pages, workload.page_size, kv_heads, head_size)
    kv_cache = torch.randn(cache_shape, dtype=torch.bfloat16, device=device)
    return qkv, positions, q_norm_weight, k_norm_weight, cos_sin_cache, slots, kv_cache, EPS


def cost(workload: Workload) -> Cost:
    """For the mean number of valid tokens and of different positions; no other cache entry moves bytes."""
    tokens, head_size = workload.tokens, workload.head_size
    valid = tokens - (1 + workload.most_padding) / 2
    queries = 2 * tokens * workload.query_heads * head_size
    keys_and_values = valid * 2 * 2 * workload.kv_heads * head_size
    table = expected_table_rows(workload.positions, tokens) * 2 * workload.rotary
    return Cost(
        bytes_read=round(queries + keys_and_values + 2 * 8 * tokens + table + 2 * 2 * head_size),
        bytes_written=round(queries + keys_and_values),
    )
