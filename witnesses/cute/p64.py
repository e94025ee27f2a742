"""p64, Mamba-2's scan from a given state, in CuTe DSL: one kernel that goes through a sequence in chunks of 64 tokens.

A thread block has 32 channels of one head, with their state in registers from the first chunk to the last; all products
are 16 x 8 x 16 on tensor cores. A warp has 16 tokens of a chunk and a quarter of the states. For its tokens it reads
the state, which lies rounded in shared memory, and adds what the chunk's own tokens contribute: C times B, the decays,
and the result, rounded, is at once the left operand of the product with the inputs. Then its quarter of the state takes
up the chunk. Right operands that pair two tokens lie in shared memory with these side by side; B and C for the scores
come from global memory, where the L1 cache holds them.

The order in which a product runs through its states, and which channel or state is which row or column, is free: a
thread's share of them is consecutive in memory.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.nvgpu import warp
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

VECTOR = 8  # bfloat16 values in 16 bytes
THREADS = 128
WARPS = 4
CHUNK = 64  # tokens, 16 a warp
CHANNELS = 32  # of a head, a thread block's share
PADDING = 4  # neighbouring rows lie in different banks of shared memory
STATE_PADDING = 32
SEGMENT = 8  # tokens whose log-decays are summed up first
LOG2_E = 1.4426950408889634


@cute.jit
def power(x):
    return cute.math.exp2(x, fastmath=True)


@cute.jit
def channel_of(row: cutlass.Int32, tile: cutlass.Constexpr[int]) -> cutlass.Int32:
    """The channel, or state, of 32 that is row or column `row` of the `tile`-th fragment of 8."""
    return row // 2 * 8 + tile * 2 + row % 2


@cute.jit
def load_pairs(
    source: cute.Tensor,
    shared: cute.Tensor,
    thread: cutlass.Int32,
    first_place: cutlass.Int32,
    turns: cutlass.Constexpr[int],
):
    """Two tokens a row, and of each channel or state both tokens side by side."""
    tokens = cute.make_rmem_tensor((VECTOR, 2), cutlass.BFloat16)
    pairs = cute.make_rmem_tensor((4, VECTOR // 2), cutlass.BFloat16)
    row = thread // 4
    for turn in cutlass.range_constexpr(turns):
        place = thread % 4 + turn * 4
        for odd in cutlass.range_constexpr(2):
            tile = cute.local_tile(source[2 * row + odd, None], (VECTOR,), (first_place + place,))
            cute.autovec_copy(tile, tokens[None, odd])
        for v in cutlass.range_constexpr(VECTOR // 2):
            for e in cutlass.range_constexpr(4):
                pairs[e, v] = tokens[2 * v + e // 2, e % 2]
            cute.autovec_copy(pairs[None, v], cute.local_tile(shared[row, None], (4,), (place * 4 + v,)))


@cute.jit
def sum_decays(log_decay: cute.Tensor, segment: cute.Tensor, sums: cute.Tensor, thread: cutlass.Int32):
    """Running sums of a chunk's log-decays, to base 2; on the way it waits for all that was written before."""
    total = cutlass.Float32(0.0)
    if thread < CHUNK:
        for e in cutlass.range_constexpr(SEGMENT):
            if e <= thread % SEGMENT:
                total += log_decay[thread // SEGMENT * SEGMENT + e].to(cutlass.Float32) * LOG2_E
        if thread % SEGMENT == SEGMENT - 1:
            segment[thread // SEGMENT] = total
    cute.arch.sync_threads()
    if thread < CHUNK:
        for s in cutlass.range_constexpr(CHUNK // SEGMENT):
            if s < thread // SEGMENT:
                total += segment[s]
        sums[thread] = total
    cute.arch.sync_threads()


@cute.jit
def copy_state(state: cute.Tensor, target: cute.Tensor, first_place: cutlass.Int32, lane_row, lane_column):
    """A warp's share of the state, rounded, to the rows of `target`."""
    vector = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    for m in cutlass.range_constexpr(2):
        for half in cutlass.range_constexpr(2):
            row = target[channel_of(lane_row, 2 * m + half), None]
            for q in cutlass.range_constexpr(state.shape[2]):
                for e in cutlass.range_constexpr(VECTOR):
                    vector[e] = state[2 * half + e % 2, e // 2, q, m].to(cutlass.BFloat16)
                cute.autovec_copy(vector, cute.local_tile(row, (VECTOR,), (first_place + q * 4 + lane_column,)))


@cute.kernel
def scan_kernel(
    inputs: cute.Tensor,
    log_decay: cute.Tensor,
    keys: cute.Tensor,
    queries: cute.Tensor,
    skip: cute.Tensor,
    state_before: cute.Tensor,
    out: cute.Tensor,
    state_after: cute.Tensor,
):
    thread, _, _ = cute.arch.thread_idx()
    part, head, sequence = cute.arch.block_idx()
    heads, state_size = cutlass.const_expr(inputs.shape[2]), cutlass.const_expr(keys.shape[3])
    vectors, blocks = cutlass.const_expr(state_size // 32), cutlass.const_expr(state_size // (32 * WARPS))
    group = head // cutlass.const_expr(heads // keys.shape[2])
    warp_index, lane_row, lane_column = thread // 32, thread % 32 // 4, thread % 4
    length = inputs.shape[1]
    inputs, out = inputs[sequence, None, head, None], out[sequence, None, head, None]
    keys, queries = keys[sequence, None, group, None], queries[sequence, None, group, None]
    direct = skip[head].to(cutlass.Float32)

    memory = cutlass.utils.SmemAllocator()
    b_row = cutlass.const_expr(2 * state_size + PADDING)
    x_row = cutlass.const_expr(2 * CHANNELS + PADDING)
    h_row = cutlass.const_expr(state_size + STATE_PADDING)
    b_pairs = memory.allocate_tensor(cutlass.BFloat16, cute.make_layout((CHUNK // 2, b_row), stride=(b_row, 1)), 16)
    x_pairs = memory.allocate_tensor(cutlass.BFloat16, cute.make_layout((CHUNK // 2, x_row), stride=(x_row, 1)), 16)
    rounded = memory.allocate_tensor(cutlass.BFloat16, cute.make_layout((CHANNELS, h_row), stride=(h_row, 1)), 16)
    segment = memory.allocate_tensor(cutlass.Float32, cute.make_layout(CHUNK // SEGMENT), 16)
    sums = memory.allocate_tensor(cutlass.Float32, cute.make_layout(CHUNK), 16)
    b_words, x_words = cute.recast_tensor(b_pairs, cutlass.Int32), cute.recast_tensor(x_pairs, cutlass.Int32)

    multiply = cute.make_mma_atom(warp.MmaF16BF16Op(cutlass.BFloat16, cutlass.Float32, (16, 8, 16)))
    vector = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    query = cute.make_rmem_tensor((VECTOR, vectors, 2), cutlass.BFloat16)
    key = cute.make_rmem_tensor((VECTOR, vectors, 2), cutlass.BFloat16)
    left = cute.make_rmem_tensor((8, 2), cutlass.BFloat16)
    right = cute.make_rmem_tensor(4, cutlass.BFloat16)
    scaled = cute.make_rmem_tensor(8, cutlass.Float32)
    vector_words = cute.recast_tensor(vector, cutlass.Int32)
    query_words, key_words = cute.recast_tensor(query, cutlass.Int32), cute.recast_tensor(key, cutlass.Int32)
    left_words, right_words = cute.recast_tensor(left, cutlass.Int32), cute.recast_tensor(right, cutlass.Int32)
    # In two sums each, so that fewer products wait for each other.
    score = cute.make_rmem_tensor((4, 2, 2), cutlass.Float32)
    weight = cute.make_rmem_tensor((4, 2), cutlass.Float32)
    y = cute.make_rmem_tensor((4, 4), cutlass.Float32)
    # Rows of 16 channels in two halves, columns of 8 states in four tiles of 32.
    state = cute.make_rmem_tensor((4, 4, blocks, 2), cutlass.Float32)
    first_place = warp_index * (blocks * 4)

    channels = part * CHANNELS
    for m in cutlass.range_constexpr(2):
        for half in cutlass.range_constexpr(2):
            before = state_before[sequence, head, channels + channel_of(lane_row, 2 * m + half), None]
            for q in cutlass.range_constexpr(blocks):
                cute.autovec_copy(cute.local_tile(before, (VECTOR,), (first_place + q * 4 + lane_column,)), vector)
                for e in cutlass.range_constexpr(VECTOR):
                    state[2 * half + e % 2, e // 2, q, m] = vector[e].to(cutlass.Float32)
    copy_state(state, rounded, first_place, lane_row, lane_column)

    for chunk in cutlass.range(length // CHUNK):
        first = chunk * CHUNK
        load_pairs(cute.domain_offset((first, 0), keys), b_pairs, thread, 0, vectors)
        load_pairs(cute.domain_offset((first, 0), inputs), x_pairs, thread, part * 4, 1)
        for half in cutlass.range_constexpr(2):
            query_row = queries[first + warp_index * 16 + half * 8 + lane_row, None]
            for k in cutlass.range_constexpr(vectors):
                cute.autovec_copy(cute.local_tile(query_row, (VECTOR,), (k * 4 + lane_column,)), query[None, k, half])
        sum_decays(cute.domain_offset((first,), log_decay[sequence, head, None]), segment, sums, thread)

        # What the state before the chunk gives its tokens.
        y.fill(0.0)
        for k in cutlass.range_constexpr(vectors):
            for s in cutlass.range_constexpr(4):
                state_row = rounded[channel_of(lane_row, s), None]
                cute.autovec_copy(cute.local_tile(state_row, (VECTOR,), (k * 4 + lane_column,)), vector)
                for step in cutlass.range_constexpr(2):
                    for i in cutlass.range_constexpr(4):
                        left_words[i, 0] = query_words[2 * step + i // 2, k, i % 2]
                    for i in cutlass.range_constexpr(2):
                        right_words[i] = vector_words[2 * step + i]
                    cute.mma_atom_call(multiply, y[None, s], left[None, 0], right, y[None, s])
        for half in cutlass.range_constexpr(2):
            factor = power(sums[warp_index * 16 + half * 8 + lane_row])
            for s in cutlass.range_constexpr(4):
                for e in cutlass.range_constexpr(2):
                    y[2 * half + e, s] = y[2 * half + e, s] * factor
        # What the tokens of the chunk give each other.
        for column in cutlass.range(warp_index + 1):
            for u in cutlass.range_constexpr(2):
                key_row = keys[first + column * 16 + u * 8 + lane_row, None]
                for k in cutlass.range_constexpr(vectors):
                    cute.autovec_copy(cute.local_tile(key_row, (VECTOR,), (k * 4 + lane_column,)), key[None, k, u])
            score.fill(0.0)
            for u in cutlass.range_constexpr(2):
                for k in cutlass.range_constexpr(vectors):
                    for step in cutlass.range_constexpr(2):
                        for i in cutlass.range_constexpr(4):
                            left_words[i, 0] = query_words[2 * step + i // 2, k, i % 2]
                        for i in cutlass.range_constexpr(2):
                            right_words[i] = key_words[2 * step + i, k, u]
                        target = score[None, u, step]
                        cute.mma_atom_call(multiply, target, left[None, 0], right, target)
            for u in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(4):
                    row = warp_index * 16 + i // 2 * 8 + lane_row
                    token = column * 16 + u * 8 + lane_column * 2 + i % 2
                    weight[i, u] = (score[i, u, 0] + score[i, u, 1]) * power(sums[row] - sums[token])
                    if token > row:
                        weight[i, u] = 0.0
            left[None, 0].store(weight.load().reshape(8).to(cutlass.BFloat16))
            for s in cutlass.range_constexpr(4):
                for i in cutlass.range_constexpr(2):
                    right_words[i] = x_words[column * 8 + i * 4 + lane_column, channel_of(lane_row, s)]
                cute.mma_atom_call(multiply, y[None, s], left[None, 0], right, y[None, s])
        for half in cutlass.range_constexpr(2):
            own = first + warp_index * 16 + half * 8 + lane_row
            own_place = (part * 4 + lane_column,)
            cute.autovec_copy(cute.local_tile(inputs[own, None], (VECTOR,), own_place), vector)
            for e in cutlass.range_constexpr(VECTOR):
                answer = y[2 * half + e % 2, e // 2] + direct * vector[e].to(cutlass.Float32)
                vector[e] = answer.to(cutlass.BFloat16)
            cute.autovec_copy(vector, cute.local_tile(out[own, None], (VECTOR,), own_place))

        # The state takes up the chunk.
        last = sums[CHUNK - 1]
        state.store(state.load() * power(last))
        for column in cutlass.range_constexpr(CHUNK // 16):
            for m in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(4):
                    row = column * 8 + i // 2 * 4 + lane_column
                    left_words[i, m] = x_words[row, channel_of(lane_row, 2 * m + i % 2)]
                for i in cutlass.range_constexpr(8):
                    token = column * 16 + i // 4 * 8 + lane_column * 2 + i % 2
                    scaled[i] = left[i, m].to(cutlass.Float32) * power(last - sums[token])
                left[None, m].store(scaled.load().to(cutlass.BFloat16))
            for q in cutlass.range_constexpr(blocks):
                for s in cutlass.range_constexpr(4):
                    place = warp_index * (blocks * 32) + q * 32 + channel_of(lane_row, s)
                    for i in cutlass.range_constexpr(2):
                        right_words[i] = b_words[column * 8 + i * 4 + lane_column, place]
                    for m in cutlass.range_constexpr(2):
                        target = state[None, s, q, m]
                        cute.mma_atom_call(multiply, target, left[None, m], right, target)
        cute.arch.sync_threads()
        copy_state(state, rounded, first_place, lane_row, lane_column)

    after = cute.domain_offset((channels, 0), state_after[sequence, head, None, None])
    copy_state(state, after, first_place, lane_row, lane_column)


@cute.jit
def scan(
    inputs: cute.Tensor,
    log_decay: cute.Tensor,
    keys: cute.Tensor,
    queries: cute.Tensor,
    skip: cute.Tensor,
    state_before: cute.Tensor,
    out: cute.Tensor,
    state_after: cute.Tensor,
    stream,
):
    scan_kernel(inputs, log_decay, keys, queries, skip, state_before, out, state_after).launch(
        grid=(inputs.shape[3] // CHANNELS, inputs.shape[2], inputs.shape[0]), block=(THREADS, 1, 1), stream=stream
    )


def compile_for(arch: str, heads: int = 16, groups: int = 1, head_size: int = 64, state_size: int = 256):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert head_size % CHANNELS == 0 and state_size % (32 * WARPS) == 0
    batch, length = cute.sym_int(), cute.sym_int()

    def fake(*shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(cutlass.BFloat16, shape, stride_order=order, assumed_align=16)

    return cute.compile(
        scan,
        fake(batch, length, heads, head_size),
        fake(batch, heads, length),
        fake(batch, length, groups, state_size),
        fake(batch, length, groups, state_size),
        fake(heads),
        fake(batch, heads, head_size, state_size),
        fake(batch, length, heads, head_size),
        fake(batch, heads, head_size, state_size),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, heads: int, groups: int, head_size: int, state_size: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", heads, groups, head_size, state_size)


def solve(
    hidden_states: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    ssm_state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    heads, head_size = hidden_states.shape[2:]
    groups, state_size = B.shape[2:]
    assert hidden_states.shape[1] % CHUNK == 0
    output, final_state = torch.empty_like(hidden_states), torch.empty_like(ssm_state)
    kernel = kernel_for(output.device, heads, groups, head_size, state_size)
    kernel(hidden_states, A, B, C, D, ssm_state, output, final_state)
    return output.flatten(2), final_state
