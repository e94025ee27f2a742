"""p26, staged block-table writes and slots, in CuTe DSL: one kernel, a thread block for each of the three groups.

A thread goes through all writes in order and applies those of its request, so that two writes to one request never
meet. Then, after a barrier, the threads share the tokens; the row of a token is found by bisection.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

PAGE_SIZES = (16, 16, 8)
EXPANSION = (1, 2, 1)
PADDING_SLOT = -1
THREADS = 1024


@cute.jit
def apply_writes(
    table: cute.Tensor,
    counts: cute.Tensor,
    write_requests: cute.Tensor,
    overwrite: cute.Tensor,
    staged_ids: cute.Tensor,
    staged_counts: cute.Tensor,
    expansion: cutlass.Constexpr[int],
):
    thread, _, _ = cute.arch.thread_idx()
    for turn in cutlass.range((table.shape[0] + THREADS - 1) // THREADS):
        request = turn * THREADS + thread
        if request < table.shape[0]:
            filled = counts[request]
            for w in cutlass.range(write_requests.shape[0]):
                if write_requests[w] == request:
                    start = filled
                    if overwrite[w] != 0:
                        start = cutlass.Int32(0)
                    for i in cutlass.range(staged_counts[w]):
                        for x in cutlass.range_constexpr(expansion):
                            table[request, start + i * expansion + x] = staged_ids[w, i] * expansion + x
                    filled = start + staged_counts[w] * expansion
            counts[request] = filled


@cute.jit
def map_tokens(
    table: cute.Tensor,
    row_requests: cute.Tensor,
    row_starts: cute.Tensor,
    positions: cute.Tensor,
    slots: cute.Tensor,
    page: cutlass.Constexpr[int],
):
    thread, _, _ = cute.arch.thread_idx()
    rows = row_requests.shape[0]
    for turn in cutlass.range((positions.shape[0] + THREADS - 1) // THREADS):
        token = turn * THREADS + thread
        if token < positions.shape[0]:
            slot = cutlass.Int64(PADDING_SLOT)
            if token < row_starts[rows]:
                low, high = cutlass.Int32(0), rows  # the last row that starts at the token or before
                while high - low > 1:
                    middle = (low + high) // 2
                    if row_starts[middle] <= token:
                        low = middle
                    else:
                        high = middle
                position = positions[token].to(cutlass.Int32)
                slot = (table[row_requests[low], position // page] * page + position % page).to(cutlass.Int64)
            slots[token] = slot


@cute.kernel
def tables_kernel(
    tables: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
    counts: cute.Tensor,
    write_requests: cute.Tensor,
    overwrite: cute.Tensor,
    staged_ids: cute.Tensor,
    staged_counts: cute.Tensor,
    row_requests: cute.Tensor,
    row_starts: cute.Tensor,
    positions: cute.Tensor,
    slots: cute.Tensor,
):
    group, _, _ = cute.arch.block_idx()
    for g in cutlass.range_constexpr(len(tables)):
        if group == g:
            apply_writes(
                tables[g],
                counts[g, None],
                write_requests,
                overwrite,
                staged_ids[g, None, None],
                staged_counts[g, None],
                EXPANSION[g],
            )
    cute.arch.sync_threads()
    for g in cutlass.range_constexpr(len(tables)):
        if group == g:
            map_tokens(tables[g], row_requests, row_starts, positions, slots[g, None], PAGE_SIZES[g])


@cute.jit
def update(
    table_0: cute.Tensor,
    table_1: cute.Tensor,
    table_2: cute.Tensor,
    counts: cute.Tensor,
    write_requests: cute.Tensor,
    overwrite: cute.Tensor,
    staged_ids: cute.Tensor,
    staged_counts: cute.Tensor,
    row_requests: cute.Tensor,
    row_starts: cute.Tensor,
    positions: cute.Tensor,
    slots: cute.Tensor,
    stream,
):
    tables_kernel(
        (table_0, table_1, table_2),
        counts,
        write_requests,
        overwrite,
        staged_ids,
        staged_counts,
        row_requests,
        row_starts,
        positions,
        slots,
    ).launch(grid=(3, 1, 1), block=(THREADS, 1, 1), stream=stream)


def compile_for(arch: str):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU. Every size may vary."""
    requests, rows, writes, staged, starts, tokens = (cute.sym_int() for _ in range(6))

    def fake(dtype, *shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=dtype.width // 8)

    return cute.compile(
        update,
        *(fake(cutlass.Int32, requests, cute.sym_int()) for _ in range(3)),
        fake(cutlass.Int32, 3, requests),
        fake(cutlass.Int32, writes),
        fake(cutlass.Uint8, writes),
        fake(cutlass.Int32, 3, writes, staged),
        fake(cutlass.Int32, 3, writes),
        fake(cutlass.Int32, rows),
        fake(cutlass.Int32, starts),
        fake(cutlass.Int64, tokens),
        fake(cutlass.Int64, 3, tokens),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a")


def solve(
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
    slots = torch.empty(len(tables), len(positions), dtype=torch.int64, device=positions.device)
    kernel_for(positions.device)(
        *(*tables, num_blocks, write_requests, overwrite.view(torch.uint8), staged_ids, staged_counts),
        *(idx_mapping, query_start_loc, positions, slots),
    )
    return *tables, num_blocks, slots
