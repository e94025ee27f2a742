"""Attention prologue with a main and an index branch: normalise, rotate, and insert into two paged caches.

Inputs (full workload):

    qkv                  [513, 3712]         bf16   standard normal; heads of 128: 16 queries, 4 keys, 4 values, 4 index
                                                    queries, 1 index key
    q_norm_weight        [128]               bf16   0.1 * standard normal, as the three that follow
    k_norm_weight        [128]               bf16
    index_q_norm_weight  [128]               bf16
    index_k_norm_weight  [128]               bf16
    positions            [513]               int64  uniform in 0 … 4095
    cos_sin_cache        [4096, 64]          bf16   fixed: row p is cos, then sin, of p / 5000000 ** (2i / 64), i < 32
    slot_mapping         [513]               int64  distinct random slots of 0 … 639
    index_slot_mapping   [513]               int64  likewise, independent
    kv_cache             [10, 4, 64, 256]    bf16   standard normal; (page, KV head, offset, key and value side by side)
    index_cache          [10, 64, 128]       bf16   standard normal; (page, offset, d)

Outputs: q [513, 16, 128] bf16; index_q [513, 4, 128] bf16; kv_cache and index_cache, updated in place (the input
tensors themselves).

Every query, key, index query and index key head x becomes x / rms(x) · (1 + weight) in fp32 (eps 1e-6 inside the
root), rounded to bf16. Of the result the first 64 dimensions are rotated by the token's position in fp32, (a, b) →
(a·cos - b·sin, b·cos + a·sin) on the halves of 32, and rounded to bf16 again. A token with slot s writes its rotated
keys and, beside them, its values as they are to kv_cache, page s // 64, offset s % 64; its rotated index key goes to
index_cache by the other slot. Every token is valid in both lists.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats.rotary import expected_table_rows, rotary_table, rotate_halves
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "RMS-normalise and rotate main and index heads, and insert keys and values and the index key into two paged caches."
)

PROVENANCE = Provenance(
    upstream="vLLM at b9b6306ebe0f5fa5046553667192e56bb3934af0",
    definition="tests/kernels/test_fused_minimax_m3_qknorm_rope_kv_insert.py::test_sparse_full",
    licence="Apache-2.0",
    source_model="MiniMax-M3",
)

INDEX_HEADS = 4
EPS = 1e-6
ROTARY_BASE = 5000000.0


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

    @property
    def heads(self) -> int:
        """All heads of a token: queries, keys, values, index queries and the index key."""
        return self.query_heads + 2 * self.kv_heads + INDEX_HEADS + 1


# fmt: off
FULL = Workload(
    tokens=513, query_heads=16, kv_heads=4, head_size=128, rotary=64, page_size=64, pages=10, positions=4096,
)
SMOKE = Workload(
    tokens=13, query_heads=4, kv_heads=2, head_size=16, rotary=8, page_size=4, pages=5, positions=32,
)
# fmt: on

OUTPUTS = ("q", "index_q", "kv_cache", "index_cache")
FIXED = ("cos_sin_cache",)


def normalise_and_rotate(x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    compute = wide(x)
    u = x.to(compute)
    normalised = u * torch.rsqrt(u.square().mean(dim=-1, keepdim=True) + EPS)
    z = (normalised * (1 + weight.to(compute))).to(x.dtype)
    rotary = 2 * cos.shape[-1]
    rotated = rotate_halves(z[..., :rotary].to(compute), cos, sin).to(x.dtype)
    return torch.cat([rotated, z[..., rotary:]], dim=-1)


def reference(
    qkv: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    index_q_norm_weight: torch.Tensor,
    index_k_norm_weight: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    index_slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    index_cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    kv_heads, page_size, head_size = kv_cache.shape[1], kv_cache.shape[2], q_norm_weight.shape[0]
    heads = qkv.view(len(qkv), -1, head_size)
    query_heads = heads.shape[1] - 2 * kv_heads - INDEX_HEADS - 1
    q, k, v, index_q, index_k = torch.split(heads, [query_heads, kv_heads, kv_heads, INDEX_HEADS, 1], dim=1)
    cos, sin = cos_sin_cache[positions][:, None].to(wide(qkv)).chunk(2, dim=-1)
    q = normalise_and_rotate(q, q_norm_weight, cos, sin)
    k = normalise_and_rotate(k, k_norm_weight, cos, sin)
    index_q = normalise_and_rotate(index_q, index_q_norm_weight, cos, sin)
    index_k = normalise_and_rotate(index_k, index_k_norm_weight, cos, sin)
    kv_cache[slot_mapping // page_size, :, slot_mapping % page_size] = torch.cat([k, v], dim=-1)
    index_cache[index_slot_mapping // page_size, index_slot_mapping % page_size] = index_k[:, 0]
    return q, index_q, kv_cache, index_cache


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    tokens, head_size, page_size = workload.tokens, workload.head_size, workload.page_size
    qkv = torch.randn(tokens, workload.heads * head_size, dtype=torch.bfloat16, device=device)
    weights = tuple(0.1 * torch.randn(head_size, dtype=torch.bfloat16, device=device) for _ in range(4))
    positions = torch.randint(0, workload.positions, (tokens,), device=device)
    cos_sin_cache = rotary_table(workload.positions, workload.rotary, ROTARY_BASE, device)
    slots = torch.randperm(workload.pages * page_size, device=device)[:tokens]
    index_slots = torch.randperm(workload.pages * page_size, device=device)[:tokens]
    kv_shape = (workload.pages, workload.kv_heads, page_size, 2 * head_size)
    kv_cache = torch.randn(kv_shape, dtype=torch.bfloat16, device=device)
    index_cache = torch.randn(workload.pages, page_size, head_size, dtype=torch.bfloat16, device=device)
    return qkv, *weights, positions, cos_sin_cache, slots, index_slots, kv_cache, index_cache


def cost(workload: Workload) -> Cost:
    """For the mean number of different positions; a cache entry that no slot names moves no bytes."""
    tokens, head = workload.tokens, 2 * workload.head_size
    table = expected_table_rows(workload.positions, tokens) * 2 * workload.rotary
    return Cost(
        bytes_read=round(tokens * workload.heads * head + 3 * 8 * tokens + table + 4 * head),
        bytes_written=tokens * workload.heads * head,
    )
