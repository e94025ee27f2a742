"""Apply staged writes to the block tables of three cache groups, then translate token positions to slots.

Inputs (full workload):

    block_table_0      [64, 512]    int32  random page numbers below 2048; (request, page of the request)
    block_table_1      [64, 1024]   int32  likewise
    block_table_2      [64, 512]    int32  likewise
    num_blocks         [3, 64]      int32  fixed: 0
    write_requests     [128]        int32  the request of each write: a random permutation of all 64, then another
    overwrite          [128]        bool   random; the same for the three groups
    staged_ids         [3, 128, 4]  int32  per group and write random page numbers below 2048, then -1
    staged_counts      [3, 128]     int32  how many of them count: 0 to 4, random
    idx_mapping        [64]         int32  the request of each batch row: a random permutation
    query_start_loc    [65]         int32  batch row j owns tokens query_start_loc[j] … query_start_loc[j+1] - 1; random
                                           lengths of 0 to 64
    positions          [4096]       int64  random below 64; only those of owned tokens matter

Outputs: the three block tables and num_blocks, updated in place (the input tensors themselves), and slot_mappings
[3, 4096] int64.

Group g counts its pages in tables of pages of (16, 16, 8)[g] tokens; a staged number n stands for x = (1, 2, 1)[g]
such pages, n·x … n·x + x - 1. The writes are applied in order: write w appends the pages of its counted numbers to
the row of its request, behind num_blocks[g, request] of them or, with overwrite, from the start, and num_blocks
becomes where they end. What lies behind stays. Then the slot of a token at position p of request r is table[r, p //
size] · size + p % size, with the group's page size and updated table, whether that entry was ever written or not; a
token that no batch row owns has slot -1.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats.paged import spans
from metakernelbench.problems.problem import Cost, Inputs, Provenance

SUBJECT = (
    "Apply staged block-table writes to three cache groups of different page sizes, then map token positions to slots."
)

PROVENANCE = Provenance(
    upstream="vLLM at b9b6306ebe0f5fa5046553667192e56bb3934af0",
    definition="tests/v1/worker/test_gpu_block_table.py::test_block_tables_apply_staged_writes_fuses_kv_groups",
    licence="Apache-2.0",
)

PAGE_SIZES = (16, 16, 8)
"""Tokens of a page in each group's table."""
EXPANSION = (1, 2, 1)
"""Table pages that one staged number stands for."""
PADDING_SLOT = -1


@dataclass(frozen=True)
class Workload:
    requests: int
    table_widths: tuple[int, int, int]
    tokens: int
    staged: int
    """Numbers that one write can stage."""
    page_numbers: int

    @property
    def writes(self) -> int:
        return 2 * self.requests

    @property
    def positions(self) -> int:
        """Positions are below this: what two full writes of the group with the smallest pages cover."""
        return 2 * self.staged * min(PAGE_SIZES)

    @property
    def longest_query(self) -> int:
        return self.tokens // self.requests


FULL = Workload(requests=64, table_widths=(512, 1024, 512), tokens=4096, staged=4, page_numbers=2048)
SMOKE = Workload(requests=4, table_widths=(16, 32, 16), tokens=32, staged=2, page_numbers=64)

OUTPUTS = ("block_table_0", "block_table_1", "block_table_2", "num_blocks", "slot_mappings")
FIXED = ("num_blocks",)


def expanded(ids: torch.Tensor, expansion: int) -> torch.Tensor:
    """[..., n] page numbers → [..., n · expansion] table pages."""
    return (ids[..., None] * expansion + torch.arange(expansion, dtype=ids.dtype, device=ids.device)).flatten(-2)


