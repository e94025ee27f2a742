"""p26, staged block-table writes and slots, in TIRx: one kernel, called for each of the three groups.

A thread goes through all writes in order and applies those of its request, so that two writes to one request never
meet. Then, after a barrier, the threads share the tokens; the row of a token is found by bisection. CPU: plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

PAGE_SIZES = (16, 16, 8)
EXPANSION = (1, 2, 1)
PADDING_SLOT = -1
THREADS = 1024


@T.jit
def update_cuda(
    t: T.handle,
    c: T.handle,
    wr: T.handle,
    ow: T.handle,
    si: T.handle,
    sc: T.handle,
    rr: T.handle,
    rs: T.handle,
    po: T.handle,
    sl: T.handle,
    *,
    page: T.constexpr,
    expansion: T.constexpr,
):
    requests = T.int32()
    width = T.int32()
    writes = T.int32()
    staged = T.int32()
    rows = T.int32()
    tokens = T.int32()
    table = T.match_buffer(t, (requests, width), "int32")
    counts = T.match_buffer(c, (requests,), "int32")
    write_requests = T.match_buffer(wr, (writes,), "int32")
    overwrite = T.match_buffer(ow, (writes,), "uint8")
    staged_ids = T.match_buffer(si, (writes, staged), "int32")
    staged_counts = T.match_buffer(sc, (writes,), "int32")
    row_requests = T.match_buffer(rr, (rows,), "int32")
    row_starts = T.match_buffer(rs, (rows + 1,), "int32")
    positions = T.match_buffer(po, (tokens,), "int64")
    slots = T.match_buffer(sl, (tokens,), "int64")
    T.device_entry()
    T.cta_id([1])
    thread = T.thread_id([THREADS])
    filled = T.alloc_local((1,), "int32")
    start = T.alloc_local((1,), "int32")
    bounds = T.alloc_local((3,), "int32")  # low, high, middle
    place = T.alloc_local((1,), "int32")
    for turn in T.serial(T.ceildiv(requests, THREADS)):
        if turn * THREADS + thread < requests:
            filled[0] = counts[turn * THREADS + thread]
            for w in T.serial(writes):
                if write_requests[w] == turn * THREADS + thread:
                    start[0] = filled[0]
                    if overwrite[w] != T.uint8(0):
                        start[0] = 0
                    for i in T.serial(staged_counts[w]):
                        for x in T.unroll(expansion):
                            table[turn * THREADS + thread, start[0] + i * expansion + x] = (
                                staged_ids[w, i] * expansion + x
                            )
                    filled[0] = start[0] + staged_counts[w] * expansion
            counts[turn * THREADS + thread] = filled[0]
    T.cuda.cta_sync()
    for turn in T.serial(T.ceildiv(tokens, THREADS)):
        if turn * THREADS + thread < tokens:
            if turn * THREADS + thread < row_starts[rows]:
                bounds[0] = 0  # the last row that starts at the token or before
                bounds[1] = rows
                while bounds[1] - bounds[0] > 1:
                    bounds[2] = (bounds[0] + bounds[1]) // 2
                    if row_starts[bounds[2]] <= turn * THREADS + thread:
                        bounds[0] = bounds[2]
                    else:
                        bounds[1] = bounds[2]
                place[0] = T.cast(positions[turn * THREADS + thread], "int32")
                slots[turn * THREADS + thread] = T.cast(
                    table[row_requests[bounds[0]], place[0] // page] * page + place[0] % page, "int64"
                )
            else:
                slots[turn * THREADS + thread] = T.int64(PADDING_SLOT)


@T.jit
def update_cpu(
    t: T.handle,
    c: T.handle,
    wr: T.handle,
    ow: T.handle,
    si: T.handle,
    sc: T.handle,
    rr: T.handle,
    rs: T.handle,
    po: T.handle,
    sl: T.handle,
    *,
    page: T.constexpr,
    expansion: T.constexpr,
):
    requests = T.int32()
    width = T.int32()
    writes = T.int32()
    staged = T.int32()
    rows = T.int32()
    tokens = T.int32()
    table = T.match_buffer(t, (requests, width), "int32")
    counts = T.match_buffer(c, (requests,), "int32")
    write_requests = T.match_buffer(wr, (writes,), "int32")
    overwrite = T.match_buffer(ow, (writes,), "uint8")
    staged_ids = T.match_buffer(si, (writes, staged), "int32")
    staged_counts = T.match_buffer(sc, (writes,), "int32")
    row_requests = T.match_buffer(rr, (rows,), "int32")
    row_starts = T.match_buffer(rs, (rows + 1,), "int32")
    positions = T.match_buffer(po, (tokens,), "int64")
    slots = T.match_buffer(sl, (tokens,), "int64")
    start = T.alloc_buffer((1,), "int32", scope="local")
    place = T.alloc_buffer((1,), "int32", scope="local")
    for w in T.serial(writes):
        start[0] = counts[write_requests[w]]
        if overwrite[w] != T.uint8(0):
            start[0] = 0
        for i in T.serial(staged_counts[w]):
            for x in T.serial(expansion):
                table[write_requests[w], start[0] + i * expansion + x] = staged_ids[w, i] * expansion + x
        counts[write_requests[w]] = start[0] + staged_counts[w] * expansion
    for token in T.serial(tokens):
        slots[token] = T.int64(PADDING_SLOT)
    for row in T.serial(rows):
        for i in T.serial(row_starts[row + 1] - row_starts[row]):
            place[0] = T.cast(positions[row_starts[row] + i], "int32")
            slots[row_starts[row] + i] = T.cast(
                table[row_requests[row], place[0] // page] * page + place[0] % page, "int64"
            )


def compile_for(arch: str) -> list[tvm.runtime.Executable]:
    """A kernel for each group, for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU. Every size may vary."""
    kernel = update_cpu if arch == "llvm" else update_cuda
    made = [kernel.specialize(page=page, expansion=x) for page, x in zip(PAGE_SIZES, EXPANSION, strict=True)]
    if arch == "llvm":
        return [tvm.compile(tvm.IRModule({"main": one}), target="llvm") for one in made]
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return [tvm.compile(tvm.IRModule({"main": one}), target=target, tir_pipeline="tirx") for one in made]


@cache
def kernels_for(device: torch.device):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return [executable["main"] for executable in compile_for(arch)]


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
    flags = overwrite.view(torch.uint8)
    for g, (kernel, table) in enumerate(zip(kernels_for(positions.device), tables, strict=True)):
        writes = (write_requests, flags, staged_ids[g], staged_counts[g])
        kernel(table, num_blocks[g], *writes, idx_mapping, query_start_loc, positions, slots[g])
    return *tables, num_blocks, slots
