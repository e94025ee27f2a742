"""p65, the diagonal blocks of Mamba-2's scan, in CuTe DSL: one kernel, a thread block for one chunk of one head.

Products of 16 x 8 x 16 on tensor cores. A warp takes 16 rows of tokens at a time, early and late ones alike, and goes
along the columns up to the diagonal: C times B, the decays, and the result, rounded to bfloat16, is at once the left
operand of the product with the inputs. B and C come from global memory, where the L1 cache holds them; the inputs lie
in shared memory with two tokens of a channel side by side.

The order in which a product runs through its states, and which channel is which column, is free: a thread's share of
them is consecutive in memory.
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
LENGTH = 128  # of a chunk, a token a thread
SEGMENT = 8  # tokens whose log-decays are summed up first
PADDING = 2  # in words: neighbouring rows lie in different banks of shared memory
LOG2_E = 1.4426950408889634


@cute.jit
def load_inputs(inputs: cute.Tensor, shared: cute.Tensor, thread: cutlass.Int32):
    """Two tokens a row; of each channel, both tokens side by side."""
    tokens = cute.make_rmem_tensor((VECTOR, 2), cutlass.BFloat16)
    pairs = cute.make_rmem_tensor((4, VECTOR // 2), cutlass.BFloat16)
    for turn in cutlass.range_constexpr(2 * inputs.shape[1] // 32):
        row, place = thread // 4 + turn % 2 * 32, thread % 4 + turn // 2 * 4
        for odd in cutlass.range_constexpr(2):
            cute.autovec_copy(cute.local_tile(inputs[2 * row + odd, None], (VECTOR,), (place,)), tokens[None, odd])
        for v in cutlass.range_constexpr(VECTOR // 2):
            for e in cutlass.range_constexpr(4):
                pairs[e, v] = tokens[2 * v + e // 2, e % 2]
            cute.autovec_copy(pairs[None, v], cute.local_tile(shared[row, None], (4,), (place * 4 + v,)))


@cute.jit
def sum_decays(log_decay: cute.Tensor, step: cute.Tensor, segment: cute.Tensor, sums: cute.Tensor, thread):
    """Running sums of 128 log-decays, to base 2: within segments of 8, then over the segments before."""
    step[thread] = log_decay[thread].to(cutlass.Float32) * LOG2_E
    cute.arch.sync_threads()
    total = cutlass.Float32(0.0)
    for s in cutlass.range_constexpr(SEGMENT):
        if s <= thread % SEGMENT:
            total += step[thread // SEGMENT * SEGMENT + s]
    if thread % SEGMENT == SEGMENT - 1:
        segment[thread // SEGMENT] = total
    cute.arch.sync_threads()
    for s in cutlass.range_constexpr(LENGTH // SEGMENT):
        if s < thread // SEGMENT:
            total += segment[s]
    sums[thread] = total
    cute.arch.sync_threads()


@cute.kernel
def diagonal_kernel(
    inputs: cute.Tensor, log_decay: cute.Tensor, keys: cute.Tensor, queries: cute.Tensor, out: cute.Tensor
):
    thread, _, _ = cute.arch.thread_idx()
    head, chunk, sequence = cute.arch.block_idx()
    heads, head_size = cutlass.const_expr(inputs.shape[3]), cutlass.const_expr(inputs.shape[4])
    group = head // cutlass.const_expr(heads // keys.shape[3])
    vectors = cutlass.const_expr(keys.shape[4] // 32)
    keys, queries = keys[sequence, chunk, None, group, None], queries[sequence, chunk, None, group, None]

    memory = cutlass.utils.SmemAllocator()
    width = cutlass.const_expr(2 * (head_size + PADDING))
    shared = memory.allocate_tensor(cutlass.BFloat16, cute.make_layout((LENGTH // 2, width), stride=(width, 1)), 16)
    words = cute.recast_tensor(shared, cutlass.Int32)
    step = memory.allocate_tensor(cutlass.Float32, cute.make_layout(LENGTH), 16)
    segment = memory.allocate_tensor(cutlass.Float32, cute.make_layout(LENGTH // SEGMENT), 16)
    sums = memory.allocate_tensor(cutlass.Float32, cute.make_layout(LENGTH), 16)
    load_inputs(inputs[sequence, chunk, None, head, None], shared, thread)
    sum_decays(log_decay[sequence, head, chunk, None], step, segment, sums, thread)

    multiply = cute.make_mma_atom(warp.MmaF16BF16Op(cutlass.BFloat16, cutlass.Float32, (16, 8, 16)))
    lane_row, lane_column = thread % 32 // 4, thread % 4  # of this thread in a fragment
    query = cute.make_rmem_tensor((VECTOR, vectors, 2), cutlass.BFloat16)
    key = cute.make_rmem_tensor((VECTOR, vectors, 2), cutlass.BFloat16)
    left = cute.make_rmem_tensor(8, cutlass.BFloat16)
    right = cute.make_rmem_tensor(4, cutlass.BFloat16)
    query_words, key_words = cute.recast_tensor(query, cutlass.Int32), cute.recast_tensor(key, cutlass.Int32)
    left_words, right_words = cute.recast_tensor(left, cutlass.Int32), cute.recast_tensor(right, cutlass.Int32)
    score = cute.make_rmem_tensor((4, 2), cutlass.Float32)
    y = cute.make_rmem_tensor((4, 4, head_size // 32), cutlass.Float32)
    rounded = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    for turn in cutlass.range_constexpr(LENGTH // (16 * WARPS)):
        tile = turn * WARPS + thread // 32
        if cutlass.const_expr(turn % 2 == 1):
            tile = turn * WARPS + WARPS - 1 - thread // 32
        for half in cutlass.range_constexpr(2):
            row = tile * 16 + half * 8 + lane_row
            for k in cutlass.range_constexpr(vectors):
                source = cute.local_tile(queries[row, None], (VECTOR,), (k * 4 + lane_column,))
                cute.autovec_copy(source, query[None, k, half])
        y.fill(0.0)
        for column in cutlass.range(tile + 1):
            for u in cutlass.range_constexpr(2):
                token = column * 16 + u * 8 + lane_row
                for k in cutlass.range_constexpr(vectors):
                    source = cute.local_tile(keys[token, None], (VECTOR,), (k * 4 + lane_column,))
                    cute.autovec_copy(source, key[None, k, u])
            score.fill(0.0)
            for u in cutlass.range_constexpr(2):
                for k in cutlass.range_constexpr(vectors):
                    for s in cutlass.range_constexpr(2):
                        for i in cutlass.range_constexpr(4):
                            left_words[i] = query_words[2 * s + i // 2, k, i % 2]
                        for i in cutlass.range_constexpr(2):
                            right_words[i] = key_words[2 * s + i, k, u]
                        cute.mma_atom_call(multiply, score[None, u], left, right, score[None, u])
            for u in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(4):
                    row, token = tile * 16 + i // 2 * 8 + lane_row, column * 16 + u * 8 + lane_column * 2 + i % 2
                    score[i, u] = score[i, u] * cute.math.exp2(sums[row] - sums[token], fastmath=True)
                    if token > row:
                        score[i, u] = 0.0
            left.store(score.load().reshape(8).to(cutlass.BFloat16))
            for q in cutlass.range_constexpr(head_size // 32):
                for s in cutlass.range_constexpr(4):
                    channel = q * 32 + lane_row // 2 * 8 + s * 2 + lane_row % 2
                    for i in cutlass.range_constexpr(2):
                        right_words[i] = words[column * 8 + i * 4 + lane_column, channel]
                    cute.mma_atom_call(multiply, y[None, s, q], left, right, y[None, s, q])
        for half in cutlass.range_constexpr(2):
            row = tile * 16 + half * 8 + lane_row
            for q in cutlass.range_constexpr(head_size // 32):
                for e in cutlass.range_constexpr(VECTOR):
                    rounded[e] = y[2 * half + e % 2, e // 2, q].to(cutlass.BFloat16)
                target = out[sequence, chunk, row, head, None]
                cute.autovec_copy(rounded, cute.local_tile(target, (VECTOR,), (q * 4 + lane_column,)))


@cute.jit
def multiply_diagonals(
    inputs: cute.Tensor, log_decay: cute.Tensor, keys: cute.Tensor, queries: cute.Tensor, out: cute.Tensor, stream
):
    diagonal_kernel(inputs, log_decay, keys, queries, out).launch(
        grid=(inputs.shape[3], inputs.shape[1], inputs.shape[0]), block=(THREADS, 1, 1), stream=stream
    )


def compile_for(arch: str, heads: int = 128, groups: int = 8, head_size: int = 128, state_size: int = 128):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert head_size % 32 == 0 and state_size % 32 == 0
    batch, chunks = cute.sym_int(), cute.sym_int()

    def fake(*shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(cutlass.BFloat16, shape, stride_order=order, assumed_align=16)

    return cute.compile(
        multiply_diagonals,
        fake(batch, chunks, LENGTH, heads, head_size),
        fake(batch, heads, chunks, LENGTH),
        fake(batch, chunks, LENGTH, groups, state_size),
        fake(batch, chunks, LENGTH, groups, state_size),
        fake(batch, chunks, LENGTH, heads, head_size),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, heads: int, groups: int, head_size: int, state_size: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", heads, groups, head_size, state_size)


def solve(hidden_states: torch.Tensor, a_cumsum: torch.Tensor, B: torch.Tensor, C: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(hidden_states)
    heads, head_size = hidden_states.shape[3:]
    groups, state_size = B.shape[3:]
    kernel_for(out.device, heads, groups, head_size, state_size)(hidden_states, a_cumsum, B, C, out)
    return out