def reference(
    block_table_0: torch.Tensor,
    block_table_1: torch.Tensor,
    block_table_2: torch.Tensor,
    num_blocks: torch.Tensor,
    write_requests: torch.Tensor,
    overwrite: torch.Tensor,
    staged_ids: torch.Tensor,
    staged_counts: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tables = (block_table_0, block_table_1, block_table_2)
    requests, overwrites, counts = write_requests.tolist(), overwrite.tolist(), staged_counts.tolist()
    slot_mappings = torch.full((len(tables), len(positions)), PADDING_SLOT, dtype=torch.int64, device=positions.device)
    for g, (table, page_size, expansion) in enumerate(zip(tables, PAGE_SIZES, EXPANSION, strict=True)):
        for w, request in enumerate(requests):
            pages = expanded(staged_ids[g, w, : counts[g][w]], expansion)
            start = 0 if overwrites[w] else int(num_blocks[g, request])
            table[request, start : start + len(pages)] = pages
            num_blocks[g, request] = start + len(pages)
        for request, (first, last) in zip(idx_mapping.tolist(), spans(query_start_loc), strict=True):
            position = positions[first:last]
            slot_mappings[g, first:last] = table[request, position // page_size] * page_size + position % page_size
    return block_table_0, block_table_1, block_table_2, num_blocks, slot_mappings


def vectorized(
    block_table_0: torch.Tensor,
    block_table_1: torch.Tensor,
    block_table_2: torch.Tensor,
    num_blocks: torch.Tensor,
    write_requests: torch.Tensor,
    overwrite: torch.Tensor,
    staged_ids: torch.Tensor,
    staged_counts: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The writes in two rounds, since every request has one write in each half, and all tokens at once."""
    tables = (block_table_0, block_table_1, block_table_2)
    token = torch.arange(len(positions), device=positions.device)
    row = torch.searchsorted(query_start_loc[1:], token, right=True)
    owned = row < len(idx_mapping)
    token_request = idx_mapping[row.clamp_max(len(idx_mapping) - 1)]
    slot_mappings = []
    for g, (table, page_size, expansion) in enumerate(zip(tables, PAGE_SIZES, EXPANSION, strict=True)):
        for half in torch.arange(len(write_requests), device=positions.device).chunk(2):
            request, count = write_requests[half], staged_counts[g, half] * expansion
            pages = expanded(staged_ids[g, half], expansion)
            start = num_blocks[g, request].masked_fill(overwrite[half], 0)
            place = torch.arange(pages.shape[1], device=positions.device)
            counted = place < count[:, None]
            table[request[:, None].expand_as(pages)[counted], (start[:, None] + place)[counted]] = pages[counted]
            num_blocks[g, request] = start + count
        slots = table[token_request, positions // page_size] * page_size + positions % page_size
        slot_mappings.append(slots.masked_fill(~owned, PADDING_SLOT))
    return block_table_0, block_table_1, block_table_2, num_blocks, torch.stack(slot_mappings)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    requests, writes, groups = workload.requests, workload.writes, len(PAGE_SIZES)
    tables = tuple(
        torch.randint(0, workload.page_numbers, (requests, width), dtype=torch.int32, device=device)
        for width in workload.table_widths
    )
    num_blocks = torch.zeros(groups, requests, dtype=torch.int32, device=device)
    write_requests = torch.cat([torch.randperm(requests, dtype=torch.int32, device=device) for _ in range(2)])
    overwrite = torch.randint(0, 2, (writes,), device=device) == 1
    counts_shape = (groups, writes)
    staged_counts = torch.randint(0, workload.staged + 1, counts_shape, dtype=torch.int32, device=device)
    staged_ids = torch.randint(
        0, workload.page_numbers, (*counts_shape, workload.staged), dtype=torch.int32, device=device
    )
    counted = torch.arange(workload.staged, device=device) < staged_counts[..., None]
    staged_ids = staged_ids.masked_fill(~counted, -1)
    idx_mapping = torch.randperm(requests, dtype=torch.int32, device=device)
    lengths = torch.randint(0, workload.longest_query + 1, (requests,), device=device)
    query_start_loc = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
    positions = torch.randint(0, workload.positions, (workload.tokens,), device=device)
    writes_given = (write_requests, overwrite, staged_ids, staged_counts)
    return *tables, num_blocks, *writes_given, idx_mapping, query_start_loc, positions


def cost(workload: Workload) -> Cost:
    """For the mean number of staged pages and of owned tokens, of the table the columns that positions can reach."""
    requests, writes, groups = workload.requests, workload.writes, len(PAGE_SIZES)
    staged = groups * writes * workload.staged // 2
    columns = sum(-(-workload.positions // size) for size in PAGE_SIZES)
    indices = 4 * (groups * requests + writes + staged + groups * writes + requests + requests + 1)
    reached = 4 * requests * columns
    written = 4 * writes * workload.staged // 2 * sum(EXPANSION) + 4 * groups * requests
    return Cost(
        bytes_read=indices + writes + reached + 8 * workload.tokens // 2,
        bytes_written=written + 8 * groups * workload.tokens,
    )
