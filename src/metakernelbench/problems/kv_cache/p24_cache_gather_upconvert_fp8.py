"""Gather cache entries of mixed format (FP8 latents, their scales, bf16 positions) into one bf16 matrix.

Inputs (full workload):

    cache        [16, 64, 656]  uint8  (page, offset, entry); an entry is 512 E4M3 latents, 4 little-endian fp32 scales
                                       in [0.1, 2.1), one for each 128 latents, and 64 little-endian bf16 values
    block_table  [3, M]         int32  the pages of each request in order: distinct over all requests, at random; then 0
    seq_lens     [3]            int32  tokens of each request: random, at least 1, 641 in all

M is the largest number of pages of a request: it differs from draw to draw, between 4 and 10.

Output: [641, 576] bf16, the requests one below the other.

Token i of request q is the entry at offset i % 64 of page block_table[q, i // 64]. Latent j becomes its E4M3 value
times scale j // 128 in fp32, rounded to bf16; the 64 positional values follow as they are.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats.fp8 import from_e4m3_bytes, to_e4m3_bytes
from metakernelbench.problems.formats.paged import gathered_entries, random_lengths
from metakernelbench.problems.problem import Cost, Inputs, Provenance

SUBJECT = (
    "Gather cache entries of FP8 latents, group scales and bf16 positions of several requests into one bf16 matrix."
)

PROVENANCE = Provenance(
    upstream="vLLM at b9b6306ebe0f5fa5046553667192e56bb3934af0",
    definition="tests/kernels/test_cp_gather_fp8.py::test_cp_gather_and_upconvert_fp8_kv_cache",
    licence="Apache-2.0",
    source_model="DeepSeek-V3.2-style sparse latent attention",
)

LATENT = 512
GROUPS = 4
ROTARY = 64
SCALES_END = LATENT + 4 * GROUPS
ENTRY_BYTES = SCALES_END + 2 * ROTARY


@dataclass(frozen=True)
class Workload:
    page_size: int
    pages: int
    requests: int
    tokens: int


FULL = Workload(page_size=64, pages=16, requests=3, tokens=641)
SMOKE = Workload(page_size=4, pages=16, requests=3, tokens=41)

OUTPUTS = ("entries",)


def upconverted(entries: torch.Tensor) -> torch.Tensor:
    """[n, ENTRY_BYTES] uint8 → [n, LATENT + ROTARY] bf16."""
    latents = from_e4m3_bytes(entries[:, :LATENT], torch.float32).reshape(-1, GROUPS, LATENT // GROUPS)
    scales = entries[:, LATENT:SCALES_END].contiguous().view(torch.float32)
    positional = entries[:, SCALES_END:].contiguous().view(torch.bfloat16)
    return torch.cat([(latents * scales[..., None]).flatten(1).to(torch.bfloat16), positional], dim=1)


def reference(cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    page_size = cache.shape[1]
    requests = []
    for pages, length in zip(block_table, seq_lens.tolist(), strict=True):
        used = pages[: -(-length // page_size)]
        requests.append(upconverted(cache[used].flatten(0, 1)[:length]))
    return torch.cat(requests)


def vectorized(cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """One gather and one conversion for all requests."""
    return upconverted(gathered_entries(cache, block_table, seq_lens))


def random_block_table(seq_lens: torch.Tensor, workload: Workload, device: torch.device) -> torch.Tensor:
    counts = [-(-length // workload.page_size) for length in seq_lens.tolist()]
    pages = torch.randperm(workload.pages, device=device).to(torch.int32)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
    used = 0
    for b, count in enumerate(counts):
        table[b, :count] = pages[used : used + count]
        used += count
    return table


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    slots = (workload.pages, workload.page_size)
    latents = to_e4m3_bytes(torch.randn(*slots, LATENT, device=device))
    scales = (2 * torch.rand(*slots, GROUPS, device=device) + 0.1).view(torch.uint8)
    positional = torch.randn(*slots, ROTARY, dtype=torch.bfloat16, device=device).view(torch.uint8)
    cache = torch.cat([latents, scales, positional], dim=-1)
    seq_lens = random_lengths(workload.tokens, workload.requests, device)
    return cache, random_block_table(seq_lens, workload, device), seq_lens


def cost(workload: Workload) -> Cost:
    """For about the mean number of pages: half a page for each request more than its tokens fill."""
    table_entries = round(workload.tokens / workload.page_size + workload.requests / 2)
    return Cost(
        bytes_read=workload.tokens * ENTRY_BYTES + 4 * (table_entries + workload.requests),
        bytes_written=2 * workload.tokens * (LATENT + ROTARY),
    )
