"""p43, backward pass of embedding lookup and RMSNorm, in TIRx.

CUDA, three kernels:
1. Tokens of one id become a linked list: each token is put in front of what stood there, with an atomic operation.
2. A thread block takes tokens in turn; a thread has twice 8 columns (16 bytes of the gradient). The token at the front
   of its list adds up the whole list in float32 and writes the row of the table once. Beside each token the thread
   block looks at a few rows of the table and writes zeros to those without tokens. As every token is met once, the
   weight's gradient is summed up along the way, in registers.
3. The blocks' parts of the weight's gradient are added up, 32 columns a thread block.

CPU: the same three in plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

VOCABULARY = 65536
VECTOR = 8
LANES = 32
ROWS = 8  # of the parts, that a thread block of the last kernel reads at a time
LOOKED_AT = 4  # rows of the table that are looked at together
THREADS = 256
BLOCKS = 2  # on a multiprocessor; the compiler keeps to the registers that this leaves
LINKERS = 128
NOWHERE = -1


def float32(x):
    return T.cast(x, "float32")


@T.jit
def link_cuda(i: T.handle, h: T.handle, f: T.handle):
    tokens = T.int32()
    ids = T.match_buffer(i, (tokens,), "int64")
    heads = T.match_buffer(h, (VOCABULARY,), "int32")
    following = T.match_buffer(f, (tokens,), "int32")
    T.device_entry()
    block = T.cta_id([T.ceildiv(tokens, LINKERS)])
    thread = T.thread_id([LINKERS])
    token = T.alloc_local((1,), "int32")
    id = T.alloc_local((1,), "int32")
    expected = T.alloc_local((1,), "int32")
    seen = T.alloc_local((1,), "int32")
    token[0] = block * LINKERS + thread
    if token[0] < tokens:
        id[0] = T.cast(ids[token[0]], "int32")
        expected[0] = NOWHERE
        seen[0] = T.cuda.atomic_cas(T.address_of(heads[id[0]]), expected[0], token[0])
        while seen[0] != expected[0]:
            expected[0] = seen[0]
            seen[0] = T.cuda.atomic_cas(T.address_of(heads[id[0]]), expected[0], token[0])
        following[token[0]] = seen[0]


@T.jit
def rows_cuda(
    g: T.handle,
    i: T.handle,
    x: T.handle,
    r: T.handle,
    w: T.handle,
    h: T.handle,
    f: T.handle,
    o: T.handle,
    p: T.handle,
    *,
    width: T.constexpr,
    threads: T.constexpr,
    chunks: T.constexpr,
    lanes: T.constexpr,
):
    tokens = T.int32()
    blocks = T.int32()
    grad = T.match_buffer(g, (tokens, width), "bfloat16")
    ids = T.match_buffer(i, (tokens,), "int64")
    hidden = T.match_buffer(x, (tokens, width), "float32")
    rstd = T.match_buffer(r, (tokens,), "float32")
    weight = T.match_buffer(w, (width,), "bfloat16")
    heads = T.match_buffer(h, (VOCABULARY,), "int32")
    following = T.match_buffer(f, (tokens,), "int32")
    out = T.match_buffer(o, (VOCABULARY, width), "bfloat16")
    parts = T.match_buffer(p, (blocks, width), "float32")
    T.device_entry()
    T.attr({"tirx.launch_bounds_min_blocks_per_sm": BLOCKS})
    block = T.cta_id([blocks])
    thread = T.thread_id([threads])
    gs = T.alloc_local((chunks, VECTOR), "bfloat16")
    ws = T.alloc_local((chunks, VECTOR), "bfloat16")
    zeros = T.alloc_local((VECTOR,), "bfloat16")
    n = T.alloc_local((chunks, VECTOR), "float32")
    total = T.alloc_local((chunks, VECTOR), "float32")
    part = T.alloc_local((chunks, VECTOR), "float32")
    scale = T.alloc_local((1,), "float32")
    projection = T.alloc_local((1,), "float32")
    row_heads = T.alloc_local((LOOKED_AT,), "int32")
    share = T.alloc_local((1,), "int32")
    token = T.alloc_local((1,), "int32")
    id = T.alloc_local((1,), "int32")
    next_id = T.alloc_local((1,), "int32")
    head = T.alloc_local((1,), "int32")
    next_head = T.alloc_local((1,), "int32")
    current = T.alloc_local((1,), "int32")
    after = T.alloc_local((1,), "int32")
    length = T.alloc_local((1,), "int32")
    half = T.alloc_local((1,), "int32")
    row = T.alloc_local((1,), "int32")
    sums = T.alloc_shared((2, threads // lanes), "float32")
    for c in T.unroll(chunks):
        for e in T.vectorized(VECTOR):
            ws[c, e] = weight[(c * threads + thread) * VECTOR + e]
        for e in T.unroll(VECTOR):
            part[c, e] = T.float32(0)
            zeros[e] = T.bfloat16(0)
    share[0] = T.ceildiv(VOCABULARY, tokens)
    half[0] = 0
    # The id of a token is read two turns ahead, the front of its list one turn ahead.
    next_id[0] = 0
    next_head[0] = NOWHERE
    if block < tokens:
        next_id[0] = T.cast(ids[block], "int32")
        next_head[0] = heads[next_id[0]]
    id[0] = 0
    for turn in T.serial(T.ceildiv(tokens, blocks)):
        token[0] = turn * blocks + block
        id[0] = next_id[0]
        head[0] = next_head[0]
        if token[0] + blocks < tokens:
            next_id[0] = T.cast(ids[token[0] + blocks], "int32")
        current[0] = NOWHERE
        if token[0] < tokens and head[0] == token[0]:
            current[0] = token[0]
        after[0] = NOWHERE
        if current[0] >= 0:
            for c in T.unroll(chunks):
                for e in T.vectorized(VECTOR):
                    gs[c, e] = grad[current[0], (c * threads + thread) * VECTOR + e]
                for e in T.vectorized(VECTOR):
                    n[c, e] = hidden[current[0], (c * threads + thread) * VECTOR + e]
            scale[0] = rstd[current[0]]
            after[0] = following[current[0]]
        if token[0] < tokens:
            for look in T.serial(T.ceildiv(share[0], LOOKED_AT)):
                for d in T.unroll(LOOKED_AT):
                    row[0] = token[0] * share[0] + look * LOOKED_AT + d
                    row_heads[d] = 0
                    if look * LOOKED_AT + d < share[0] and row[0] < VOCABULARY:
                        row_heads[d] = heads[row[0]]
                for d in T.unroll(LOOKED_AT):
                    row[0] = token[0] * share[0] + look * LOOKED_AT + d
                    if row_heads[d] < 0:
                        for c in T.unroll(chunks):
                            for e in T.vectorized(VECTOR):
                                out[row[0], (c * threads + thread) * VECTOR + e] = zeros[e]
        if token[0] + blocks < tokens:
            next_head[0] = heads[next_id[0]]
        for c in T.unroll(chunks):
            for e in T.unroll(VECTOR):
                total[c, e] = T.float32(0)
        length[0] = 0
        while current[0] >= 0 and length[0] < tokens:
            projection[0] = T.float32(0)
            for c in T.unroll(chunks):
                for e in T.unroll(VECTOR):
                    n[c, e] = n[c, e] * scale[0]
                    part[c, e] = part[c, e] + float32(gs[c, e]) * n[c, e]
                    projection[0] = projection[0] + float32(gs[c, e]) * float32(ws[c, e]) * n[c, e]
                    # What does not need the projection is added before it is known.
                    total[c, e] = total[c, e] + float32(gs[c, e]) * float32(ws[c, e]) * scale[0]
            if lanes > 1:
                projection[0] = T.cuda.warp_sum(projection[0], lanes)
            if thread % lanes == 0:
                sums[half[0], thread // lanes] = projection[0]
            T.cuda.cta_sync()  # one is enough: the next token writes the other half of the sums
            projection[0] = T.float32(0)
            for k in T.unroll(threads // lanes):
                projection[0] = projection[0] + sums[half[0], k]
            projection[0] = projection[0] * scale[0] * T.float32(1 / width)
            for c in T.unroll(chunks):
                for e in T.unroll(VECTOR):
                    total[c, e] = total[c, e] - n[c, e] * projection[0]
            half[0] = 1 - half[0]
            length[0] = length[0] + 1
            current[0] = after[0]
            if current[0] >= 0:
                for c in T.unroll(chunks):
                    for e in T.vectorized(VECTOR):
                        gs[c, e] = grad[current[0], (c * threads + thread) * VECTOR + e]
                    for e in T.vectorized(VECTOR):
                        n[c, e] = hidden[current[0], (c * threads + thread) * VECTOR + e]
                scale[0] = rstd[current[0]]
                after[0] = following[current[0]]
        if length[0] > 0:
            for c in T.unroll(chunks):
                for e in T.unroll(VECTOR):
                    gs[c, e] = T.cast(total[c, e], "bfloat16")
                for e in T.vectorized(VECTOR):
                    out[id[0], (c * threads + thread) * VECTOR + e] = gs[c, e]
    for c in T.unroll(chunks):
        for e in T.vectorized(VECTOR):
            parts[block, (c * threads + thread) * VECTOR + e] = part[c, e]


@T.jit
def weight_cuda(p: T.handle, o: T.handle, *, width: T.constexpr):
    blocks = T.int32()
    parts = T.match_buffer(p, (blocks, width), "float32")
    out = T.match_buffer(o, (width,), "bfloat16")
    T.device_entry()
    tile = T.cta_id([T.ceildiv(width, LANES)])
    thread = T.thread_id([LANES * ROWS])
    total = T.alloc_local((1,), "float32")
    column = T.alloc_local((1,), "int32")
    sums = T.alloc_shared((ROWS, LANES), "float32")
    total[0] = T.float32(0)
    column[0] = tile * LANES + thread % LANES
    for turn in T.serial(T.ceildiv(blocks, ROWS)):
        if turn * ROWS + thread // LANES < blocks and column[0] < width:
            total[0] = total[0] + parts[turn * ROWS + thread // LANES, column[0]]
    sums[thread // LANES, thread % LANES] = total[0]
    T.cuda.cta_sync()
    if thread < LANES and column[0] < width:
        total[0] = T.float32(0)
        for k in T.unroll(ROWS):
            total[0] = total[0] + sums[k, thread]
        out[column[0]] = T.cast(total[0], "bfloat16")


@T.jit
def link_cpu(i: T.handle, h: T.handle, f: T.handle):
    tokens = T.int32()
    ids = T.match_buffer(i, (tokens,), "int64")
    heads = T.match_buffer(h, (VOCABULARY,), "int32")
    following = T.match_buffer(f, (tokens,), "int32")
    for token in T.serial(tokens):
        following[token] = heads[ids[token]]
        heads[ids[token]] = token


@T.jit
def rows_cpu(
    g: T.handle,
    i: T.handle,
    x: T.handle,
    r: T.handle,
    w: T.handle,
    h: T.handle,
    f: T.handle,
    o: T.handle,
    p: T.handle,
    *,
    width: T.constexpr,
):
    tokens = T.int32()
    blocks = T.int32()
    grad = T.match_buffer(g, (tokens, width), "bfloat16")
    ids = T.match_buffer(i, (tokens,), "int64")
    hidden = T.match_buffer(x, (tokens, width), "float32")
    rstd = T.match_buffer(r, (tokens,), "float32")
    weight = T.match_buffer(w, (width,), "bfloat16")
    heads = T.match_buffer(h, (VOCABULARY,), "int32")
    following = T.match_buffer(f, (tokens,), "int32")
    out = T.match_buffer(o, (VOCABULARY, width), "bfloat16")
    parts = T.match_buffer(p, (blocks, width), "float32")
    total = T.alloc_buffer((width,), "float32", scope="local")
    projection = T.alloc_buffer((1,), "float32", scope="local")
    current = T.alloc_buffer((1,), "int32", scope="local")
    for block, c in T.grid(blocks, width):
        parts[block, c] = T.float32(0)
    for row, c in T.grid(VOCABULARY, width):
        if heads[row] < 0:
            out[row, c] = T.bfloat16(0)
    for token in T.serial(tokens):
        if heads[ids[token]] == token:
            for c in T.serial(width):
                total[c] = T.float32(0)
            current[0] = token
            while current[0] >= 0:
                projection[0] = T.float32(0)
                for c in T.serial(width):
                    parts[token % blocks, c] = (
                        parts[token % blocks, c]
                        + float32(grad[current[0], c]) * hidden[current[0], c] * rstd[current[0]]
                    )
                    projection[0] = (
                        projection[0]
                        + float32(grad[current[0], c]) * float32(weight[c]) * hidden[current[0], c] * rstd[current[0]]
                    )
                projection[0] = projection[0] / T.float32(width)
                for c in T.serial(width):
                    total[c] = total[c] + rstd[current[0]] * (
                        float32(grad[current[0], c]) * float32(weight[c])
                        - hidden[current[0], c] * rstd[current[0]] * projection[0]
                    )
                current[0] = following[current[0]]
            for c in T.serial(width):
                out[ids[token], c] = T.cast(total[c], "bfloat16")


@T.jit
def weight_cpu(p: T.handle, o: T.handle, *, width: T.constexpr):
    blocks = T.int32()
    parts = T.match_buffer(p, (blocks, width), "float32")
    out = T.match_buffer(o, (width,), "bfloat16")
    total = T.alloc_buffer((1,), "float32", scope="local")
    for c in T.serial(width):
        total[0] = T.float32(0)
        for block in T.serial(blocks):
            total[0] = total[0] + parts[block, c]
        out[c] = T.cast(total[0], "bfloat16")


def compile_for(arch: str, width: int = 4096) -> list[tvm.runtime.Executable]:
    """Lists, rows, weight for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    if arch == "llvm":
        kernels = link_cpu.specialize(), rows_cpu.specialize(width=width), weight_cpu.specialize(width=width)
        return [tvm.compile(tvm.IRModule({"main": kernel}), target="llvm") for kernel in kernels]
    vectors = width // VECTOR
    threads = min(vectors, THREADS)
    assert width % VECTOR == 0 and vectors % threads == 0, "a row must fill whole thread blocks"
    assert threads % LANES == 0 or threads in (1, 2, 4, 8, 16), "a row must fill whole warps"
    kernels = (
        link_cuda.specialize(),
        rows_cuda.specialize(width=width, threads=threads, chunks=vectors // threads, lanes=min(threads, LANES)),
        weight_cuda.specialize(width=width),
    )
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return [tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx") for kernel in kernels]


@cache
def kernels_for(device: torch.device, width: int):
    """How many thread blocks share the tokens, and the three kernels."""
    arch, blocks = "llvm", 3
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        arch, blocks = f"sm_{properties.major}{properties.minor}a", BLOCKS * properties.multi_processor_count
    return blocks, *(executable["main"] for executable in compile_for(arch, width))


def solve(
    grad_output: torch.Tensor,
    input_ids: torch.Tensor,
    hidden_states_fp32: torch.Tensor,
    rstd: torch.Tensor,
    norm_weight: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    width, device = len(norm_weight), norm_weight.device
    blocks, link, walk_rows, sum_parts = kernels_for(device, width)
    ids = input_ids.view(-1)
    heads = torch.full((VOCABULARY,), NOWHERE, dtype=torch.int32, device=device)
    following = torch.empty(ids.shape, dtype=torch.int32, device=device)
    parts = torch.empty(blocks, width, dtype=torch.float32, device=device)
    grad_embedding, grad_norm_weight = norm_weight.new_empty(VOCABULARY, width), torch.empty_like(norm_weight)
    rows = grad_output.view(-1, width), ids, hidden_states_fp32.view(-1, width), rstd.view(-1)
    link(ids, heads, following)
    walk_rows(*rows, norm_weight, heads, following, grad_embedding, parts)
    sum_parts(parts, grad_norm_weight)
    return grad_embedding, grad_norm_weight
