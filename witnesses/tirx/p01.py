"""p01, paged grouped-query decode, in TIRx.

CUDA: two kernels, as in split-context flash decoding. The list of all tokens is cut into as many equal spans as the GPU
has multiprocessors, wherever the sequences begin and end, so that all thread blocks have the same work. A block has a
warp for each KV head; the warps never wait for each other, but ask for the same tokens at the same time, which lie side
by side. Each copies its keys and values to shared memory, 16 tokens at a time and two tiles ahead, also where one
sequence ends and the next begins. Both products run on the tensor cores (m16n8k16): the logits as queries times keys,
whose result is, rounded, the right operand of values times powers. Every piece of a sequence leaves a partial result,
numbered span + sequence, which the second kernel joins, several at a time. Nothing waits for the offsets to reach the
host. CPU: plain loops, a query head at a time.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

KEYS = 16  # tokens at a time
STAGES = 3  # tiles in shared memory: one is worked on, two are on their way
LONGEST = 512  # tokens of a span
VECTOR = 8  # bfloat16 values in 16 bytes
PADDING = 8  # so much longer are rows in shared memory: eight of them, 16 bytes each, meet all its banks
EXTRA = 4  # floats behind a partial result: its highest logit and its weight, and two to keep rows at 16 bytes
JOINED = 8  # partial results that are joined at a time
LOG2_E = 1.4426950408889634
LOWEST = -1.0e30
MASKED = -3.0e38  # so far below `LOWEST` that its power of two is zero


@T.jit
def span_cuda(
    qh: T.handle,
    kh: T.handle,
    vh: T.handle,
    po: T.handle,
    pi: T.handle,
    scale: T.float32,
    span: T.int32,
    blocks: T.int32,
    pa: T.handle,
    *,
    heads: T.constexpr,
    kv_heads: T.constexpr,
    group: T.constexpr,
    size: T.constexpr,
):
    """Warp `w` of block `s` has KV head `w`, read by `group` query heads, and the tokens from `s * span` on."""
    sequences = T.int32()
    pool = T.int32()
    listed = T.int32()
    parts = T.int32()
    q = T.match_buffer(qh, (sequences, heads, size), "bfloat16")
    k_cache = T.match_buffer(kh, (pool, 1, kv_heads, size), "bfloat16")
    v_cache = T.match_buffer(vh, (pool, 1, kv_heads, size), "bfloat16")
    offsets = T.match_buffer(po, (sequences + 1,), "int32")
    tokens = T.match_buffer(pi, (listed,), "int32")
    partials = T.match_buffer(pa, (parts, heads, size + EXTRA), "float32")
    T.device_entry()
    block = T.cta_id([blocks])
    thread = T.thread_id([32 * kv_heads])
    # For each warp the stages, each of keys and values, then its queries.
    shared = T.alloc_buffer((kv_heads, 2 * STAGES * KEYS + group, size + PADDING), "bfloat16", scope="shared.dyn")
    chosen = T.alloc_shared((LONGEST,), "int32")
    found = T.alloc_shared((2,), "int32")
    # The span's tiles: whose tokens they are, and the first and the sequence's last of them, counted in the span.
    owners = T.alloc_shared((LONGEST,), "int32")
    firsts = T.alloc_shared((LONGEST,), "int32")
    lasts = T.alloc_shared((LONGEST,), "int32")
    lane = T.alloc_local((1,), "int32")
    warp = T.alloc_local((1,), "int32")
    span_start = T.alloc_local((1,), "int32")
    span_stop = T.alloc_local((1,), "int32")
    sequence = T.alloc_local((1,), "int32")
    start = T.alloc_local((1,), "int32")
    stop = T.alloc_local((1,), "int32")
    tiles = T.alloc_local((1,), "int32")
    tile = T.alloc_local((1,), "int32")
    place = T.alloc_local((1,), "int32")
    row = T.alloc_local((1,), "int32")
    # Fragments: two neighbouring columns of a row, the same of the row eight further down, then eight columns on.
    left = T.alloc_local((size // 16, 4), "uint32")
    matrices = T.alloc_local((4,), "uint32")
    powers = T.alloc_local((KEYS // 8,), "uint32")
    sums = T.alloc_local((2, KEYS // 8, 4), "float32")
    logits = T.alloc_local((KEYS // 8, 2), "float32")
    total = T.alloc_local((size // 16, 4), "float32")
    top = T.alloc_local((1,), "float32")
    weight = T.alloc_local((1,), "float32")
    peak = T.alloc_local((1,), "float32")
    shrink = T.alloc_local((1,), "float32")
    shrinks = T.alloc_local((2,), "float32")
    lane[0] = thread % 32
    warp[0] = thread // 32
    span_start[0] = block * span
    span_stop[0] = T.min(span_start[0] + span, offsets[sequences])
    # The sequences of the first and the last token, and which tokens they are.
    for turn in T.serial((sequences + 32 * kv_heads - 1) // (32 * kv_heads)):
        place[0] = turn * (32 * kv_heads) + thread
        if place[0] < sequences:
            start[0] = offsets[place[0]]
            stop[0] = offsets[place[0] + 1]
            if start[0] <= span_start[0] and span_start[0] < stop[0]:
                found[0] = place[0]
            if start[0] < span_stop[0] and span_stop[0] <= stop[0]:
                found[1] = place[0]
    for turn in T.serial((span + 32 * kv_heads - 1) // (32 * kv_heads)):
        place[0] = turn * (32 * kv_heads) + thread
        if span_start[0] + place[0] < span_stop[0]:
            chosen[place[0]] = tokens[span_start[0] + place[0]]
    T.cuda.cta_sync()
    tiles[0] = 0
    if span_start[0] < span_stop[0]:
        for piece in T.serial(found[1] - found[0] + 1):
            start[0] = T.max(offsets[found[0] + piece], span_start[0]) - span_start[0]
            stop[0] = T.min(offsets[found[0] + piece + 1], span_stop[0]) - span_start[0]
            for turn in T.serial((stop[0] - start[0] + 32 * kv_heads * KEYS - 1) // (32 * kv_heads * KEYS)):
                place[0] = turn * (32 * kv_heads) + thread
                if start[0] + place[0] * KEYS < stop[0]:
                    owners[tiles[0] + place[0]] = found[0] + piece
                    firsts[tiles[0] + place[0]] = start[0] + place[0] * KEYS
                    lasts[tiles[0] + place[0]] = stop[0] - 1
            tiles[0] = tiles[0] + (stop[0] - start[0] + KEYS - 1) // KEYS
    T.cuda.cta_sync()
    # Every turn starts copying a tile and works on the one that was started two turns ago.
    for turn in T.serial(tiles[0] + STAGES - 1):
        T.ptx.cp_async.wait_group(STAGES - 2)
        T.cuda.warp_sync()
        if turn < tiles[0]:
            row[0] = turn % STAGES * (2 * KEYS)
            for step in T.unroll(KEYS * size // (32 * VECTOR)):
                # Places past the last token repeat it.
                place[0] = firsts[turn] + (step * 32 + lane[0]) // (size // VECTOR)
                place[0] = chosen[T.min(place[0], lasts[turn])]
                T.ptx.cp_async(
                    T.address_of(
                        shared[
                            warp[0],
                            row[0] + (step * 32 + lane[0]) // (size // VECTOR),
                            (step * 32 + lane[0]) % (size // VECTOR) * VECTOR,
                        ]
                    ),
                    T.address_of(k_cache[place[0], 0, warp[0], (step * 32 + lane[0]) % (size // VECTOR) * VECTOR]),
                    16,
                )
                T.ptx.cp_async(
                    T.address_of(
                        shared[
                            warp[0],
                            row[0] + KEYS + (step * 32 + lane[0]) // (size // VECTOR),
                            (step * 32 + lane[0]) % (size // VECTOR) * VECTOR,
                        ]
                    ),
                    T.address_of(v_cache[place[0], 0, warp[0], (step * 32 + lane[0]) % (size // VECTOR) * VECTOR]),
                    16,
                )
        T.ptx.cp_async.commit_group()
        if turn >= STAGES - 1:
            tile[0] = turn - (STAGES - 1)
            sequence[0] = owners[tile[0]]
            if tile[0] == 0 or owners[T.max(tile[0] - 1, 0)] != sequence[0]:
                for step in T.unroll((group * size // VECTOR + 31) // 32):
                    place[0] = step * 32 + lane[0]
                    if place[0] < group * size // VECTOR:
                        for e in T.vectorized(VECTOR):
                            shared[
                                warp[0],
                                2 * STAGES * KEYS + place[0] // (size // VECTOR),
                                place[0] % (size // VECTOR) * VECTOR + e,
                            ] = q[
                                sequence[0],
                                warp[0] * group + place[0] // (size // VECTOR),
                                place[0] % (size // VECTOR) * VECTOR + e,
                            ]
                T.cuda.warp_sync()
                for step in T.unroll(size // 16):  # rows past the last head repeat it
                    T.ptx.ldmatrix(
                        *(False, 4, ".b16"),
                        T.address_of(
                            shared[
                                warp[0],
                                2 * STAGES * KEYS + T.min(lane[0] % 8, group - 1),
                                step * 16 + lane[0] // 16 * 8,
                            ]
                        ),
                        *[T.address_of(left[step, i]) for i in range(4)],
                    )
                top[0] = T.float32(LOWEST)
                weight[0] = T.float32(0)
                for column in T.unroll(size // 16):
                    for e in T.unroll(4):
                        total[column, e] = T.float32(0)
            row[0] = (turn + 1) % STAGES * (2 * KEYS) + lane[0] // 16 * 8 + lane[0] % 8
            # In two halves: tensor cores round sums coarsely.
            for half in T.unroll(2):
                for column in T.unroll(KEYS // 8):
                    for e in T.unroll(4):
                        sums[half, column, e] = T.float32(0)
            for step in T.unroll(size // 32):
                for half in T.unroll(2):
                    T.ptx.ldmatrix(
                        *(False, 4, ".b16"),
                        T.address_of(
                            shared[
                                warp[0],
                                row[0],
                                (half * (size // 32) + step) * 16 + lane[0] // 8 % 2 * 8,
                            ]
                        ),
                        *[T.address_of(matrices[i]) for i in range(4)],
                    )
                    for column in T.unroll(KEYS // 8):
                        T.ptx.mma(
                            *("m16n8k16", "row", "col", "float32", "bfloat16", "bfloat16", "float32"),
                            [T.address_of(sums[half, column, i]) for i in range(4)],
                            [T.address_of(left[half * (size // 32) + step, i]) for i in range(4)],
                            [T.address_of(matrices[column * 2 + i]) for i in range(2)],
                            [T.address_of(sums[half, column, i]) for i in range(4)],
                        )
            # This lane has head `lane // 4` and tokens `lane % 4 * 2` and the next of every eight.
            peak[0] = top[0]
            for column in T.unroll(KEYS // 8):
                for e in T.unroll(2):
                    logits[column, e] = (sums[0, column, e] + sums[1, column, e]) * (scale * T.float32(LOG2_E))
                    if firsts[tile[0]] + column * 8 + lane[0] % 4 * 2 + e > lasts[tile[0]]:
                        logits[column, e] = T.float32(MASKED)
                    peak[0] = T.max(peak[0], logits[column, e])
            peak[0] = T.cuda.warp_max(peak[0], 4)
            shrink[0] = T.exp2(top[0] - peak[0])
            top[0] = peak[0]
            weight[0] = weight[0] * shrink[0]
            for column in T.unroll(KEYS // 8):
                for e in T.unroll(2):
                    logits[column, e] = T.exp2(logits[column, e] - peak[0])
                    weight[0] = weight[0] + logits[column, e]
                powers[column] = T.cuda.float22bfloat162_rn(logits[column, 0], logits[column, 1])
            # In the second product it has heads `lane % 4 * 2` and the next.
            for e in T.unroll(2):
                shrinks[e] = T.cuda.__shfl_sync(T.uint32(0xFFFFFFFF), shrink[0], (lane[0] % 4 * 2 + e) * 4, 32)
            for column in T.unroll(size // 16):
                for e in T.unroll(4):
                    total[column, e] = total[column, e] * shrinks[e % 2]
                T.ptx.ldmatrix(
                    *(True, 4, ".b16"),
                    T.address_of(
                        shared[warp[0], row[0] + KEYS, column * 16 + lane[0] // 8 % 2 * 8],
                    ),
                    *[T.address_of(matrices[i]) for i in range(4)],
                )
                T.ptx.mma(
                    *("m16n8k16", "row", "col", "float32", "bfloat16", "bfloat16", "float32"),
                    [T.address_of(total[column, i]) for i in range(4)],
                    [T.address_of(matrices[i]) for i in range(4)],
                    [T.address_of(powers[i]) for i in range(2)],
                    [T.address_of(total[column, i]) for i in range(4)],
                )
            if tile[0] == tiles[0] - 1 or owners[T.min(tile[0] + 1, tiles[0] - 1)] != sequence[0]:
                weight[0] = T.cuda.warp_sum(weight[0], 4)
                for e in T.unroll(4):
                    if lane[0] % 4 * 2 + e % 2 < group:
                        for column in T.unroll(size // 16):
                            partials[
                                block + sequence[0],
                                warp[0] * group + lane[0] % 4 * 2 + e % 2,
                                column * 16 + lane[0] // 4 + e // 2 * 8,
                            ] = total[column, e]
                if lane[0] % 4 == 0 and lane[0] // 4 < group:
                    partials[block + sequence[0], warp[0] * group + lane[0] // 4, size] = top[0]
                    partials[block + sequence[0], warp[0] * group + lane[0] // 4, size + 1] = weight[0]


@T.jit
def join_cuda(
    po: T.handle,
    span: T.int32,
    pa: T.handle,
    o: T.handle,
    l: T.handle,
    *,
    heads: T.constexpr,
    size: T.constexpr,
):
    sequences = T.int32()
    parts = T.int32()
    offsets = T.match_buffer(po, (sequences + 1,), "int32")
    partials = T.match_buffer(pa, (parts, heads, size + EXTRA), "float32")
    out = T.match_buffer(o, (sequences, heads, size), "bfloat16")
    lse = T.match_buffer(l, (sequences, heads), "float32")
    T.device_entry()
    head, sequence = T.cta_id([heads, sequences])
    thread = T.thread_id([size])
    first = T.alloc_local((1,), "int32")
    count = T.alloc_local((1,), "int32")
    place = T.alloc_local((1,), "int32")
    peak = T.alloc_local((1,), "float32")
    shrink = T.alloc_local((1,), "float32")
    part = T.alloc_local((JOINED,), "float32")
    tops = T.alloc_local((JOINED,), "float32")
    weights = T.alloc_local((JOINED,), "float32")
    joined = T.alloc_local((2,), "float32")
    digits = T.alloc_local((1,), "int32")
    first[0] = offsets[sequence] // span
    count[0] = 0
    if offsets[sequence] < offsets[sequence + 1]:
        count[0] = (offsets[sequence + 1] - 1) // span + 1 - first[0]
    first[0] = first[0] + sequence
    peak[0] = T.float32(LOWEST)
    joined[0] = T.float32(0)
    joined[1] = T.float32(0)
    for turn in T.serial((count[0] + JOINED - 1) // JOINED):
        for u in T.unroll(JOINED):  # places past the last repeat it
            place[0] = first[0] + T.min(turn * JOINED + u, count[0] - 1)
            part[u] = partials[place[0], head, thread]
            tops[u] = partials[place[0], head, size]
            weights[u] = partials[place[0], head, size + 1]
        shrink[0] = peak[0]
        for u in T.unroll(JOINED):
            if turn * JOINED + u >= count[0]:
                tops[u] = T.float32(MASKED)
            peak[0] = T.max(peak[0], tops[u])
        shrink[0] = T.exp2(shrink[0] - peak[0])
        joined[0] = joined[0] * shrink[0]
        joined[1] = joined[1] * shrink[0]
        for u in T.unroll(JOINED):
            tops[u] = T.exp2(tops[u] - peak[0])
            joined[0] = joined[0] + part[u] * tops[u]
            joined[1] = joined[1] + weights[u] * tops[u]
    out[sequence, head, thread] = T.cast(joined[0] / T.max(joined[1], T.float32(1e-30)), "bfloat16")
    if thread == 0:
        if count[0] == 0:
            lse[sequence, head] = T.float32(-float("inf"))
        else:
            # The logarithm of a number near 1 and its power of two: the fast logarithm is accurate only there.
            digits[0] = (T.reinterpret("int32", joined[1]) - 0x3F400000) >> 23
            shrink[0] = T.log2(T.reinterpret("float32", T.reinterpret("int32", joined[1]) - (digits[0] << 23)))
            lse[sequence, head] = peak[0] + (T.cast(digits[0], "float32") + shrink[0])


@T.jit
def decode_cpu(
    qh: T.handle,
    kh: T.handle,
    vh: T.handle,
    po: T.handle,
    pi: T.handle,
    scale: T.float32,
    o: T.handle,
    l: T.handle,
    *,
    heads: T.constexpr,
    kv_heads: T.constexpr,
    size: T.constexpr,
):
    sequences = T.int32()
    pool = T.int32()
    listed = T.int32()
    q = T.match_buffer(qh, (sequences, heads, size), "bfloat16")
    k_cache = T.match_buffer(kh, (pool, 1, kv_heads, size), "bfloat16")
    v_cache = T.match_buffer(vh, (pool, 1, kv_heads, size), "bfloat16")
    offsets = T.match_buffer(po, (sequences + 1,), "int32")
    tokens = T.match_buffer(pi, (listed,), "int32")
    out = T.match_buffer(o, (sequences, heads, size), "bfloat16")
    lse = T.match_buffer(l, (sequences, heads), "float32")
    total = T.alloc_buffer((size,), "float32", scope="local")
    weight = T.alloc_buffer((1,), "float32", scope="local")
    highest = T.alloc_buffer((1,), "float32", scope="local")
    logit = T.alloc_buffer((1,), "float32", scope="local")
    shrink = T.alloc_buffer((1,), "float32", scope="local")
    token = T.alloc_buffer((1,), "int32", scope="local")
    for b, h in T.grid(sequences, heads):
        highest[0] = T.float32(LOWEST)
        weight[0] = T.float32(0)
        for c in T.serial(size):
            total[c] = T.float32(0)
        for t in T.serial(offsets[b + 1] - offsets[b]):
            token[0] = tokens[offsets[b] + t]
            logit[0] = T.float32(0)
            for c in T.serial(size):
                logit[0] = logit[0] + T.cast(q[b, h, c], "float32") * T.cast(
                    k_cache[token[0], 0, h // (heads // kv_heads), c], "float32"
                )
            logit[0] = logit[0] * scale
            shrink[0] = T.exp(highest[0] - T.max(highest[0], logit[0]))
            highest[0] = T.max(highest[0], logit[0])
            logit[0] = T.exp(logit[0] - highest[0])
            weight[0] = weight[0] * shrink[0] + logit[0]
            for c in T.serial(size):
                total[c] = total[c] * shrink[0] + logit[0] * T.cast(
                    v_cache[token[0], 0, h // (heads // kv_heads), c], "float32"
                )
        for c in T.serial(size):
            out[b, h, c] = T.cast(total[c] / weight[0], "bfloat16")
        lse[b, h] = (highest[0] + T.log(weight[0])) * T.float32(LOG2_E)


def compile_for(arch: str, heads: int = 32, kv_heads: int = 8, size: int = 128) -> tvm.runtime.Executable:
    """The kernels for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    if arch == "llvm":
        kernel = decode_cpu.specialize(heads=heads, kv_heads=kv_heads, size=size)
        return tvm.compile(tvm.IRModule({"main": kernel}), target="llvm")
    group = heads // kv_heads
    assert group <= 8 and size % 32 == 0 and 32 * VECTOR % size == 0
    kernels = {
        "span_cuda": span_cuda.specialize(heads=heads, kv_heads=kv_heads, group=group, size=size),
        "join_cuda": join_cuda.specialize(heads=heads, size=size),
    }
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return tvm.compile(tvm.IRModule(kernels), target=target, tir_pipeline="tirx")


