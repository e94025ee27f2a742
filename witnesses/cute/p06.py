"""p06, causal grouped-query prefill over long contexts in pages of 64 tokens, in CuTe DSL: a flash attention kernel.

A thread block has 128 rows. A row is a query and one of the query heads that share a KV head. The block goes through
the keys that its rows see, 64 at a time: the products run on the tensor cores (m16n8k16, sums in float32), the softmax
runs along in float32, and the next keys and values are copied to shared memory meanwhile. Where in the cache they are
is looked up two steps ahead. Which sequence a block belongs to is found on the device: a sequence's blocks begin at a
number that follows from its offset alone.
"""

import math
from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.nvgpu import LoadCacheMode, cpasync, warp
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

WARPS = 4
THREADS = 32 * WARPS
BANDS = 2  # bands of 16 rows that a warp has
ROWS = 16 * WARPS * BANDS
KEYS = 64
VECTOR = 8  # bfloat16 values in 16 bytes
PADDING = 8  # so much longer are rows in shared memory: eight of them, 16 bytes each, meet all its banks
LOWEST = -1.0e30
MASKED = -3.0e38  # so far below `LOWEST` that its power of two is zero


@cute.jit
def copy_keys(
    source: cute.Tensor,
    kv_head: cutlass.Int32,
    places: cute.Tensor,
    thread: cutlass.Int32,
    target: cute.Tensor,
):
    """Starts copying the keys (or values) of a tile, whose rows of the cache are `places`."""
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(LoadCacheMode.GLOBAL), cutlass.BFloat16, num_bits_per_copy=128)
    chunks = cutlass.const_expr(source.shape[2] // VECTOR)
    for step in cutlass.range_constexpr(KEYS * chunks // THREADS):
        place = step * THREADS + thread
        cute.copy(
            atom,
            cute.local_tile(source[places[place // chunks], kv_head, None], (VECTOR,), (place % chunks,)),
            cute.local_tile(target[place // chunks, None], (VECTOR,), (place % chunks,)),
        )


@cute.jit
def place_of(
    pages: cute.Tensor, page: cutlass.Constexpr[int], first_page: cutlass.Int32, key: cutlass.Int32, keys: cutlass.Int32
) -> cutlass.Int32:
    """The row of the cache where a sequence's key is; past the last of `keys` it is that one's."""
    key = cutlass.min(key, keys - 1)
    return pages[first_page + key // page] * page + key % page


@cute.jit
def attend(
    q: cute.Tensor,
    k_cache: cute.Tensor,
    v_cache: cute.Tensor,
    pages: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    shared_q: cute.Tensor,
    shared_k: cute.Tensor,
    shared_v: cute.Tensor,
    places: cute.Tensor,
    kv_head: cutlass.Int32,
    first_query: cutlass.Int32,
    queries: cutlass.Int32,
    first_page: cutlass.Int32,
    keys: cutlass.Int32,
    first_row: cutlass.Int32,
    scale: cutlass.Float32,
):
    """One block of rows, from `first_row` of the sequence on; `scale` takes a product to a power of two."""
    thread, _, _ = cute.arch.thread_idx()
    lane, warp_number = thread % 32, thread // 32
    size = cutlass.const_expr(q.shape[2])
    page, kv_heads = cutlass.const_expr(k_cache.shape[1]), cutlass.const_expr(k_cache.shape[2])
    group = cutlass.const_expr(q.shape[1] // kv_heads)
    chunks = cutlass.const_expr(size // VECTOR)
    cache_rows = cute.make_layout((k_cache.shape[0] * page, kv_heads, size), stride=(kv_heads * size, size, 1))
    k, v = cute.make_tensor(k_cache.iterator, cache_rows), cute.make_tensor(v_cache.iterator, cache_rows)
    rows = queries * group
    prefix = keys - queries
    async_copy = cute.make_copy_atom(cpasync.CopyG2SOp(LoadCacheMode.GLOBAL), cutlass.BFloat16, num_bits_per_copy=128)

    if thread < KEYS:
        places[thread, 0] = place_of(pages, page, first_page, thread, keys)
        places[thread, 1] = place_of(pages, page, first_page, KEYS + thread, keys)
    for step in cutlass.range_constexpr(ROWS * chunks // THREADS):
        place = step * THREADS + thread
        row = cutlass.min(first_row + place // chunks, rows - 1)
        source = q[first_query + row // group, kv_head * group + row % group, None]
        cute.copy(
            async_copy,
            cute.local_tile(source, (VECTOR,), (place % chunks,)),
            cute.local_tile(shared_q[place // chunks, None], (VECTOR,), (place % chunks,)),
        )
    cute.arch.sync_threads()
    copy_keys(k, kv_head, places[None, 0], thread, shared_k[None, None, 0])
    copy_keys(v, kv_head, places[None, 0], thread, shared_v[None, None, 0])
    cute.arch.cp_async_commit_group()

    operation = warp.MmaF16BF16Op(cutlass.BFloat16, cutlass.Float32, (16, 8, 16))
    mma = cute.make_tiled_mma(operation, (WARPS, 1, 1), permutation_mnk=(16 * WARPS, 16, 16))
    part = mma.get_slice(thread)
    load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), cutlass.BFloat16)
    load_transposed = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=True, num_matrices=4), cutlass.BFloat16)
    copy_q = cute.make_tiled_copy_A(load, mma)
    copy_k = cute.make_tiled_copy_B(load, mma)
    copy_v = cute.make_tiled_copy_B(load_transposed, mma)
    values = cute.make_tensor(  # the same memory with the channels first, as the second product needs them
        shared_v.iterator,
        cute.make_layout((size, KEYS, 2), stride=(1, size + PADDING, KEYS * (size + PADDING))),
    )
    source_q = copy_q.get_slice(thread).partition_S(shared_q)
    source_k = copy_k.get_slice(thread).partition_S(shared_k)
    source_v = copy_v.get_slice(thread).partition_S(values)
    fragment_q = part.make_fragment_A(part.partition_A(shared_q))
    fragment_k = part.make_fragment_B(part.partition_B(shared_k[None, None, 0]))
    fragment_v = part.make_fragment_B(part.partition_B(values[None, None, 0]))
    target_q = copy_q.get_slice(thread).retile(fragment_q)
    target_k = copy_k.get_slice(thread).retile(fragment_k)
    target_v = copy_v.get_slice(thread).retile(fragment_v)

    # Four values an atom: two neighbouring columns of a row, then the same of the row eight further down.
    logits = cute.make_rmem_tensor(part.partition_shape_C((ROWS, KEYS)), cutlass.Float32)
    total = cute.make_rmem_tensor(part.partition_shape_C((ROWS, size)), cutlass.Float32)
    # The first product's sums are, rounded, the second product's left operand: two atoms of 8 keys make one of 16.
    powers = cute.make_rmem_tensor((4, BANDS, KEYS // 8), cutlass.BFloat16)
    left = cute.make_tensor(
        powers.iterator,
        cute.make_layout(((2, 2, 2), BANDS, KEYS // 16), stride=((1, 2, 4 * BANDS), 4, 8 * BANDS)),
    )
    top = cute.make_rmem_tensor((2, BANDS), cutlass.Float32)
    weight = cute.make_rmem_tensor((2, BANDS), cutlass.Float32)
    last_seen = cute.make_rmem_tensor((2, BANDS), cutlass.Int32)  # the last key that a row sees
    total.fill(0.0)
    top.fill(LOWEST)
    weight.fill(0.0)
    for band in cutlass.range_constexpr(BANDS):
        for half in cutlass.range_constexpr(2):
            row = first_row + band * (16 * WARPS) + warp_number * 16 + lane // 4 + 8 * half
            last_seen[half, band] = row // group + prefix
    seen_by_all = first_row // group + prefix + 1
    seen = (cutlass.min(first_row + ROWS, rows) - 1) // group + prefix + 1
    tiles = (seen + KEYS - 1) // KEYS

    for tile in cutlass.range(tiles):
        stage = tile % 2
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        if tile + 1 < tiles:
            copy_keys(k, kv_head, places[None, 1 - stage], thread, shared_k[None, None, 1 - stage])
            copy_keys(v, kv_head, places[None, 1 - stage], thread, shared_v[None, None, 1 - stage])
        cute.arch.cp_async_commit_group()
        later_place = cutlass.Int32(0)  # on its way while this tile is worked on
        if thread < KEYS:
            later_place = place_of(pages, page, first_page, (tile + 2) * KEYS + thread, keys)

        logits.fill(0.0)
        for step in cutlass.range_constexpr(size // 16):
            cute.copy(copy_q, source_q[None, None, step], target_q[None, None, step])
            cute.copy(copy_k, source_k[None, None, step, stage], target_k[None, None, step])
            cute.gemm(mma, logits, fragment_q[None, None, step], fragment_k[None, None, step], logits)

        if (tile + 1) * KEYS > seen_by_all:
            for band in cutlass.range_constexpr(BANDS):
                for half in cutlass.range_constexpr(2):
                    for column in cutlass.range_constexpr(KEYS // 8):
                        for side in cutlass.range_constexpr(2):
                            key = tile * KEYS + column * 8 + lane % 4 * 2 + side
                            value = logits[2 * half + side, band, column]
                            if key > last_seen[half, band]:
                                value = cutlass.Float32(MASKED)
                            logits[2 * half + side, band, column] = value

        for band in cutlass.range_constexpr(BANDS):
            for half in cutlass.range_constexpr(2):
                peak = top[half, band]
                for column in cutlass.range_constexpr(KEYS // 8):
                    peak = cute.arch.fmax(peak, logits[2 * half, band, column])
                    peak = cute.arch.fmax(peak, logits[2 * half + 1, band, column])
                peak = cute.arch.warp_reduction_max(peak, threads_in_group=4)
                shrink = cute.math.exp2((top[half, band] - peak) * scale, fastmath=True)
                top[half, band] = peak
                offset = peak * scale
                added = cutlass.Float32(0.0)
                for column in cutlass.range_constexpr(KEYS // 8):
                    for side in cutlass.range_constexpr(2):
                        logit = logits[2 * half + side, band, column]
                        power = cute.math.exp2(logit * scale - offset, fastmath=True)
                        logits[2 * half + side, band, column] = power
                        added += power
                weight[half, band] = weight[half, band] * shrink + added
                for column in cutlass.range_constexpr(size // 8):
                    for side in cutlass.range_constexpr(2):
                        total[2 * half + side, band, column] = total[2 * half + side, band, column] * shrink

        for step in cutlass.range_constexpr(KEYS // 16):
            for column in cutlass.range_constexpr(2 * step, 2 * step + 2):
                for band in cutlass.range_constexpr(BANDS):
                    rounded = logits[None, band, column].load().to(cutlass.BFloat16)
                    powers[None, band, column].store(rounded.reshape(4))
            cute.copy(copy_v, source_v[None, None, step, stage], target_v[None, None, step])
            cute.gemm(mma, total, left[None, None, step], fragment_v[None, None, step], total)
        if thread < KEYS:
            places[thread, stage] = later_place

    # A warp's rows of the queries are its own, and are not needed any more: the output takes their place.
    for band in cutlass.range_constexpr(BANDS):
        for half in cutlass.range_constexpr(2):
            tile_row = band * (16 * WARPS) + warp_number * 16 + lane // 4 + 8 * half
            row = first_row + tile_row
            sum_of_all = cute.arch.warp_reduction_sum(weight[half, band], threads_in_group=4)
            inverse = cutlass.Float32(1.0) / sum_of_all
            for column in cutlass.range_constexpr(size // 8):
                pair = cute.make_rmem_tensor((2,), cutlass.Float32)
                pair[0] = total[2 * half, band, column] * inverse
                pair[1] = total[2 * half + 1, band, column] * inverse
                rounded_pair = cute.make_rmem_tensor((2,), cutlass.BFloat16)
                rounded_pair.store(pair.load().to(cutlass.BFloat16))
                cute.autovec_copy(
                    rounded_pair, cute.local_tile(shared_q[tile_row, None], (2,), (column * 4 + lane % 4,))
                )
            if lane % 4 == 0 and row < rows:
                base_two = top[half, band] * scale + cute.math.log2(sum_of_all)
                lse[first_query + row // group, kv_head * group + row % group] = base_two
    cute.arch.sync_threads()
    for step in cutlass.range_constexpr(ROWS * chunks // THREADS):
        place = step * THREADS + thread
        row = first_row + place // chunks
        if row < rows:
            chunk = cute.make_rmem_tensor((VECTOR,), cutlass.BFloat16)
            target = out[first_query + row // group, kv_head * group + row % group, None]
            cute.autovec_copy(cute.local_tile(shared_q[place // chunks, None], (VECTOR,), (place % chunks,)), chunk)
            cute.autovec_copy(chunk, cute.local_tile(target, (VECTOR,), (place % chunks,)))


@cute.kernel
def prefill_kernel(
    q: cute.Tensor,
    k_cache: cute.Tensor,
    v_cache: cute.Tensor,
    query_offsets: cute.Tensor,
    page_offsets: cute.Tensor,
    pages: cute.Tensor,
    last_lengths: cute.Tensor,
    scale: cutlass.Float32,
    out: cute.Tensor,
    lse: cute.Tensor,
    blocks: cutlass.Int32,
):
    thread, _, _ = cute.arch.thread_idx()
    block, kv_head, _ = cute.arch.block_idx()
    block = blocks - 1 - block  # later blocks of a sequence see more keys: they begin first
    size = cutlass.const_expr(q.shape[2])
    group = cutlass.const_expr(q.shape[1] // k_cache.shape[2])
    shared = cutlass.utils.SmemAllocator()
    row_layout = cute.make_layout((ROWS, size), stride=(size + PADDING, 1))
    key_layout = cute.make_layout((KEYS, size, 2), stride=(size + PADDING, 1, KEYS * (size + PADDING)))
    shared_q = shared.allocate_tensor(cutlass.BFloat16, row_layout, 16)
    shared_k = shared.allocate_tensor(cutlass.BFloat16, key_layout, 16)
    shared_v = shared.allocate_tensor(cutlass.BFloat16, key_layout, 16)
    places = shared.allocate_tensor(cutlass.Int32, cute.make_layout((KEYS, 2)), 16)
    found = shared.allocate_tensor(cutlass.Int32, cute.make_layout((1,)), 16)

    for b in cutlass.range(thread, query_offsets.shape[0] - 1, THREADS):
        begin = query_offsets[b] * group // ROWS + b
        end = query_offsets[b + 1] * group // ROWS + b + 1
        if begin <= block < end:
            found[0] = b
    cute.arch.sync_threads()
    sequence = found[0]
    first_query, first_page = query_offsets[sequence], page_offsets[sequence]
    queries = query_offsets[sequence + 1] - first_query
    keys = (page_offsets[sequence + 1] - first_page - 1) * k_cache.shape[1] + last_lengths[sequence]
    first_row = (block - (first_query * group // ROWS + sequence)) * ROWS
    if first_row < queries * group:
        attend(
            *(q, k_cache, v_cache, pages, out, lse, shared_q, shared_k, shared_v, places),
            *(kv_head, first_query, queries, first_page, keys, first_row, scale),
        )


@cute.jit
def prefill(
    q: cute.Tensor,
    k_cache: cute.Tensor,
    v_cache: cute.Tensor,
    query_offsets: cute.Tensor,
    page_offsets: cute.Tensor,
    pages: cute.Tensor,
    last_lengths: cute.Tensor,
    scale: cutlass.Float32,
    out: cute.Tensor,
    lse: cute.Tensor,
    stream,
):
    group = cutlass.const_expr(q.shape[1] // k_cache.shape[2])
    blocks = q.shape[0] * group // ROWS + query_offsets.shape[0] - 1
    prefill_kernel(
        q, k_cache, v_cache, query_offsets, page_offsets, pages, last_lengths, scale, out, lse, blocks
    ).launch(grid=(blocks, k_cache.shape[2], 1), block=(THREADS, 1, 1), stream=stream)


def compile_for(arch: str, heads: int = 24, kv_heads: int = 8, size: int = 128, page: int = 64):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert size % 16 == 0 and KEYS * size // VECTOR % THREADS == 0
    queries, pool, offsets, listed, sequences = (cute.sym_int() for _ in range(5))

    def fake(dtype, *shape: int):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    return cute.compile(
        prefill,
        fake(cutlass.BFloat16, queries, heads, size),
        fake(cutlass.BFloat16, pool, page, kv_heads, size),
        fake(cutlass.BFloat16, pool, page, kv_heads, size),
        fake(cutlass.Int32, offsets),
        fake(cutlass.Int32, offsets),
        fake(cutlass.Int32, listed),
        fake(cutlass.Int32, sequences),
        cutlass.Float32(0.0),
        fake(cutlass.BFloat16, queries, heads, size),
        fake(cutlass.Float32, queries, heads),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, heads: int, kv_heads: int, size: int, page: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", heads, kv_heads, size, page)


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
    kernel = kernel_for(q.device, heads, k_cache.shape[2], size, k_cache.shape[1])
    kernel(
        *(q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_len),
        *(sm_scale / math.log(2), output, lse),
    )
    return output, lse
