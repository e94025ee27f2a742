"""p14, latent decode over single-token pages, in CuTe DSL: two kernels, as in split-context flash decoding.

The contexts are cut into chunks, a thread block each, which go through 32 tokens at a time: both products run on the
tensor cores (m16n8k16, the 16 heads being the rows). For the logits each of four warps has half of the tokens and half
of the channels, and the halves are added up in shared memory; then every warp has the same softmax and a quarter of the
latents. The next tokens are copied to shared memory meanwhile. The second kernel joins the chunks of a sequence, some
at a time. A sequence's chunks begin at a number that follows from its offset alone, so nothing waits for the offsets to
reach the host. The second kernel is set up while the first still runs, and then waits for its results.
"""

import math
from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

CHUNK = 320  # tokens
KEYS = 32  # tokens at a time
HEADS = 16
WARPS = 4
THREADS = 32 * WARPS
VECTOR = 8  # bfloat16 values in 16 bytes
PADDING = 8  # so much longer are rows in shared memory: eight of them, 16 bytes each, meet all its banks
GROUP = 3  # steps of a product that add up on the tensor cores, which round coarsely
EXTRA = 4  # floats behind a partial result: its highest logit and its weight, and two to keep rows at 16 bytes
JOINED = 8  # partial results that are joined at a time
LOWEST = -1.0e30
MASKED = -3.0e38  # so far below `LOWEST` that its power of two is zero


@cute.jit
def copy_chunk(source: cute.Tensor, place: cutlass.Int32, target: cute.Tensor, target_place: cutlass.Int32):
    """Starts copying the 16 bytes number `place` of a row to those number `target_place` of another."""
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL), cutlass.BFloat16, num_bits_per_copy=128)
    cute.copy(
        atom,
        cute.local_tile(source, (VECTOR,), (place,)),
        cute.local_tile(target, (VECTOR,), (target_place,)),
    )


