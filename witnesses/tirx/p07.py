"""p07, causal grouped-query prefill with one KV head over long contexts, in TIRx.

CUDA: two kernels, as in split-context flash attention. A thread block has 128 rows, a row being a query and one of its
heads, and a sixth of the keys that they see, since one sequence holds most of the work. It goes through them 64 at a
time: the products run on the tensor cores (m16n8k16, sums in float32), the softmax runs along in float32, and the next
keys and values are copied to shared memory meanwhile. Where in the cache they are is looked up two steps ahead. Which
sequence a block belongs to is found on the device: a sequence's blocks begin at a number that follows from its offset
alone. The second kernel joins the parts of a row. CPU: plain loops, a query head at a time.
"""

import math
from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

WARPS = 4
THREADS = 32 * WARPS
BANDS = 2  # bands of 16 rows that a warp has
ROWS = 16 * WARPS * BANDS
KEYS = 64
PARTS = 6  # of the keys that a block of rows sees
VECTOR = 8  # bfloat16 values in 16 bytes
PADDING = 8  # so much longer are rows in shared memory: eight of them, 16 bytes each, meet all its banks
LOWEST = -1.0e30
MASKED = -3.0e38  # so far below `LOWEST` that its power of two is zero


@T.jit
def part_cuda(
    qh: T.handle,
    kh: T.handle,
    vh: T.handle,
    qo: T.handle,
    po: T.handle,
    pi: T.handle,
    ll: T.handle,
    scale: T.float32,
    to: T.handle,
    hi: T.handle,
    we: T.handle,
    *,
    heads: T.constexpr,
    kv_heads: T.constexpr,
    group: T.constexpr,
    size: T.constexpr,
    page: T.constexpr,
    chunks: T.constexpr,
):
    """`group` query heads of a KV head, `chunks` of 16 bytes in a row; `scale` takes a product to a power of two."""
    all_queries = T.int32()
    pool = T.int32()
    listed = T.int32()
    sequences = T.int32()
    offsets = T.int32()
    q = T.match_buffer(qh, (all_queries, heads, size), "bfloat16")
    k_cache = T.match_buffer(kh, (pool, page, kv_heads, size), "bfloat16")
    v_cache = T.match_buffer(vh, (pool, page, kv_heads, size), "bfloat16")
    query_offsets = T.match_buffer(qo, (offsets,), "int32")
    page_offsets = T.match_buffer(po, (offsets,), "int32")
    pages = T.match_buffer(pi, (listed,), "int32")
    last_lengths = T.match_buffer(ll, (sequences,), "int32")
    totals = T.match_buffer(to, (PARTS * all_queries * heads, size), "float32")
    highest = T.match_buffer(hi, (PARTS * all_queries * heads,), "float32")
    weights = T.match_buffer(we, (PARTS * all_queries * heads,), "float32")
    T.device_entry()
    part_of_keys, block_from_last, kv_head = T.cta_id([PARTS, all_queries * group // ROWS + offsets - 1, kv_heads])
    thread = T.thread_id([THREADS])
    # The rows of the queries, then twice the keys, then twice the values.
    shared = T.alloc_buffer((ROWS + 4 * KEYS, size + PADDING), "bfloat16", scope="shared.dyn")
    places = T.alloc_shared((2, KEYS), "int32")  # rows of the cache
    found = T.alloc_shared((1,), "int32")
    block = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    warp = T.alloc_local((1,), "int32")
    first_query = T.alloc_local((1,), "int32")
    first_page = T.alloc_local((1,), "int32")
    later_place = T.alloc_local((1,), "int32")
    keys = T.alloc_local((1,), "int32")
    prefix = T.alloc_local((1,), "int32")
    rows = T.alloc_local((1,), "int32")
    first_row = T.alloc_local((1,), "int32")
    row = T.alloc_local((1,), "int32")
    tiles = T.alloc_local((1,), "int32")
    begin = T.alloc_local((1,), "int32")
    end = T.alloc_local((1,), "int32")
    stage = T.alloc_local((1,), "int32")
    last_seen = T.alloc_local((BANDS, 2), "int32")  # the last key that a row sees
    # Four values an atom: two neighbouring columns of a row, then the same of the row eight further down.
    logits = T.alloc_local((BANDS, KEYS // 8, 4), "float32")
    total = T.alloc_local((BANDS, size // 8, 4), "float32")
    left = T.alloc_local((BANDS, 4), "uint32")
    right = T.alloc_local((4,), "uint32")
    top = T.alloc_local((BANDS, 2), "float32")
    weight = T.alloc_local((BANDS, 2), "float32")
    peak = T.alloc_local((1,), "float32")
    pair = T.alloc_local((2,), "float32")
    place = T.alloc_local((1,), "int32")  # row of the parts
    shrink = T.alloc_local((1,), "float32")
    block[0] = all_queries * group // ROWS + offsets - 2 - block_from_last  # those that see more keys begin first
    lane[0] = thread % 32
    warp[0] = thread // 32
    for turn in T.serial((offsets + THREADS - 2) // THREADS):
        if turn * THREADS + thread < offsets - 1:
            first_query[0] = query_offsets[turn * THREADS + thread] * group // ROWS + turn * THREADS + thread
            row[0] = query_offsets[turn * THREADS + thread + 1] * group // ROWS + turn * THREADS + thread + 1
            if first_query[0] <= block[0] and block[0] < row[0]:
                found[0] = turn * THREADS + thread
    T.cuda.cta_sync()
    first_query[0] = query_offsets[found[0]]
    first_page[0] = page_offsets[found[0]]
    rows[0] = (query_offsets[found[0] + 1] - first_query[0]) * group
    keys[0] = (page_offsets[found[0] + 1] - first_page[0] - 1) * page + last_lengths[found[0]]
    prefix[0] = keys[0] - (query_offsets[found[0] + 1] - first_query[0])
    first_row[0] = (block[0] - (first_query[0] * group // ROWS + found[0])) * ROWS
    if first_row[0] < rows[0]:
        row[0] = T.min(first_row[0] + ROWS, rows[0]) - 1
        tiles[0] = (row[0] // group + prefix[0] + KEYS) // KEYS
        begin[0] = part_of_keys * ((tiles[0] + PARTS - 1) // PARTS)
        end[0] = T.min(begin[0] + (tiles[0] + PARTS - 1) // PARTS, tiles[0])
        for step in T.unroll(ROWS * chunks // THREADS):
            row[0] = T.min(first_row[0] + (step * THREADS + thread) // chunks, rows[0] - 1)
            T.ptx.cp_async(
                T.address_of(shared[(step * THREADS + thread) // chunks, (step * THREADS + thread) % chunks * VECTOR]),
                T.address_of(
                    q[
                        first_query[0] + row[0] // group,
                        kv_head * group + row[0] % group,
                        (step * THREADS + thread) % chunks * VECTOR,
                    ]
                ),
                16,
            )
        # Past the last key comes that one again.
        if thread < KEYS:
            for tile in T.unroll(2):
                row[0] = T.min((begin[0] + tile) * KEYS + thread, keys[0] - 1)
                places[tile, thread] = pages[first_page[0] + row[0] // page] * page + row[0] % page
        T.cuda.cta_sync()
        for step in T.unroll(KEYS * chunks // THREADS):
            row[0] = places[0, (step * THREADS + thread) // chunks]
            T.ptx.cp_async(
                T.address_of(
                    shared[ROWS + (step * THREADS + thread) // chunks, (step * THREADS + thread) % chunks * VECTOR]
                ),
                T.address_of(
                    k_cache[row[0] // page, row[0] % page, kv_head, (step * THREADS + thread) % chunks * VECTOR]
                ),
                16,
            )
            T.ptx.cp_async(
                T.address_of(
                    shared[
                        ROWS + 2 * KEYS + (step * THREADS + thread) // chunks,
                        (step * THREADS + thread) % chunks * VECTOR,
                    ]
                ),
                T.address_of(
                    v_cache[row[0] // page, row[0] % page, kv_head, (step * THREADS + thread) % chunks * VECTOR]
                ),
                16,
            )
        T.ptx.cp_async.commit_group()
        for band in T.unroll(BANDS):
            for half in T.unroll(2):
                top[band, half] = T.float32(LOWEST)
                weight[band, half] = T.float32(0)
                row[0] = first_row[0] + band * (16 * WARPS) + warp[0] * 16 + lane[0] // 4 + 8 * half
                last_seen[band, half] = row[0] // group + prefix[0]
            for column in T.unroll(size // 8):
                for e in T.unroll(4):
                    total[band, column, e] = T.float32(0)
        for tile in T.serial(T.max(end[0] - begin[0], 0)):
            stage[0] = tile % 2
            T.ptx.cp_async.wait_group(0)
            T.cuda.cta_sync()
            if tile + 1 < end[0] - begin[0]:
                for step in T.unroll(KEYS * chunks // THREADS):
                    row[0] = places[1 - stage[0], (step * THREADS + thread) // chunks]
                    T.ptx.cp_async(
                        T.address_of(
                            shared[
                                ROWS + (1 - stage[0]) * KEYS + (step * THREADS + thread) // chunks,
                                (step * THREADS + thread) % chunks * VECTOR,
                            ]
                        ),
                        T.address_of(
                            k_cache[row[0] // page, row[0] % page, kv_head, (step * THREADS + thread) % chunks * VECTOR]
                        ),
                        16,
                    )
                    T.ptx.cp_async(
                        T.address_of(
                            shared[
                                ROWS + (3 - stage[0]) * KEYS + (step * THREADS + thread) // chunks,
                                (step * THREADS + thread) % chunks * VECTOR,
                            ]
                        ),
                        T.address_of(
                            v_cache[row[0] // page, row[0] % page, kv_head, (step * THREADS + thread) % chunks * VECTOR]
                        ),
                        16,
                    )
            T.ptx.cp_async.commit_group()
            if thread < KEYS:  # on its way while this tile is worked on
                row[0] = T.min((begin[0] + tile + 2) * KEYS + thread, keys[0] - 1)
                later_place[0] = pages[first_page[0] + row[0] // page] * page + row[0] % page

            for band in T.unroll(BANDS):
                for column in T.unroll(KEYS // 8):
                    for e in T.unroll(4):
                        logits[band, column, e] = T.float32(0)
            for step in T.unroll(size // 16):
                for band in T.unroll(BANDS):
                    T.ptx.ldmatrix(
                        False,
                        4,
                        ".b16",
                        T.address_of(
                            shared[band * (16 * WARPS) + warp[0] * 16 + lane[0] % 16, step * 16 + lane[0] // 16 * 8]
                        ),
                        *[T.address_of(left[band, i]) for i in range(4)],
                    )
                for pair in T.unroll(KEYS // 16):
                    T.ptx.ldmatrix(
                        False,
                        4,
                        ".b16",
                        T.address_of(
                            shared[
                                ROWS + stage[0] * KEYS + pair * 16 + lane[0] // 16 * 8 + lane[0] % 8,
                                step * 16 + lane[0] // 8 % 2 * 8,
                            ]
                        ),
                        *[T.address_of(right[i]) for i in range(4)],
                    )
                    for band in T.unroll(BANDS):
                        for side in T.unroll(2):
                            T.ptx.mma(
                                *("m16n8k16", "row", "col", "float32", "bfloat16", "bfloat16", "float32"),
                                [T.address_of(logits[band, pair * 2 + side, i]) for i in range(4)],
                                [T.address_of(left[band, i]) for i in range(4)],
                                [T.address_of(right[side * 2 + i]) for i in range(2)],
                                [T.address_of(logits[band, pair * 2 + side, i]) for i in range(4)],
                            )

            if (begin[0] + tile + 1) * KEYS > first_row[0] // group + prefix[0] + 1:
                for band in T.unroll(BANDS):
                    for column in T.unroll(KEYS // 8):
                        for e in T.unroll(4):
                            if (begin[0] + tile) * KEYS + column * 8 + lane[0] % 4 * 2 + e % 2 > last_seen[
                                band, e // 2
                            ]:
                                logits[band, column, e] = T.float32(MASKED)

            for band in T.unroll(BANDS):
                for half in T.unroll(2):
                    peak[0] = top[band, half]
                    for column in T.unroll(KEYS // 8):
                        peak[0] = T.max(peak[0], logits[band, column, 2 * half])
                        peak[0] = T.max(peak[0], logits[band, column, 2 * half + 1])
                    peak[0] = T.cuda.warp_max(peak[0], 4)
                    shrink[0] = T.exp2((top[band, half] - peak[0]) * scale)
                    top[band, half] = peak[0]
                    peak[0] = peak[0] * scale
                    weight[band, half] = weight[band, half] * shrink[0]
                    for column in T.unroll(KEYS // 8):
                        for side in T.unroll(2):
                            logits[band, column, 2 * half + side] = T.exp2(
                                logits[band, column, 2 * half + side] * scale - peak[0]
                            )
                            weight[band, half] = weight[band, half] + logits[band, column, 2 * half + side]
                    for column in T.unroll(size // 8):
                        for side in T.unroll(2):
                            total[band, column, 2 * half + side] = total[band, column, 2 * half + side] * shrink[0]

            # The first product's sums are, rounded, the second's left operand: two atoms of 8 keys make one of 16.
            for step in T.unroll(KEYS // 16):
                for band in T.unroll(BANDS):
                    for i in T.unroll(4):
                        left[band, i] = T.cuda.float22bfloat162_rn(
                            logits[band, step * 2 + i // 2, i % 2 * 2], logits[band, step * 2 + i // 2, i % 2 * 2 + 1]
                        )
                for pair in T.unroll(size // 16):
                    T.ptx.ldmatrix(
                        True,
                        4,
                        ".b16",
                        T.address_of(
                            shared[
                                ROWS + (2 + stage[0]) * KEYS + step * 16 + lane[0] % 16, pair * 16 + lane[0] // 16 * 8
                            ]
                        ),
                        *[T.address_of(right[i]) for i in range(4)],
                    )
                    for band in T.unroll(BANDS):
                        for side in T.unroll(2):
                            T.ptx.mma(
                                *("m16n8k16", "row", "col", "float32", "bfloat16", "bfloat16", "float32"),
                                [T.address_of(total[band, pair * 2 + side, i]) for i in range(4)],
                                [T.address_of(left[band, i]) for i in range(4)],
                                [T.address_of(right[side * 2 + i]) for i in range(2)],
                                [T.address_of(total[band, pair * 2 + side, i]) for i in range(4)],
                            )
            if thread < KEYS:
                places[stage[0], thread] = later_place[0]

        T.ptx.cp_async.wait_group(0)
        for band in T.unroll(BANDS):
            for half in T.unroll(2):
                row[0] = first_row[0] + band * (16 * WARPS) + warp[0] * 16 + lane[0] // 4 + 8 * half
                weight[band, half] = T.cuda.warp_sum(weight[band, half], 4)
                if row[0] < rows[0]:
                    place[0] = (
                        (part_of_keys * all_queries + first_query[0] + row[0] // group) * heads
                        + kv_head * group
                        + row[0] % group
                    )
                    if begin[0] < end[0]:
                        for column in T.unroll(size // 8):
                            for side in T.unroll(2):
                                pair[side] = total[band, column, 2 * half + side]
                            for side in T.vectorized(2):
                                totals[place[0], column * 8 + lane[0] % 4 * 2 + side] = pair[side]
                    if lane[0] % 4 == 0:
                        highest[place[0]] = top[band, half]
                        weights[place[0]] = weight[band, half]


@T.jit
def join_cuda(
    to: T.handle,
    hi: T.handle,
    we: T.handle,
    scale: T.float32,
    o: T.handle,
    l: T.handle,
    *,
    heads: T.constexpr,
    size: T.constexpr,
    lanes: T.constexpr,
):
    all_queries = T.int32()
    totals = T.match_buffer(to, (PARTS * all_queries * heads, size), "float32")
    highest = T.match_buffer(hi, (PARTS * all_queries * heads,), "float32")
    weights = T.match_buffer(we, (PARTS * all_queries * heads,), "float32")
    out = T.match_buffer(o, (all_queries, heads, size), "bfloat16")
    lse = T.match_buffer(l, (all_queries, heads), "float32")
    T.device_entry()
    block = T.cta_id([(all_queries * heads + THREADS // lanes - 1) // (THREADS // lanes)])
    thread = T.thread_id([THREADS])
    row = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    place = T.alloc_local((1,), "int32")
    peak = T.alloc_local((1,), "float32")
    weight = T.alloc_local((1,), "float32")
    shrink = T.alloc_local((1,), "float32")
    of_part = T.alloc_local((4,), "float32")
    total = T.alloc_local((4,), "float32")
    rounded = T.alloc_local((4,), "bfloat16")
    digits = T.alloc_local((1,), "int32")
    row[0] = block * (THREADS // lanes) + thread // lanes
    lane[0] = thread % lanes
    if row[0] < all_queries * heads:
        peak[0] = T.float32(LOWEST)
        weight[0] = T.float32(0)
        for e in T.unroll(4):
            total[e] = T.float32(0)
        for part in T.unroll(PARTS):
            peak[0] = T.max(peak[0], highest[part * (all_queries * heads) + row[0]])
        for part in T.unroll(PARTS):
            if weights[part * (all_queries * heads) + row[0]] > T.float32(0):  # an empty part has no totals
                shrink[0] = T.exp2((highest[part * (all_queries * heads) + row[0]] - peak[0]) * scale)
                weight[0] = weight[0] + weights[part * (all_queries * heads) + row[0]] * shrink[0]
                place[0] = part * (all_queries * heads) + row[0]
                for e in T.vectorized(4):
                    of_part[e] = totals[place[0], lane[0] * 4 + e]
                for e in T.unroll(4):
                    total[e] = total[e] + of_part[e] * shrink[0]
        for e in T.unroll(4):
            rounded[e] = T.cast(total[e] / weight[0], "bfloat16")
        for e in T.vectorized(4):
            out[row[0] // heads, row[0] % heads, lane[0] * 4 + e] = rounded[e]
        if lane[0] == 0:
            # The logarithm of a number near 1 and its power of two: the fast logarithm is accurate only there.
            digits[0] = (T.reinterpret("int32", weight[0]) - 0x3F400000) >> 23
            shrink[0] = T.log2(T.reinterpret("float32", T.reinterpret("int32", weight[0]) - (digits[0] << 23)))
            lse[row[0] // heads, row[0] % heads] = peak[0] * scale + (T.cast(digits[0], "float32") + shrink[0])


@T.jit
def prefill_cpu(
    qh: T.handle,
    kh: T.handle,
    vh: T.handle,
    qo: T.handle,
    po: T.handle,
    pi: T.handle,
    ll: T.handle,
    scale: T.float32,
    o: T.handle,
    l: T.handle,
    *,
    heads: T.constexpr,
    kv_heads: T.constexpr,
    group: T.constexpr,
    size: T.constexpr,
    page: T.constexpr,
):
    all_queries = T.int32()
    pool = T.int32()
    listed = T.int32()
    sequences = T.int32()
    offsets = T.int32()
    q = T.match_buffer(qh, (all_queries, heads, size), "bfloat16")
    k_cache = T.match_buffer(kh, (pool, page, kv_heads, size), "bfloat16")
    v_cache = T.match_buffer(vh, (pool, page, kv_heads, size), "bfloat16")
    query_offsets = T.match_buffer(qo, (offsets,), "int32")
    page_offsets = T.match_buffer(po, (offsets,), "int32")
    pages = T.match_buffer(pi, (listed,), "int32")
    last_lengths = T.match_buffer(ll, (sequences,), "int32")
    out = T.match_buffer(o, (all_queries, heads, size), "bfloat16")
    lse = T.match_buffer(l, (all_queries, heads), "float32")
    total = T.alloc_buffer((size,), "float32", scope="local")
    weight = T.alloc_buffer((1,), "float32", scope="local")
    top = T.alloc_buffer((1,), "float32", scope="local")
    logit = T.alloc_buffer((1,), "float32", scope="local")
    shrink = T.alloc_buffer((1,), "float32", scope="local")
    queries = T.alloc_buffer((1,), "int32", scope="local")
    keys = T.alloc_buffer((1,), "int32", scope="local")
    block = T.alloc_buffer((1,), "int32", scope="local")
    for b in T.serial(offsets - 1):
        queries[0] = query_offsets[b + 1] - query_offsets[b]
        keys[0] = (page_offsets[b + 1] - page_offsets[b] - 1) * page + last_lengths[b]
        for i, h in T.grid(queries[0], heads):
            top[0] = T.float32(LOWEST)
            weight[0] = T.float32(0)
            for c in T.serial(size):
                total[c] = T.float32(0)
            for t in T.serial(i + keys[0] - queries[0] + 1):
                block[0] = pages[page_offsets[b] + t // page]
                logit[0] = T.float32(0)
                for c in T.serial(size):
                    logit[0] = logit[0] + T.cast(q[query_offsets[b] + i, h, c], "float32") * T.cast(
                        k_cache[block[0], t % page, h // group, c], "float32"
                    )
                logit[0] = logit[0] * scale
                shrink[0] = T.exp2(top[0] - T.max(top[0], logit[0]))
                top[0] = T.max(top[0], logit[0])
                logit[0] = T.exp2(logit[0] - top[0])
                weight[0] = weight[0] * shrink[0] + logit[0]
                for c in T.serial(size):
                    total[c] = total[c] * shrink[0] + logit[0] * T.cast(
                        v_cache[block[0], t % page, h // group, c], "float32"
                    )
            for c in T.serial(size):
                out[query_offsets[b] + i, h, c] = T.cast(total[c] / weight[0], "bfloat16")
            lse[query_offsets[b] + i, h] = top[0] + T.log2(weight[0])


def compile_for(
    arch: str, heads: int = 16, kv_heads: int = 1, size: int = 128, page: int = 64
) -> tvm.runtime.Executable:
    """The kernels for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    sizes = {"heads": heads, "kv_heads": kv_heads, "group": heads // kv_heads, "size": size, "page": page}
    if arch == "llvm":
        return tvm.compile(tvm.IRModule({"main": prefill_cpu.specialize(**sizes)}), target="llvm")
    assert size % 16 == 0 and KEYS * size // VECTOR % THREADS == 0
    kernels = {
        "part_cuda": part_cuda.specialize(**sizes, chunks=size // VECTOR),
        "join_cuda": join_cuda.specialize(heads=heads, size=size, lanes=size // 4),
    }
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return tvm.compile(tvm.IRModule(kernels), target=target, tir_pipeline="tirx")


@cache
def kernels_for(device: torch.device, heads: int, kv_heads: int, size: int, page: int):
    """The two kernels on CUDA, the one of the CPU there."""
    if device.type == "cpu":
        return (compile_for("llvm", heads, kv_heads, size, page)["main"],)
    major, minor = torch.cuda.get_device_capability(device)
    executable = compile_for(f"sm_{major}{minor}a", heads, kv_heads, size, page)
    return executable["part_cuda"], executable["join_cuda"]


def solve(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    queries, heads, size = q.shape
    output = torch.empty_like(q)
    lse = torch.empty(queries, heads, dtype=torch.float32, device=q.device)
    kernels = kernels_for(q.device, heads, k_cache.shape[2], size, k_cache.shape[1])
    inputs = (q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, sm_scale / math.log(2))
    if not q.is_cuda:
        kernels[0](*inputs, output, lse)
        return output, lse
    totals = torch.empty(PARTS * queries * heads, size, dtype=torch.float32, device=q.device)
    highest = torch.empty(PARTS * queries * heads, dtype=torch.float32, device=q.device)
    weights = torch.empty_like(highest)
    kernels[0](*inputs, totals, highest, weights)
    kernels[1](totals, highest, weights, sm_scale / math.log(2), output, lse)
    return output, lse
