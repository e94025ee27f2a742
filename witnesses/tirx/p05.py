"""p05, causal grouped-query prefill behind short prefixes, single-token pages, in TIRx.

CUDA: one flash attention kernel. A thread block has 64 rows, so that many blocks share the longest sequence, which
holds most of the work. A row is a query and one of the query heads that share a KV head. The block goes through the
keys that its rows see, 64 at a time: the products run on the tensor cores (m16n8k16, sums in float32), the softmax runs
along in float32, and the next keys and values are copied to shared memory meanwhile. Where in the cache they are is
looked up two steps ahead. Which sequence a block belongs to is found on the device: a sequence's blocks begin at a
number that follows from its offset alone. CPU: plain loops, a query head at a time.
"""

import math
from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

WARPS = 4
THREADS = 32 * WARPS
BANDS = 1  # bands of 16 rows that a warp has
ROWS = 16 * WARPS * BANDS
KEYS = 64
VECTOR = 8  # bfloat16 values in 16 bytes
PADDING = 8  # so much longer are rows in shared memory: eight of them, 16 bytes each, meet all its banks
LOWEST = -1.0e30
MASKED = -3.0e38  # so far below `LOWEST` that its power of two is zero


@T.jit
def prefill_cuda(
    qh: T.handle,
    kh: T.handle,
    vh: T.handle,
    qo: T.handle,
    po: T.handle,
    pi: T.handle,
    scale: T.float32,
    o: T.handle,
    l: T.handle,
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
    offsets = T.int32()
    q = T.match_buffer(qh, (all_queries, heads, size), "bfloat16")
    k_cache = T.match_buffer(kh, (pool, page, kv_heads, size), "bfloat16")
    v_cache = T.match_buffer(vh, (pool, page, kv_heads, size), "bfloat16")
    query_offsets = T.match_buffer(qo, (offsets,), "int32")
    page_offsets = T.match_buffer(po, (offsets,), "int32")
    pages = T.match_buffer(pi, (listed,), "int32")
    out = T.match_buffer(o, (all_queries, heads, size), "bfloat16")
    lse = T.match_buffer(l, (all_queries, heads), "float32")
    T.device_entry()
    block_from_last, kv_head = T.cta_id([all_queries * group // ROWS + offsets - 1, kv_heads])
    thread = T.thread_id([THREADS])
    # The rows of the queries (later of the output), then twice the keys, then twice the values.
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
    shrink = T.alloc_local((1,), "float32")
    part = T.alloc_local((VECTOR,), "bfloat16")
    digits = T.alloc_local((1,), "int32")
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
    keys[0] = page_offsets[found[0] + 1] - first_page[0]
    prefix[0] = keys[0] - (query_offsets[found[0] + 1] - first_query[0])
    first_row[0] = (block[0] - (first_query[0] * group // ROWS + found[0])) * ROWS
    if first_row[0] < rows[0]:
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
                row[0] = T.min(tile * KEYS + thread, keys[0] - 1)
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
        row[0] = T.min(first_row[0] + ROWS, rows[0]) - 1
        tiles[0] = (row[0] // group + prefix[0] + KEYS) // KEYS
        for tile in T.serial(tiles[0]):
            stage[0] = tile % 2
            T.ptx.cp_async.wait_group(0)
            T.cuda.cta_sync()
            if tile + 1 < tiles[0]:
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
                row[0] = T.min((tile + 2) * KEYS + thread, keys[0] - 1)
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

            if (tile + 1) * KEYS > first_row[0] // group + prefix[0] + 1:
                for band in T.unroll(BANDS):
                    for column in T.unroll(KEYS // 8):
                        for e in T.unroll(4):
                            if tile * KEYS + column * 8 + lane[0] % 4 * 2 + e % 2 > last_seen[band, e // 2]:
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

        # A warp's rows of the queries are its own, and are not needed any more: the output takes their place.
        for band in T.unroll(BANDS):
            for half in T.unroll(2):
                row[0] = first_row[0] + band * (16 * WARPS) + warp[0] * 16 + lane[0] // 4 + 8 * half
                weight[band, half] = T.cuda.warp_sum(weight[band, half], 4)
                shrink[0] = T.float32(1) / weight[band, half]
                for column in T.unroll(size // 8):
                    for side in T.unroll(2):
                        shared[
                            band * (16 * WARPS) + warp[0] * 16 + lane[0] // 4 + 8 * half,
                            column * 8 + lane[0] % 4 * 2 + side,
                        ] = T.cast(total[band, column, 2 * half + side] * shrink[0], "bfloat16")
                if lane[0] % 4 == 0 and row[0] < rows[0]:
                    # The logarithm of a number near 1 and its power of two: the fast logarithm is accurate only there.
                    digits[0] = (T.reinterpret("int32", weight[band, half]) - 0x3F400000) >> 23
                    shrink[0] = T.log2(
                        T.reinterpret("float32", T.reinterpret("int32", weight[band, half]) - (digits[0] << 23))
                    )
                    lse[first_query[0] + row[0] // group, kv_head * group + row[0] % group] = top[
                        band, half
                    ] * scale + (T.cast(digits[0], "float32") + shrink[0])
        T.cuda.cta_sync()
        for step in T.unroll(ROWS * chunks // THREADS):
            row[0] = first_row[0] + (step * THREADS + thread) // chunks
            if row[0] < rows[0]:
                for e in T.vectorized(VECTOR):
                    part[e] = shared[
                        (step * THREADS + thread) // chunks, (step * THREADS + thread) % chunks * VECTOR + e
                    ]
                for e in T.vectorized(VECTOR):
                    out[
                        first_query[0] + row[0] // group,
                        kv_head * group + row[0] % group,
                        (step * THREADS + thread) % chunks * VECTOR + e,
                    ] = part[e]


@T.jit
def prefill_cpu(
    qh: T.handle,
    kh: T.handle,
    vh: T.handle,
    qo: T.handle,
    po: T.handle,
    pi: T.handle,
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
    offsets = T.int32()
    q = T.match_buffer(qh, (all_queries, heads, size), "bfloat16")
    k_cache = T.match_buffer(kh, (pool, page, kv_heads, size), "bfloat16")
    v_cache = T.match_buffer(vh, (pool, page, kv_heads, size), "bfloat16")
    query_offsets = T.match_buffer(qo, (offsets,), "int32")
    page_offsets = T.match_buffer(po, (offsets,), "int32")
    pages = T.match_buffer(pi, (listed,), "int32")
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
        keys[0] = page_offsets[b + 1] - page_offsets[b]
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


def compile_for(arch: str, heads: int = 5, kv_heads: int = 1, size: int = 128, page: int = 1) -> tvm.runtime.Executable:
    """The kernel for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    sizes = {"heads": heads, "kv_heads": kv_heads, "group": heads // kv_heads, "size": size, "page": page}
    if arch == "llvm":
        return tvm.compile(tvm.IRModule({"main": prefill_cpu.specialize(**sizes)}), target="llvm")
    assert size % 16 == 0 and KEYS * size // VECTOR % THREADS == 0
    kernel = prefill_cuda.specialize(**sizes, chunks=size // VECTOR)
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx")


@cache
def kernel_for(device: torch.device, heads: int, kv_heads: int, size: int, page: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return compile_for(arch, heads, kv_heads, size, page)["main"]


def solve(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    queries, heads, size = q.shape
    output = torch.empty_like(q)
    lse = torch.empty(queries, heads, dtype=torch.float32, device=q.device)
    kernel = kernel_for(q.device, heads, k_cache.shape[2], size, k_cache.shape[1])
    kernel(
        *(q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices),
        *(sm_scale / math.log(2), output, lse),
    )
    return output, lse