@cache
def kernels_for(device: torch.device, heads: int, kv_heads: int, size: int):
    """The two kernels on CUDA and how many multiprocessors there are, or the kernel of the CPU."""
    if device.type == "cpu":
        return compile_for("llvm", heads, kv_heads, size)["main"], None, 0
    gpu = torch.cuda.get_device_properties(device)
    executable = compile_for(f"sm_{gpu.major}{gpu.minor}a", heads, kv_heads, size)
    return executable["span_cuda"], executable["join_cuda"], gpu.multi_processor_count


def solve(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    sequences, heads, size = q.shape
    attend, join, processors = kernels_for(q.device, heads, k_cache.shape[2], size)
    if join is None:
        output = torch.empty_like(q)
        lse = torch.empty(sequences, heads, dtype=torch.float32)
        attend(q, k_cache, v_cache, kv_indptr, kv_indices, sm_scale, output, lse)
        return output, lse
    listed = kv_indices.shape[0]
    span = min(max(-(-listed // (processors * KEYS)), 1) * KEYS, LONGEST)
    blocks = max(-(-listed // span), 1)
    partials = torch.empty(blocks + sequences, heads, size + EXTRA, dtype=torch.float32, device=q.device)
    attend(q, k_cache, v_cache, kv_indptr, kv_indices, sm_scale, span, blocks, partials)
    # Made while the first kernel runs.
    output = torch.empty_like(q)
    lse = torch.empty(sequences, heads, dtype=torch.float32, device=q.device)
    join(kv_indptr, span, partials, output, lse)
    return output, lse
