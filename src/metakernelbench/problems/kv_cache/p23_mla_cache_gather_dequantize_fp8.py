"""Gather the FP8 latent-attention cache entries of several requests into one fp32 matrix.

Inputs (full workload):

    src_cache    [1024, 16, 576]  uint8  E4M3 bytes of standard normal / 0.1, never NaN; (page, offset, entry)
    block_table  [8, 1024]        int32  the pages of each request in order: a random permutation of all pages
    seq_lens     [8]              int32  tokens of each request: random, at least 1, 4096 in all
    scale        float                   0.1

Output: [4096, 576] fp32, the requests one below the other.

Token i of request q is the entry at offset i % 16 of page block_table[q, i // 16]; its 576 E4M3 values are converted to
fp32, which is exact, and multiplied by scale in fp32. Different requests may share a page.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats.fp8 import from_e4m3_bytes, to_e4m3_bytes
from metakernelbench.problems.formats.paged import gathered_entries, random_lengths
from metakernelbench.problems.problem import Cost, Inputs, Provenance

SUBJECT = "Gather paged FP8 latent-attention cache entries of several requests into one scaled fp32 matrix."

PROVENANCE = Provenance(
    upstream="vLLM at b9b6306ebe0f5fa5046553667192e56bb3934af0",
    definition="tests/kernels/attention/test_cache.py::test_gather_and_maybe_dequant_cache_mla",
    licence="Apache-2.0",
    source_model="DeepSeek-style latent attention",
)

SCALE = 0.1


@dataclass(frozen=True)
class Workload:
    entry: int
    page_size: int
    pages: int
    requests: int
    tokens: int


FULL = Workload(entry=576, page_size=16, pages=1024, requests=8, tokens=4096)
SMOKE = Workload(entry=24, page_size=4, pages=32, requests=3, tokens=40)

OUTPUTS = ("entries",)


def reference(src_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, scale: float) -> torch.Tensor:
    page_size = src_cache.shape[1]
    requests = []
    for pages, length in zip(block_table, seq_lens.tolist(), strict=True):
        used = pages[: -(-length // page_size)]
        requests.append(src_cache[used].flatten(0, 1)[:length])
    return from_e4m3_bytes(torch.cat(requests), torch.float32) * scale


def vectorized(
    src_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, scale: float
) -> torch.Tensor:
    """One gather for all requests."""
    return from_e4m3_bytes(gathered_entries(src_cache, block_table, seq_lens), torch.float32) * scale


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    cache_shape = (workload.pages, workload.page_size, workload.entry)
    src_cache = to_e4m3_bytes(torch.randn(cache_shape, dtype=torch.float16, device=device) / SCALE)
    rows = [torch.randperm(workload.pages, device=device) for _ in range(workload.requests)]
    block_table = torch.stack(rows).to(torch.int32)
    seq_lens = random_lengths(workload.tokens, workload.requests, device)
    return src_cache, block_table, seq_lens, SCALE


def cost(workload: Workload) -> Cost:
    """For the mean number of pages of a request: half a page more than its tokens fill."""
    table_entries = workload.tokens // workload.page_size + workload.requests // 2
    elements = workload.tokens * workload.entry
    return Cost(bytes_read=elements + 4 * (table_entries + workload.requests), bytes_written=4 * elements)
