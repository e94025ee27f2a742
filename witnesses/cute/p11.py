"""p11, vision attention over packed sequences, in CuTe DSL. The two projections stay with eager PyTorch.

One kernel rotates queries and keys where they lie. The other is flash attention: a thread block has 64 queries of a
head, a warp 16 of them, and goes through the sequence's keys, 64 at a time: the products run on the tensor cores
(m16n8k16, float32 sums, channels padded with zeros), the softmax runs along in float32, and the next keys and values
are copied to shared memory meanwhile. Which sequence a block belongs to is found on the device: a sequence's blocks
begin at a number that follows from its offset alone.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from torch.nn.functional import linear

WARPS = 4
THREADS = 32 * WARPS
ROWS = 16 * WARPS
KEYS = 64
VECTOR = 8  # bfloat16 values in 16 bytes
PADDING = 8  # so much longer are rows in shared memory: eight of them, 16 bytes each, meet all its banks
PART = 4  # values that a thread rotates together
ROTATORS = 256
LOG2_E = 1.4426950408889634
LOWEST = -1.0e30
MASKED = -3.0e38  # so far below `LOWEST` that its power of two is zero


@cute.kernel
def rotate_kernel(projected: cute.Tensor, cos: cute.Tensor, sin: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    tokens, heads, size = cos.shape
    parts = cutlass.const_expr(size // (2 * PART))  # of the halves of a head
    place = block * ROTATORS + thread
    token, head, part = place // (heads * parts), place // parts % heads, place % parts
    if token < tokens:
        values = cute.make_rmem_tensor((PART, 2, 2), cutlass.BFloat16)  # half, query or key
        cosines = cute.make_rmem_tensor((PART, 2), cutlass.BFloat16)
        sines = cute.make_rmem_tensor((PART, 2), cutlass.BFloat16)
        for i in cutlass.range_constexpr(2):
            for half in cutlass.range_constexpr(2):
                source = cute.local_tile(projected[token, i, head, None], (PART,), (half * parts + part,))
                cute.autovec_copy(source, values[None, half, i])
        for half in cutlass.range_constexpr(2):
            cute.autovec_copy(
                cute.local_tile(cos[token, head, None], (PART,), (half * parts + part,)), cosines[None, half]
            )
            cute.autovec_copy(
                cute.local_tile(sin[token, head, None], (PART,), (half * parts + part,)), sines[None, half]
            )
        cosine_a, cosine_b = (cosines[None, half].load().to(cutlass.Float32) for half in range(2))
        sine_a, sine_b = (sines[None, half].load().to(cutlass.Float32) for half in range(2))
        for i in cutlass.range_constexpr(2):
            a = values[None, 0, i].load().to(cutlass.Float32)
            b = values[None, 1, i].load().to(cutlass.Float32)
            values[None, 0, i].store((a * cosine_a - b * sine_a).to(cutlass.BFloat16))
            values[None, 1, i].store((b * cosine_b + a * sine_b).to(cutlass.BFloat16))
            for half in cutlass.range_constexpr(2):
                target = cute.local_tile(projected[token, i, head, None], (PART,), (half * parts + part,))
                cute.autovec_copy(values[None, half, i], target)


@cute.jit
def copy_rows(source: cute.Tensor, first: cutlass.Int32, last: cutlass.Int32, target: cute.Tensor):
    """Starts copying rows from `first` on; past the row `last` it repeats that one."""
    thread, _, _ = cute.arch.thread_idx()
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), cutlass.BFloat16, num_bits_per_copy=128)
    chunks = cutlass.const_expr(source.shape[1] // VECTOR)
    count = cutlass.const_expr(target.shape[0] * chunks)
    for step in cutlass.range_constexpr((count + THREADS - 1) // THREADS):
        place = step * THREADS + thread
        row = cutlass.min(first + place // chunks, last)
        if place < count:
            cute.copy(
                atom,
                cute.local_tile(source[row, None], (VECTOR,), (place % chunks,)),
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
    count: cutlass.Int32,
    scale: cutlass.Float32,
    top: cute.Tensor,
    weight: cute.Tensor,
    total: cute.Tensor,
):
    """Takes in `count` keys. An atom has four values: two neighbouring columns of a row, then the same of the row
    eight further down."""
    thread, _, _ = cute.arch.thread_idx()
    lane, warp_number = thread % 32, thread // 32
    steps = cutlass.const_expr(queries.shape[1] // 16)
    columns = cutlass.const_expr(total.shape[1])
    atom = cute.make_mma_atom(warp.MmaF16BF16Op(cutlass.BFloat16, cutlass.Float32, (16, 8, 16)))
    left = cute.make_rmem_tensor((8,), cutlass.BFloat16)
    right = cute.make_rmem_tensor((4, 2), cutlass.BFloat16)
    matrices = cute.make_tensor(right.iterator, cute.make_layout((8,)))
    logits = cute.make_rmem_tensor((4, KEYS // 8), cutlass.Float32)
    powers = cute.make_rmem_tensor((4, KEYS // 8), cutlass.BFloat16)
    logits.fill(0.0)
    for step in cutlass.range_constexpr(steps):
        load_matrices(queries, warp_number * 16 + lane % 16, step * 2 + lane // 16, left, False)
        for pair in cutlass.range_constexpr(KEYS // 16):
            row = pair * 16 + lane // 16 * 8 + lane % 8
            load_matrices(keys, row, step * 2 + lane // 8 % 2, matrices, False)
            for side in cutlass.range_constexpr(2):
                acc = logits[None, pair * 2 + side]
                cute.mma_atom_call(atom, acc, left, right[None, side], acc)
    if count < KEYS:
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
            load_matrices(values, step * 16 + lane % 16, pair * 2 + lane // 16, matrices, True)
            for side in cutlass.range_constexpr(2):
                acc = total[None, pair * 2 + side]
                cute.mma_atom_call(atom, acc, operand[None, step], right[None, side], acc)


@cute.kernel
def attend_kernel(projected: cute.Tensor, ends: cute.Tensor, scale: cutlass.Float32, out: cute.Tensor):
    """`scale` takes a product to a power of two."""
    thread, _, _ = cute.arch.thread_idx()
    block, head, _ = cute.arch.block_idx()
    lane, warp_number = thread % 32, thread // 32
    size = cutlass.const_expr(out.shape[2])
    padded = cutlass.const_expr((size + 15) // 16 * 16)
    stride = cutlass.const_expr(padded + PADDING)
    chunks = cutlass.const_expr(size // VECTOR)
    columns = cutlass.const_expr(padded // 8)
    # The rows of the queries (later of the output), then twice the keys, then twice the values.
    rows_of_all = cutlass.const_expr(ROWS + 4 * KEYS)
    shared = cutlass.utils.SmemAllocator()
    everything = shared.allocate_tensor(
        cutlass.BFloat16, cute.make_layout((rows_of_all, padded), stride=(stride, 1)), 16
    )
    found = shared.allocate_tensor(cutlass.Int32, cute.make_layout(1), 16)
    queries = cute.make_tensor(everything.iterator, cute.make_layout((ROWS, padded), stride=(stride, 1)))
    stages = cute.make_layout((KEYS, padded, 2), stride=(stride, 1, KEYS * stride))
    keys = cute.make_tensor(everything.iterator + ROWS * stride, stages)
    values = cute.make_tensor(everything.iterator + (ROWS + 2 * KEYS) * stride, stages)
    top = cute.make_rmem_tensor(2, cutlass.Float32)
    weight = cute.make_rmem_tensor(2, cutlass.Float32)
    total = cute.make_rmem_tensor((4, columns), cutlass.Float32)

    for b in cutlass.range(thread, ends.shape[0], THREADS):
        start = cutlass.Int32(0)
        if b > 0:
            start = ends[b - 1].to(cutlass.Int32)
        stop = ends[b].to(cutlass.Int32)
        if start // ROWS + b <= block and stop // ROWS + b + 1 > block:
            found[0] = b
    cute.arch.sync_threads()
    sequence = found[0]
    first = cutlass.Int32(0)
    if sequence > 0:
        first = ends[sequence - 1].to(cutlass.Int32)
    count = ends[sequence].to(cutlass.Int32) - first
    last = first + count - 1
    first_row = (block - (first // ROWS + sequence)) * ROWS
    if first_row < count:
        top.fill(LOWEST)
        weight.fill(0.0)
        total.fill(0.0)
        zeros = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
        zeros.fill(0.0)
        for step in cutlass.range_constexpr((rows_of_all + THREADS - 1) // THREADS):
            row = step * THREADS + thread
            if row < rows_of_all:
                cute.autovec_copy(zeros, cute.local_tile(everything[row, None], (VECTOR,), (columns - 1,)))
        # Where the channels need no padding, the copies come after these zeros.
        cute.arch.sync_threads()
        copy_rows(projected[None, 0, head, None], first + first_row, last, queries)
        copy_rows(projected[None, 1, head, None], first, last, keys[None, None, 0])
        copy_rows(projected[None, 2, head, None], first, last, values[None, None, 0])
        cute.arch.cp_async_commit_group()
        tiles = (count + KEYS - 1) // KEYS
        for tile in cutlass.range(tiles):
            stage = tile % 2
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            if tile + 1 < tiles:
                next_key = first + (tile + 1) * KEYS
                copy_rows(projected[None, 1, head, None], next_key, last, keys[None, None, 1 - stage])
                copy_rows(projected[None, 2, head, None], next_key, last, values[None, None, 1 - stage])
            cute.arch.cp_async_commit_group()
            attend_tile(
                *(queries, keys[None, None, stage], values[None, None, stage], count - tile * KEYS),
                *(scale, top, weight, total),
            )

        # A warp's rows of the queries are its own, and are not needed any more: the output takes their place.
        for half in cutlass.range_constexpr(2):
            tile_row = warp_number * 16 + lane // 4 + 8 * half
            inverse = 1.0 / cute.arch.warp_reduction_sum(weight[half], threads_in_group=4)
            for column in cutlass.range_constexpr(chunks):
                pair = cute.make_rmem_tensor(2, cutlass.Float32)
                rounded = cute.make_rmem_tensor(2, cutlass.BFloat16)
                pair[0] = total[2 * half, column] * inverse
                pair[1] = total[2 * half + 1, column] * inverse
                rounded.store(pair.load().to(cutlass.BFloat16))
                cute.autovec_copy(rounded, cute.local_tile(queries[tile_row, None], (2,), (column * 4 + lane % 4,)))
        cute.arch.sync_threads()
        for step in cutlass.range_constexpr((ROWS * chunks + THREADS - 1) // THREADS):
            place = step * THREADS + thread
            row = first_row + place // chunks
            if place < ROWS * chunks and row < count:
                chunk = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
                cute.autovec_copy(cute.local_tile(queries[place // chunks, None], (VECTOR,), (place % chunks,)), chunk)
                target = out[first + row, head, None]
                cute.autovec_copy(chunk, cute.local_tile(target, (VECTOR,), (place % chunks,)))


@cute.jit
def attend(
    projected: cute.Tensor,
    ends: cute.Tensor,
    cos: cute.Tensor,
    sin: cute.Tensor,
    scale: cutlass.Float32,
    out: cute.Tensor,
    stream,
):
    tokens, heads, size = out.shape
    rotations = tokens * heads * (size // (2 * PART))
    rotate_kernel(projected, cos, sin).launch(
        grid=((rotations + ROTATORS - 1) // ROTATORS, 1, 1), block=(ROTATORS, 1, 1), stream=stream
    )
    attend_kernel(projected, ends, scale, out).launch(
        grid=(tokens // ROWS + ends.shape[0], heads, 1), block=(THREADS, 1, 1), stream=stream
    )


def compile_for(arch: str, heads: int = 16, size: int = 72):
    """Both kernels for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert size % VECTOR == 0
    tokens, sequences = cute.sym_int(), cute.sym_int()

    def fake(dtype, *shape: int):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    return cute.compile(
        attend,
        fake(cutlass.BFloat16, tokens, 3, heads, size),
        fake(cutlass.Int64, sequences),
        fake(cutlass.BFloat16, tokens, heads, size),
        fake(cutlass.BFloat16, tokens, heads, size),
        cutlass.Float32(0.0),
        fake(cutlass.BFloat16, tokens, heads, size),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, heads: int, size: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", heads, size)


def solve(
    hidden_states: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
) -> torch.Tensor:
    tokens, heads, size = cos.shape
    projected = linear(hidden_states, qkv_weight, qkv_bias).view(tokens, 3, heads, size)
    attended = torch.empty_like(cos)
    kernel_for(cos.device, heads, size)(projected, cu_seqlens, cos, sin, size**-0.5 * LOG2_E, attended)
    return linear(attended.view(tokens, -1), proj_weight, proj_bias)
