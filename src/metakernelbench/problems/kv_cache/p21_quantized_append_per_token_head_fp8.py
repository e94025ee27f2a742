"""Quantise new keys and values to FP8, one scale per token and head, and append them to paged caches.

Inputs (full workload):

    key            [2048, 8, 128]     bf16   standard normal; (token, head, d)
    value          [2048, 8, 128]     bf16   standard normal
    slot_mapping   [2048]             int64  distinct random slots of 0 … 4095; the last 1 to 128 are -1 (padding)
    key_cache      [256, 16, 8, 128]  uint8  random bytes; (page, offset, head, d)
    value_cache    [256, 16, 8, 128]  uint8  random bytes
    k_scale_cache  [256, 16, 8]       fp32   uniform in [0.5, 1.5)
    v_scale_cache  [256, 16, 8]       fp32   uniform in [0.5, 1.5)

Outputs: the four caches, updated in place (each is the input tensor itself); what no slot names keeps its value.

For every head vector x of a token, in fp32: scale = max(max|x| · (1/448), 1e-6), then y = x · (1/scale), clamped to
±448 and rounded to E4M3 (nearest, ties to even). Bytes and scale go to page slot // 16, offset slot % 16; slot -1
writes nothing. Bytes are compared exactly, and bf16 inputs often fall on midpoints of the E4M3 grid, so the fp32 steps
are part of the specification: one product with 1/448 rounded to fp32 (which is what a GPU makes of a division by 448),
one correctly rounded reciprocal of the scale, one product.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats.fp8 import E4M3_MAX, to_e4m3_bytes
from metakernelbench.problems.formats.paged import random_slots
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = "Quantise keys and values to FP8 with one scale per token and head, and append them to paged caches in place."

PROVENANCE = Provenance(
    upstream="vLLM at b9b6306ebe0f5fa5046553667192e56bb3934af0",
    definition="tests/quantization/test_per_token_kv_cache.py::test_reshape_and_cache_per_token_head",
    licence="Apache-2.0",
    inferred=("The scale is a product with 1/448, not a division by 448, so that CPU and GPU agree in every byte.",),
)

SMALLEST_SCALE = 1e-6


@dataclass(frozen=True)
class Workload:
    tokens: int
    heads: int
    head_size: int
    page_size: int
    pages: int
    most_padding: int


FULL = Workload(tokens=2048, heads=8, head_size=128, page_size=16, pages=256, most_padding=128)
SMOKE = Workload(tokens=12, heads=2, head_size=16, page_size=4, pages=6, most_padding=3)

OUTPUTS = ("key_cache", "value_cache", "k_scale_cache", "v_scale_cache")


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 bytes shaped as `x`, and the scale of each vector along the last axis."""
    x = x.to(wide(x))
    scale = (x.abs().amax(dim=-1) * (1 / E4M3_MAX)).clamp_min(SMALLEST_SCALE)
    return to_e4m3_bytes(x * (1 / scale)[..., None]), scale


def reference(
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    k_scale_cache: torch.Tensor,
    v_scale_cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    page_size = key_cache.shape[1]
    valid = slot_mapping >= 0
    slots = slot_mapping[valid]
    place = (slots // page_size, slots % page_size)
    key_cache[place], k_scale_cache[place] = quantise(key[valid])
    value_cache[place], v_scale_cache[place] = quantise(value[valid])
    return key_cache, value_cache, k_scale_cache, v_scale_cache


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    new = (workload.tokens, workload.heads, workload.head_size)
    scales = (workload.pages, workload.page_size, workload.heads)
    key = torch.randn(new, dtype=torch.bfloat16, device=device)
    value = torch.randn(new, dtype=torch.bfloat16, device=device)
    slots = random_slots(workload.tokens, workload.pages * workload.page_size, workload.most_padding, device)
    key_cache = torch.randint(0, 256, (*scales, workload.head_size), dtype=torch.uint8, device=device)
    value_cache = torch.randint(0, 256, (*scales, workload.head_size), dtype=torch.uint8, device=device)
    k_scale_cache = torch.rand(scales, device=device) + 0.5
    v_scale_cache = torch.rand(scales, device=device) + 0.5
    return key, value, slots, key_cache, value_cache, k_scale_cache, v_scale_cache


def cost(workload: Workload) -> Cost:
    """For the mean number of valid tokens; a cache entry that no slot names moves no bytes."""
    valid = workload.tokens - (1 + workload.most_padding) / 2
    vectors = 2 * workload.heads
    return Cost(
        bytes_read=round(valid * vectors * workload.head_size * 2) + 8 * workload.tokens,
        bytes_written=round(valid * vectors * (workload.head_size + 4)),
    )
