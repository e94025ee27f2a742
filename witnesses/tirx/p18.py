"""p18, the selector of sparse attention, in TIRx.

CUDA, two kernels, of which only sequences with more tokens than are taken need the first:
1. Scores: a thread block has a page. A thread holds one token's key in registers and meets a quarter of the heads,
   whose queries lie in shared memory as float32.
2. Selection: a thread block has a sequence and finds the last score that is taken bit by bit: how many scores are no
   lower? A sum over the threads before it then says where each token goes.
CPU: plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

TOP_K = 2048
QUARTERS = 4
CODES = 16
SELECTORS = 1024


def e4m3(code):
    """The float32 that an E4M3 byte stands for. An expression, for any target."""
    magnitude = T.cast(code, "uint32") & T.uint32(0x7F)
    normal = T.reinterpret("float32", (magnitude << T.uint32(20)) + T.uint32(120 << 23))
    subnormal = T.cast(magnitude, "float32") * T.float32(2**-9)
    value = T.if_then_else(magnitude < T.uint32(8), subnormal, normal)
    return T.if_then_else(code >= T.uint8(0x80), -value, value)


def in_order(bits):
    """Unsigned integers that are in the order of the floating-point numbers with these bits."""
    return bits ^ T.if_then_else(bits >= T.uint32(0x80000000), T.uint32(0xFFFFFFFF), T.uint32(0x80000000))


@T.jit
def score_cuda(
    qh: T.handle,
    ch: T.handle,
    sh: T.handle,
    wh: T.handle,
    lh: T.handle,
    th: T.handle,
    oh: T.handle,
    *,
    heads: T.constexpr,
    size: T.constexpr,
    page_size: T.constexpr,
    page_bytes: T.constexpr,
):
    """`codes` and `scales` are the same pages, as bytes and as float32; the scales come after the codes."""
    batch = T.int32()
    pool = T.int32()
    width = T.int32()
    queries = T.match_buffer(qh, (batch, heads, size), "uint8")
    codes = T.match_buffer(ch, (pool, page_bytes), "uint8")
    scales = T.match_buffer(sh, (pool, page_bytes // 4), "float32")
    weights = T.match_buffer(wh, (batch, heads), "float32")
    lengths = T.match_buffer(lh, (batch,), "int32")
    table = T.match_buffer(th, (batch, width), "int32")
    scores = T.match_buffer(oh, (batch, width, page_size), "float32")
    T.device_entry()
    place, sequence = T.cta_id([width, batch])
    thread = T.thread_id([QUARTERS * page_size])
    shared_queries = T.alloc_shared((heads, size), "float32")
    partial = T.alloc_shared((QUARTERS, page_size), "float32")
    raw = T.alloc_local((CODES,), "uint8")
    key = T.alloc_local((size,), "float32")
    row = T.alloc_local((4,), "float32")
    dot = T.alloc_local((1,), "float32")
    total = T.alloc_local((1,), "float32")
    page = T.alloc_local((1,), "int32")
    chunk = T.alloc_local((1,), "int32")
    if lengths[sequence] > TOP_K and place * page_size < lengths[sequence]:
        page[0] = table[sequence, place]
        for c in T.unroll(size // CODES):
            for e in T.vectorized(CODES):
                raw[e] = codes[page[0], (thread % page_size * (size // CODES) + c) * CODES + e]
            for e in T.unroll(CODES):
                key[c * CODES + e] = e4m3(raw[e])
        for step in T.unroll((heads * size + QUARTERS * page_size * CODES - 1) // (QUARTERS * page_size * CODES)):
            chunk[0] = step * (QUARTERS * page_size) + thread
            if chunk[0] < heads * size // CODES:
                for e in T.vectorized(CODES):
                    raw[e] = queries[sequence, chunk[0] // (size // CODES), chunk[0] % (size // CODES) * CODES + e]
                for e in T.unroll(CODES):
                    shared_queries[chunk[0] // (size // CODES), chunk[0] % (size // CODES) * CODES + e] = e4m3(raw[e])
        T.cuda.cta_sync()
        total[0] = T.float32(0)
        for h in T.serial(heads // QUARTERS):
            dot[0] = T.float32(0)
            for c in T.unroll(size // 4):
                for e in T.vectorized(4):
                    row[e] = shared_queries[thread // page_size * (heads // QUARTERS) + h, c * 4 + e]
                for e in T.unroll(4):
                    dot[0] = dot[0] + row[e] * key[c * 4 + e]
            total[0] = (
                total[0]
                + T.max(dot[0], T.float32(0)) * weights[sequence, thread // page_size * (heads // QUARTERS) + h]
            )
        partial[thread // page_size, thread % page_size] = total[0]
        T.cuda.cta_sync()
        if thread < page_size:
            total[0] = T.float32(0)
            for quarter in T.unroll(QUARTERS):
                total[0] = total[0] + partial[quarter, thread]
            scores[sequence, place, thread] = total[0] * scales[page[0], page_size * size // 4 + thread]


@T.jit
def select_cuda(
    sh: T.handle,
    lh: T.handle,
    th: T.handle,
    oh: T.handle,
    *,
    page_size: T.constexpr,
    width: T.constexpr,
    share: T.constexpr,
):
    """`share` consecutive tokens a thread."""
    batch = T.int32()
    scores = T.match_buffer(sh, (batch, width * page_size), "float32")
    lengths = T.match_buffer(lh, (batch,), "int32")
    table = T.match_buffer(th, (batch, width), "int32")
    indices = T.match_buffer(oh, (batch, TOP_K), "int32")
    T.device_entry()
    sequence = T.cta_id([batch])
    thread = T.thread_id([SELECTORS])
    sums = T.alloc_shared((2, SELECTORS // 32), "int32")
    keys = T.alloc_local((share,), "uint32")
    last = T.alloc_local((1,), "uint32")
    attempt = T.alloc_local((1,), "uint32")
    length = T.alloc_local((1,), "int32")
    count = T.alloc_local((1,), "int32")
    before = T.alloc_local((1,), "int32")
    other = T.alloc_local((1,), "int32")
    place = T.alloc_local((1,), "int32")
    length[0] = lengths[sequence]
    if length[0] <= TOP_K:
        for turn in T.unroll((TOP_K + SELECTORS - 1) // SELECTORS):
            place[0] = turn * SELECTORS + thread
            if place[0] < TOP_K:
                if place[0] < length[0]:
                    indices[sequence, place[0]] = (
                        table[sequence, place[0] // page_size] * page_size + place[0] % page_size
                    )
                else:
                    indices[sequence, place[0]] = -1
    else:
        for i in T.unroll(share):
            keys[i] = T.uint32(0)
            if thread * share + i < length[0]:
                keys[i] = in_order(T.reinterpret("uint32", scores[sequence, thread * share + i]))
        # The largest number that at least as many keys reach as are taken; its bits are found from the highest on.
        last[0] = T.uint32(0)
        for bit in T.serial(32):
            attempt[0] = last[0] | (T.uint32(0x80000000) >> T.cast(bit, "uint32"))
            count[0] = 0
            for i in T.unroll(share):
                if keys[i] >= attempt[0]:
                    count[0] = count[0] + 1
            count[0] = T.cuda.warp_sum(count[0])
            if thread % 32 == 0:
                sums[bit % 2, thread // 32] = count[0]
            T.cuda.cta_sync()
            count[0] = T.cuda.warp_sum(sums[bit % 2, thread % 32])
            if count[0] >= TOP_K:
                last[0] = attempt[0]
        T.cuda.cta_sync()
        count[0] = 0
        for i in T.unroll(share):
            if keys[i] >= last[0]:
                count[0] = count[0] + 1
        before[0] = count[0]
        for k in T.unroll(5):
            other[0] = T.cuda.__shfl_up_sync(T.uint32(0xFFFFFFFF), before[0], 1 << k, 32)
            if thread % 32 >= (1 << k):
                before[0] = before[0] + other[0]
        if thread % 32 == 31:
            sums[0, thread // 32] = before[0]
        T.cuda.cta_sync()
        # Of the threads before in this warp, then of the warps before.
        before[0] = before[0] - count[0]
        other[0] = 0
        if thread % 32 < thread // 32:
            other[0] = sums[0, thread % 32]
        before[0] = before[0] + T.cuda.warp_sum(other[0])
        for i in T.unroll(share):
            place[0] = thread * share + i
            if keys[i] >= last[0] and before[0] < TOP_K:
                indices[sequence, before[0]] = table[sequence, place[0] // page_size] * page_size + place[0] % page_size
                before[0] = before[0] + 1


@T.jit
def score_cpu(
    qh: T.handle,
    ch: T.handle,
    sh: T.handle,
    wh: T.handle,
    lh: T.handle,
    th: T.handle,
    oh: T.handle,
    *,
    heads: T.constexpr,
    size: T.constexpr,
    page_size: T.constexpr,
    page_bytes: T.constexpr,
):
    batch = T.int32()
    pool = T.int32()
    width = T.int32()
    queries = T.match_buffer(qh, (batch, heads, size), "uint8")
    codes = T.match_buffer(ch, (pool, page_bytes), "uint8")
    scales = T.match_buffer(sh, (pool, page_bytes // 4), "float32")
    weights = T.match_buffer(wh, (batch, heads), "float32")
    lengths = T.match_buffer(lh, (batch,), "int32")
    table = T.match_buffer(th, (batch, width), "int32")
    scores = T.match_buffer(oh, (batch, width, page_size), "float32")
    dot = T.alloc_buffer((1,), "float32", scope="local")
    total = T.alloc_buffer((1,), "float32", scope="local")
    for sequence, place, token in T.grid(batch, width, page_size):
        if lengths[sequence] > TOP_K and place * page_size < lengths[sequence]:
            total[0] = T.float32(0)
            for h in T.serial(heads):
                dot[0] = T.float32(0)
                for c in T.serial(size):
                    dot[0] = dot[0] + e4m3(queries[sequence, h, c]) * e4m3(
                        codes[table[sequence, place], token * size + c]
                    )
                total[0] = total[0] + T.max(dot[0], T.float32(0)) * weights[sequence, h]
            scores[sequence, place, token] = total[0] * scales[table[sequence, place], page_size * size // 4 + token]


@T.jit
def select_cpu(sh: T.handle, lh: T.handle, th: T.handle, oh: T.handle, *, page_size: T.constexpr, width: T.constexpr):
    batch = T.int32()
    scores = T.match_buffer(sh, (batch, width * page_size), "float32")
    lengths = T.match_buffer(lh, (batch,), "int32")
    table = T.match_buffer(th, (batch, width), "int32")
    indices = T.match_buffer(oh, (batch, TOP_K), "int32")
    last = T.alloc_buffer((1,), "uint32", scope="local")
    attempt = T.alloc_buffer((1,), "uint32", scope="local")
    count = T.alloc_buffer((1,), "int32", scope="local")
    for sequence in T.serial(batch):
        last[0] = T.uint32(0)
        if lengths[sequence] > TOP_K:
            for bit in T.serial(32):
                attempt[0] = last[0] | (T.uint32(0x80000000) >> T.cast(bit, "uint32"))
                count[0] = 0
                for place in T.serial(lengths[sequence]):
                    if in_order(T.reinterpret("uint32", scores[sequence, place])) >= attempt[0]:
                        count[0] = count[0] + 1
                if count[0] >= TOP_K:
                    last[0] = attempt[0]
        count[0] = 0
        for place in T.serial(lengths[sequence]):
            if lengths[sequence] <= TOP_K or in_order(T.reinterpret("uint32", scores[sequence, place])) >= last[0]:
                indices[sequence, count[0]] = table[sequence, place // page_size] * page_size + place % page_size
                count[0] = count[0] + 1
        for rest in T.serial(TOP_K - count[0]):
            indices[sequence, count[0] + rest] = -1


def compile_for(
    arch: str, heads: int = 64, size: int = 128, page_size: int = 64, width: int = 43
) -> list[tvm.runtime.Executable]:
    """Scores and selection for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    sizes = {"heads": heads, "size": size, "page_size": page_size, "page_bytes": page_size * (size + 4)}
    if arch == "llvm":
        kernels = [score_cpu.specialize(**sizes), select_cpu.specialize(page_size=page_size, width=width)]
        return [tvm.compile(tvm.IRModule({"main": kernel}), target="llvm") for kernel in kernels]
    assert heads % QUARTERS == 0 and size % CODES == 0 and QUARTERS * page_size <= 1024
    kernels = [
        score_cuda.specialize(**sizes),
        select_cuda.specialize(page_size=page_size, width=width, share=-(-width * page_size // SELECTORS)),
    ]
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return [tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx") for kernel in kernels]


@cache
def kernels_for(device: torch.device, heads: int, size: int, page_size: int, width: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return [executable["main"] for executable in compile_for(arch, heads, size, page_size, width)]


def solve(
    q_index_fp8: torch.Tensor,
    k_index_cache_fp8: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
) -> tuple[torch.Tensor]:
    (batch, heads, size), (pool, page_size) = q_index_fp8.shape, k_index_cache_fp8.shape[:2]
    width, device = block_table.shape[1], weights.device
    score, select = kernels_for(device, heads, size, page_size, width)
    pages = k_index_cache_fp8.view(pool, -1)
    scores = torch.empty(batch, width, page_size, dtype=torch.float32, device=device)
    indices = torch.empty(batch, TOP_K, dtype=torch.int32, device=device)
    score(
        *(q_index_fp8.view(torch.uint8), pages.view(torch.uint8), pages.view(torch.float32)),
        *(weights, seq_lens, block_table, scores),
    )
    select(scores.view(batch, -1), seq_lens, block_table, indices)
    return (indices,)
