"""p16, causal latent prefill in expanded form, in CuTe DSL: one flash attention kernel.

A thread block has 64 queries of a head, a warp 16 of them, and goes through the keys that they see, 64 at a time: the
products run on the tensor cores (m16n8k16, float32 sums), the softmax runs along in float32, and the next keys and
values are copied to shared memory meanwhile. Which sequence a block belongs to is found on the device: a sequence's
blocks begin at a number that follows from its offset alone.
"""

import math
from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

WARPS = 4
THREADS = 32 * WARPS
ROWS = 16 * WARPS
KEYS = 64
VECTOR = 8  # bfloat16 values in 16 bytes
PADDING = 8  # so much longer are rows in shared memory: eight of them, 16 bytes each, meet all its banks
GROUP = 4  # steps of a product that add up on the tensor cores, which round coarsely
LOWEST = -1.0e30
MASKED = -3.0e38  # so far below `LOWEST` that its power of two is zero


@cute.jit
def copy_rows(source: cute.Tensor, head: cutlass.Int32, first: cutlass.Int32, last: cutlass.Int32, target: cute.Tensor):
    """Starts copying rows from `first` on; past the row `last` it repeats that one."""
    thread, _, _ = cute.arch.thread_idx()
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), cutlass.BFloat16, num_bits_per_copy=128)
    chunks = cutlass.const_expr(source.shape[2] // VECTOR)
    for step in cutlass.range_constexpr(target.shape[0] * chunks // THREADS):
        place = step * THREADS + thread
        row = cutlass.min(first + place // chunks, last)
        cute.copy(
            atom,
            cute.local_tile(source[row, head, None], (VECTOR,), (place % chunks,)),
            cute.local_tile(target[place // chunks, None], (VECTOR,), (place % chunks,)),
        )


@cute.jit
def load_matrices(source: cute.Tensor, row: cutlass.Int32, place: cutlass.Int32, target: cute.Tensor, turned: bool):
    """Four 8x8 matrices; this thread says where one of their rows begins."""
    operation = warp.LdMatrix8x8x16bOp(transpose=turned, num_matrices=4)
    atom = cute.make_copy_atom(operation, cutlass.BFloat16)
    cute.copy_atom_call(atom, cute.local_tile(source[row, None], (VECTOR,), (place,)), target)


@cute.jit
def attend_tile(
    queries: cute.Tensor,
    keys: cute.Tensor,
    values: cute.Tensor,
    first_key: cutlass.Int32,
    seen_by_all: cutlass.Int32,
    last_seen: cute.Tensor,
    scale: cutlass.Float32,
    top: cute.Tensor,
    weight: cute.Tensor,
    total: cute.Tensor,
):
    """Takes in the keys from `first_key` on. An atom has four values: two neighbouring columns of a row, then the same
    of the row eight further down."""
    thread, _, _ = cute.arch.thread_idx()
    lane, warp_number = thread % 32, thread // 32
    key_steps = cutlass.const_expr(queries.shape[1] // 16)
    columns = cutlass.const_expr(total.shape[1])
    atom = cute.make_mma_atom(warp.MmaF16BF16Op(cutlass.BFloat16, cutlass.Float32, (16, 8, 16)))
    left = cute.make_rmem_tensor((8, GROUP), cutlass.BFloat16)
    right = cute.make_rmem_tensor((4, 2), cutlass.BFloat16)
    matrices = cute.make_tensor(right.iterator, cute.make_layout((8,)))
    sums = cute.make_rmem_tensor((4, 2), cutlass.Float32)
    logits = cute.make_rmem_tensor((4, KEYS // 8), cutlass.Float32)
    powers = cute.make_rmem_tensor((4, KEYS // 8), cutlass.BFloat16)
    logits.fill(0.0)
    for group in cutlass.range_constexpr(key_steps // GROUP):
        for step in cutlass.range_constexpr(GROUP):
            place = (group * GROUP + step) * 2 + lane // 16
            load_matrices(queries, warp_number * 16 + lane % 16, place, left[None, step], False)
        for pair in cutlass.range_constexpr(KEYS // 16):
            row = pair * 16 + lane // 16 * 8 + lane % 8
            sums.fill(0.0)
            for step in cutlass.range_constexpr(GROUP):
                load_matrices(keys, row, (group * GROUP + step) * 2 + lane // 8 % 2, matrices, False)
                for side in cutlass.range_constexpr(2):
                    acc = sums[None, side]
                    cute.mma_atom_call(atom, acc, left[None, step], right[None, side], acc)
            for side in cutlass.range_constexpr(2):
                acc = logits[None, pair * 2 + side]
                acc.store(acc.load() + sums[None, side].load())
    if first_key + KEYS > seen_by_all:
        for column in cutlass.range_constexpr(KEYS // 8):
            for e in cutlass.range_constexpr(4):
                value = logits[e, column]
                if first_key + column * 8 + lane % 4 * 2 + e % 2 > last_seen[e // 2]:
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
            load_matrices(values, step * 16 + lane % 16, pair * 2 + lane // 16, matrices, True)
            for side in cutlass.range_constexpr(2):
                acc = total[None, pair * 2 + side]
                cute.mma_atom_call(atom, acc, operand[None, step], right[None, side], acc)


@cute.kernel
def prefill_kernel(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    query_offsets: cute.Tensor,
    key_offsets: cute.Tensor,
    scale: cutlass.Float32,
    out: cute.Tensor,
    lse: cute.Tensor,
):
    """`scale` takes a product to a power of two."""
    thread, _, _ = cute.arch.thread_idx()
    block, head, _ = cute.arch.block_idx()
    lane, warp_number = thread % 32, thread // 32
    key_size, value_size = cutlass.const_expr(q.shape[2]), cutlass.const_expr(v.shape[2])
    key_row, value_row = cutlass.const_expr(key_size + PADDING), cutlass.const_expr(value_size + PADDING)
    columns = cutlass.const_expr(value_size // 8)
    chunks = cutlass.const_expr(value_size // VECTOR)
    shared = cutlass.utils.SmemAllocator()
    queries = shared.allocate_tensor(cutlass.BFloat16, cute.make_layout((ROWS, key_size), stride=(key_row, 1)), 16)
    keys = shared.allocate_tensor(
        cutlass.BFloat16, cute.make_layout((KEYS, key_size, 2), stride=(key_row, 1, KEYS * key_row)), 16
    )
    values = shared.allocate_tensor(
        cutlass.BFloat16, cute.make_layout((KEYS, value_size, 2), stride=(value_row, 1, KEYS * value_row)), 16
    )
    found = shared.allocate_tensor(cutlass.Int32, cute.make_layout(1), 16)
    top = cute.make_rmem_tensor(2, cutlass.Float32)
    weight = cute.make_rmem_tensor(2, cutlass.Float32)
    total = cute.make_rmem_tensor((4, columns), cutlass.Float32)
    last_seen = cute.make_rmem_tensor(2, cutlass.Int32)  # the last key that a row sees

    for b in cutlass.range(thread, query_offsets.shape[0] - 1, THREADS):
        begin, end = query_offsets[b] // ROWS + b, query_offsets[b + 1] // ROWS + b + 1
        if begin <= block and end > block:
            found[0] = b
    cute.arch.sync_threads()
    sequence = found[0]
    first_query, first_key = query_offsets[sequence], key_offsets[sequence]
    rows, count = query_offsets[sequence + 1] - first_query, key_offsets[sequence + 1] - first_key
    prefix = count - rows
    first_row = (block - (first_query // ROWS + sequence)) * ROWS
    if first_row < rows:
        top.fill(LOWEST)
        weight.fill(0.0)
        total.fill(0.0)
        for half in cutlass.range_constexpr(2):
            last_seen[half] = first_row + warp_number * 16 + lane // 4 + 8 * half + prefix
        last_key = first_key + count - 1
        copy_rows(q, head, first_query + first_row, first_query + rows - 1, queries)
        copy_rows(k, head, first_key, last_key, keys[None, None, 0])
        copy_rows(v, head, first_key, last_key, values[None, None, 0])
        cute.arch.cp_async_commit_group()
        tiles = (cutlass.min(first_row + ROWS, rows) - 1 + prefix + KEYS) // KEYS
        for tile in cutlass.range(tiles):
            stage = tile % 2
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            if tile + 1 < tiles:
                copy_rows(k, head, first_key + (tile + 1) * KEYS, last_key, keys[None, None, 1 - stage])
                copy_rows(v, head, first_key + (tile + 1) * KEYS, last_key, values[None, None, 1 - stage])
            cute.arch.cp_async_commit_group()
            attend_tile(
                *(queries, keys[None, None, stage], values[None, None, stage], tile * KEYS),
                *(first_row + prefix + 1, last_seen, scale, top, weight, total),
            )

        # A warp's rows of the queries are its own, and are not needed any more: the output takes their place.
        for half in cutlass.range_constexpr(2):
            tile_row = warp_number * 16 + lane // 4 + 8 * half
            sum_of_all = cute.arch.warp_reduction_sum(weight[half], threads_in_group=4)
            inverse = 1.0 / sum_of_all
            for column in cutlass.range_constexpr(columns):
                pair = cute.make_rmem_tensor(2, cutlass.Float32)
                rounded = cute.make_rmem_tensor(2, cutlass.BFloat16)
                pair[0] = total[2 * half, column] * inverse
                pair[1] = total[2 * half + 1, column] * inverse
                rounded.store(pair.load().to(cutlass.BFloat16))
                cute.autovec_copy(rounded, cute.local_tile(queries[tile_row, None], (2,), (column * 4 + lane % 4,)))
            if lane % 4 == 0 and first_row + tile_row < rows:
                lse[first_query + first_row + tile_row, head] = top[half] * scale + cute.math.log2(sum_of_all)
        cute.arch.sync_threads()
        for step in cutlass.range_constexpr(ROWS * chunks // THREADS):
            place = step * THREADS + thread
            row = first_row + place // chunks
            if row < rows:
                chunk = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
                cute.autovec_copy(cute.local_tile(queries[place // chunks, None], (VECTOR,), (place % chunks,)), chunk)
                target = out[first_query + row, head, None]
                cute.autovec_copy(chunk, cute.local_tile(target, (VECTOR,), (place % chunks,)))


@cute.jit
def prefill(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    query_offsets: cute.Tensor,
    key_offsets: cute.Tensor,
    scale: cutlass.Float32,
    out: cute.Tensor,
    lse: cute.Tensor,
    stream,
):
    blocks = q.shape[0] // ROWS + query_offsets.shape[0] - 1
    prefill_kernel(q, k, v, query_offsets, key_offsets, scale, out, lse).launch(
        grid=(blocks, q.shape[1], 1), block=(THREADS, 1, 1), stream=stream
    )


def compile_for(arch: str, heads: int = 16, key_size: int = 192, value_size: int = 128):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert key_size % (16 * GROUP) == 0 and value_size % 16 == 0 and value_size <= key_size
    queries, keys, offsets = cute.sym_int(), cute.sym_int(), cute.sym_int()

    def fake(dtype, *shape: int):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    return cute.compile(
        prefill,
        fake(cutlass.BFloat16, queries, heads, key_size),
        fake(cutlass.BFloat16, keys, heads, key_size),
        fake(cutlass.BFloat16, keys, heads, value_size),
        fake(cutlass.Int32, offsets),
        fake(cutlass.Int32, offsets),
        cutlass.Float32(0.0),
        fake(cutlass.BFloat16, queries, heads, value_size),
        fake(cutlass.Float32, queries, heads),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, heads: int, key_size: int, value_size: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", heads, key_size, value_size)


def solve(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    queries, heads, key_size = q.shape
    output = torch.empty(queries, heads, v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.empty(queries, heads, dtype=torch.float32, device=q.device)
    kernel = kernel_for(q.device, heads, key_size, v.shape[2])
    kernel(q, k, v, qo_indptr, kv_indptr, sm_scale / math.log(2), output, lse)
    return output, lse