@cute.jit
def copy_rows(
    latents: cute.Tensor, rotary_parts: cute.Tensor, chosen: cute.Tensor, first: cutlass.Int32, target: cute.Tensor
):
    """Starts copying the rows whose numbers stand in `chosen` from `first` on."""
    thread, _, _ = cute.arch.thread_idx()
    rows = cutlass.const_expr(target.shape[0])
    wide = cutlass.const_expr(latents.shape[2] // VECTOR)
    narrow = cutlass.const_expr(rotary_parts.shape[2] // VECTOR)
    for step in cutlass.range_constexpr(rows * wide // THREADS):
        place = step * THREADS + thread
        row = place // wide
        copy_chunk(latents[chosen[first + row], 0, None], place % wide, target[row, None], place % wide)
    for step in cutlass.range_constexpr(rows * narrow // THREADS):
        place = step * THREADS + thread
        row = place // narrow
        copy_chunk(rotary_parts[chosen[first + row], 0, None], place % narrow, target[row, None], wide + place % narrow)


@cute.jit
def copy_queries(q_nope: cute.Tensor, q_pe: cute.Tensor, target: cute.Tensor):
    """Starts copying one query's heads."""
    thread, _, _ = cute.arch.thread_idx()
    wide = cutlass.const_expr(q_nope.shape[1] // VECTOR)
    narrow = cutlass.const_expr(q_pe.shape[1] // VECTOR)
    for step in cutlass.range_constexpr(HEADS * wide // THREADS):
        place = step * THREADS + thread
        copy_chunk(q_nope[place // wide, None], place % wide, target[place // wide, None], place % wide)
    for step in cutlass.range_constexpr(HEADS * narrow // THREADS):
        place = step * THREADS + thread
        copy_chunk(q_pe[place // narrow, None], place % narrow, target[place // narrow, None], wide + place % narrow)


@cute.jit
def load_matrices(source: cute.Tensor, row: cutlass.Int32, place: cutlass.Int32, target: cute.Tensor, turned: bool):
    """Four 8x8 matrices; this thread says where one of their rows begins."""
    operation = warp.LdMatrix8x8x16bOp(transpose=turned, num_matrices=4)
    atom = cute.make_copy_atom(operation, cutlass.BFloat16)
    cute.copy_atom_call(atom, cute.local_tile(source[row, None], (VECTOR,), (place,)), target)


@cute.jit
def attend_tile(
    keys: cute.Tensor,
    count: cutlass.Int32,
    scale: cutlass.Float32,
    left: cute.Tensor,
    partial: cute.Tensor,
    top: cute.Tensor,
    weight: cute.Tensor,
    total: cute.Tensor,
):
    """Takes in `count` tokens. An atom has four values: two neighbouring columns of a row, then the same of the row
    eight further down."""
    thread, _, _ = cute.arch.thread_idx()
    lane, warp_number = thread % 32, thread // 32
    steps = cutlass.const_expr(left.shape[1])
    columns = cutlass.const_expr(total.shape[1])
    atom = cute.make_mma_atom(warp.MmaF16BF16Op(cutlass.BFloat16, cutlass.Float32, (16, 8, 16)))
    right = cute.make_rmem_tensor((4, 2), cutlass.BFloat16)
    matrices = cute.make_tensor(right.iterator, cute.make_layout((8,)))
    sums = cute.make_rmem_tensor((4, KEYS // 16), cutlass.Float32)
    halves = cute.make_rmem_tensor((4, KEYS // 16), cutlass.Float32)
    others = cute.make_rmem_tensor((4, KEYS // 8), cutlass.Float32)
    logits = cute.make_rmem_tensor((4, KEYS // 8), cutlass.Float32)
    powers = cute.make_rmem_tensor((4, KEYS // 8), cutlass.BFloat16)
    # This warp's half of the channels, and of the tokens.
    channels, tokens = warp_number // 2, warp_number % 2
    halves.fill(0.0)
    for part in cutlass.range_constexpr(steps // GROUP):
        sums.fill(0.0)
        for step in cutlass.range_constexpr(part * GROUP, part * GROUP + GROUP):
            row = tokens * 16 + lane // 16 * 8 + lane % 8
            load_matrices(keys, row, (channels * steps + step) * 2 + lane // 8 % 2, matrices, False)
            for side in cutlass.range_constexpr(2):
                acc = sums[None, side]
                cute.mma_atom_call(atom, acc, left[None, step], right[None, side], acc)
        halves.store(halves.load() + sums.load())
    for side in cutlass.range_constexpr(2):
        cute.autovec_copy(halves[None, side], partial[None, lane, tokens * 2 + side, channels])
    cute.arch.sync_threads()
    for column in cutlass.range_constexpr(KEYS // 8):
        cute.autovec_copy(partial[None, lane, column, 0], logits[None, column])
        cute.autovec_copy(partial[None, lane, column, 1], others[None, column])
    logits.store(logits.load() + others.load())
    for column in cutlass.range_constexpr(KEYS // 8):
        for e in cutlass.range_constexpr(4):
            value = logits[e, column]
            if column * 8 + lane % 4 * 2 + e % 2 >= count:
                value = cutlass.Float32(MASKED)
            logits[e, column] = value
    for half in cutlass.range_constexpr(2):
        peak = top[half]
        for column in cutlass.range_constexpr(KEYS // 8):
            peak = cute.arch.fmax(peak, logits[2 * half, column])
            peak = cute.arch.fmax(peak, logits[2 * half + 1, column])
        peak = cute.arch.warp_reduction_max(peak, threads_in_group=4)
        shrink = cute.math.exp2((top[half] - peak) * scale, fastmath=True)
        top[half] = peak
        added = cutlass.Float32(0.0)
        for column in cutlass.range_constexpr(KEYS // 8):
            for side in cutlass.range_constexpr(2):
                power = cute.math.exp2((logits[2 * half + side, column] - peak) * scale, fastmath=True)
                logits[2 * half + side, column] = power
                added += power
        weight[half] = weight[half] * shrink + added
        for column in cutlass.range_constexpr(columns):
            for side in cutlass.range_constexpr(2):
                total[2 * half + side, column] = total[2 * half + side, column] * shrink
    # The first product's sums are, rounded, the second's left operand: two atoms of 8 keys make one of 16.
    powers.store(logits.load().to(cutlass.BFloat16))
    operand = cute.make_tensor(powers.iterator, cute.make_layout((8, KEYS // 16)))
    for step in cutlass.range_constexpr(KEYS // 16):
        for pair in cutlass.range_constexpr(columns // 2):
            place = warp_number * columns + pair * 2 + lane // 16
            load_matrices(keys, step * 16 + lane % 16, place, matrices, True)
            for side in cutlass.range_constexpr(2):
                acc = total[None, pair * 2 + side]
                cute.mma_atom_call(atom, acc, operand[None, step], right[None, side], acc)


@cute.jit
def attend(
    latents: cute.Tensor,
    rotary_parts: cute.Tensor,
    chosen: cute.Tensor,
    count: cutlass.Int32,
    scale: cutlass.Float32,
    queries: cute.Tensor,
    keys: cute.Tensor,
    partial: cute.Tensor,
    top: cute.Tensor,
    weight: cute.Tensor,
    total: cute.Tensor,
):
    """All `count` tokens of a thread block. The queries are on their way to shared memory."""
    thread, _, _ = cute.arch.thread_idx()
    lane, warp_number = thread % 32, thread // 32
    steps = cutlass.const_expr(queries.shape[1] // 32)
    left = cute.make_rmem_tensor((8, steps), cutlass.BFloat16)
    top.fill(LOWEST)
    weight.fill(0.0)
    total.fill(0.0)
    copy_rows(latents, rotary_parts, chosen, 0, keys[None, None, 0])
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(1)
    cute.arch.sync_threads()
    for step in cutlass.range_constexpr(steps):
        place = (warp_number // 2 * steps + step) * 2 + lane // 16
        load_matrices(queries, lane % 16, place, left[None, step], False)
    tiles = (count + KEYS - 1) // KEYS
    for tile in cutlass.range(tiles):
        stage = tile % 2
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        if tile + 1 < tiles:
            copy_rows(latents, rotary_parts, chosen, (tile + 1) * KEYS, keys[None, None, 1 - stage])
        cute.arch.cp_async_commit_group()
        attend_tile(keys[None, None, stage], count - tile * KEYS, scale, left, partial, top, weight, total)


@cute.kernel
def chunk_kernel(
    q_nope: cute.Tensor,
    q_pe: cute.Tensor,
    latents: cute.Tensor,
    rotary_parts: cute.Tensor,
    offsets: cute.Tensor,
    tokens: cute.Tensor,
    scale: cutlass.Float32,
    partials: cute.Tensor,
):
    """`scale` takes a product to a power of two."""
    thread, _, _ = cute.arch.thread_idx()
    chunk, _, _ = cute.arch.block_idx()
    lane, warp_number = thread % 32, thread // 32
    width = cutlass.const_expr(q_nope.shape[2] + q_pe.shape[2])
    columns = cutlass.const_expr(q_nope.shape[2] // (8 * WARPS))
    stride = cutlass.const_expr(width + PADDING)
    cute.arch.griddepcontrol_launch_dependents()
    shared = cutlass.utils.SmemAllocator()
    queries = shared.allocate_tensor(cutlass.BFloat16, cute.make_layout((HEADS, width), stride=(stride, 1)), 16)
    keys = shared.allocate_tensor(
        cutlass.BFloat16, cute.make_layout((KEYS, width, 2), stride=(stride, 1, KEYS * stride)), 16
    )
    partial = shared.allocate_tensor(cutlass.Float32, cute.make_layout((4, 32, KEYS // 8, 2)), 16)
    chosen = shared.allocate_tensor(cutlass.Int32, cute.make_layout(CHUNK), 16)
    found = shared.allocate_tensor(cutlass.Int32, cute.make_layout(3), 16)
    top = cute.make_rmem_tensor(2, cutlass.Float32)
    weight = cute.make_rmem_tensor(2, cutlass.Float32)
    total = cute.make_rmem_tensor((4, columns), cutlass.Float32)

    # The chunk's sequence, its first token and how many tokens are left from there on.
    for b in cutlass.range(thread, offsets.shape[0] - 1, THREADS):
        start, stop = offsets[b], offsets[b + 1]
        begin, end = start // CHUNK + b, stop // CHUNK + b + 1
        if begin <= chunk and end > chunk:
            found[0] = b
            found[1] = start + (chunk - begin) * CHUNK
            found[2] = stop - (start + (chunk - begin) * CHUNK)
    cute.arch.sync_threads()
    sequence, start = found[0], found[1]
    count = cutlass.min(found[2], CHUNK)
    if count > 0:
        copy_queries(q_nope[sequence, None, None], q_pe[sequence, None, None], queries)
        cute.arch.cp_async_commit_group()
        # Places past the last token repeat it.
        for turn in cutlass.range_constexpr((CHUNK + THREADS - 1) // THREADS):
            place = turn * THREADS + thread
            if place < CHUNK:
                chosen[place] = tokens[start + cutlass.min(place, count - 1)]
        cute.arch.sync_threads()
        attend(latents, rotary_parts, chosen, count, scale, queries, keys, partial, top, weight, total)
        for half in cutlass.range_constexpr(2):
            head = lane // 4 + 8 * half
            sum_of_all = cute.arch.warp_reduction_sum(weight[half], threads_in_group=4)
            for column in cutlass.range_constexpr(columns):
                pair = cute.make_rmem_tensor(2, cutlass.Float32)
                pair[0] = total[2 * half, column]
                pair[1] = total[2 * half + 1, column]
                place = (warp_number * columns + column) * 4 + lane % 4
                cute.autovec_copy(pair, cute.local_tile(partials[chunk, head, None], (2,), (place,)))
            if thread < 32 and lane % 4 == 0:
                partials[chunk, head, q_nope.shape[2]] = top[half] * scale
                partials[chunk, head, q_nope.shape[2] + 1] = sum_of_all


@cute.kernel
def join_kernel(offsets: cute.Tensor, partials: cute.Tensor, out: cute.Tensor, lse: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    head, sequence, _ = cute.arch.block_idx()
    cute.arch.griddepcontrol_wait()
    latent = cutlass.const_expr(out.shape[2])
    begin, end = offsets[sequence], offsets[sequence + 1]
    first = begin // CHUNK + sequence
    count = (end - begin + CHUNK - 1) // CHUNK
    part = cute.make_rmem_tensor((4, JOINED), cutlass.Float32)
    tops = cute.make_rmem_tensor(JOINED, cutlass.Float32)
    weights = cute.make_rmem_tensor(JOINED, cutlass.Float32)
    joined = cute.make_rmem_tensor(4, cutlass.Float32)
    rounded = cute.make_rmem_tensor(4, cutlass.BFloat16)
    joined.fill(0.0)
    peak, weight = cutlass.Float32(LOWEST), cutlass.Float32(0.0)
    for c in cutlass.range(0, count, JOINED):
        for u in cutlass.range_constexpr(JOINED):  # places past the last repeat it
            place = first + cutlass.min(c + u, count - 1)
            cute.autovec_copy(cute.local_tile(partials[place, head, None], (4,), (thread,)), part[None, u])
            tops[u] = partials[place, head, latent]
            weights[u] = partials[place, head, latent + 1]
        new_peak = peak
        for u in cutlass.range_constexpr(JOINED):
            top = tops[u]
            if c + u >= count:
                top = cutlass.Float32(MASKED)
            tops[u] = top
            new_peak = cute.arch.fmax(new_peak, top)
        shrink = cute.math.exp2(peak - new_peak)
        peak = new_peak
        weight *= shrink
        sums = joined.load() * shrink
        for u in cutlass.range_constexpr(JOINED):
            power = cute.math.exp2(tops[u] - new_peak)
            weight += weights[u] * power
            sums = sums + part[None, u].load() * power
        joined.store(sums)
    inverse = 1.0 / cute.arch.fmax(weight, cutlass.Float32(1e-30))
    rounded.store((joined.load() * inverse).to(cutlass.BFloat16))
    cute.autovec_copy(rounded, cute.local_tile(out[sequence, head, None], (4,), (thread,)))
    if thread == 0:
        lse[sequence, head] = peak + cute.math.log2(weight)


@cute.jit
def attend_chunks(
    q_nope: cute.Tensor,
    q_pe: cute.Tensor,
    latents: cute.Tensor,
    rotary_parts: cute.Tensor,
    offsets: cute.Tensor,
    tokens: cute.Tensor,
    scale: cutlass.Float32,
    partials: cute.Tensor,
    stream,
):
    chunk_kernel(q_nope, q_pe, latents, rotary_parts, offsets, tokens, scale, partials).launch(
        grid=(partials.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.jit
def join_chunks(offsets: cute.Tensor, partials: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, stream):
    join_kernel(offsets, partials, out, lse).launch(
        grid=(HEADS, out.shape[0], 1), block=(out.shape[2] // 4, 1, 1), stream=stream, use_pdl=True
    )


def compile_for(arch: str, heads: int = HEADS, latent: int = 512, rotary: int = 64):
    """The two kernels for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert heads == HEADS and (latent + rotary) % (32 * GROUP) == 0 and latent % (16 * WARPS) == 0
    assert HEADS * rotary % (VECTOR * THREADS) == 0
    sequences, offsets, pool, tokens, chunks = (cute.sym_int() for _ in range(5))

    def fake(dtype, *shape: int):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    partials = fake(cutlass.Float32, chunks, heads, latent + EXTRA)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {arch}"
    attend_all = cute.compile(
        attend_chunks,
        fake(cutlass.BFloat16, sequences, heads, latent),
        fake(cutlass.BFloat16, sequences, heads, rotary),
        fake(cutlass.BFloat16, pool, 1, latent),
        fake(cutlass.BFloat16, pool, 1, rotary),
        fake(cutlass.Int32, offsets),
        fake(cutlass.Int32, tokens),
        *(cutlass.Float32(0.0), partials, stream),
        options=options,
    )
    join = cute.compile(
        join_chunks,
        *(fake(cutlass.Int32, offsets), partials),
        fake(cutlass.BFloat16, sequences, heads, latent),
        fake(cutlass.Float32, sequences, heads),
        stream,
        options=options,
    )
    return attend_all, join


@cache
def kernels_for(device: torch.device, heads: int, latent: int, rotary: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", heads, latent, rotary)


def solve(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    sequences, heads, latent = q_nope.shape
    attend_all, join = kernels_for(q_nope.device, heads, latent, q_pe.shape[2])
    chunks = kv_indices.shape[0] // CHUNK + sequences  # no fewer than there can be
    partials = torch.empty(chunks, heads, latent + EXTRA, dtype=torch.float32, device=q_nope.device)
    attend_all(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale / math.log(2), partials)
    # Made while the first kernel runs.
    output = torch.empty_like(q_nope)
    lse = torch.empty(sequences, heads, dtype=torch.float32, device=q_nope.device)
    join(kv_indptr, partials, output, lse)
    return output, lse
