"""p68, Kimi Delta Attention, in CuTe DSL: one kernel that goes through a sequence token by token.

A column of the state (one value channel, all key channels) needs nothing of the other columns, so it stays in registers
from the first token to the last; 8 threads share 4 of them, 16 key channels each, and a thread block has 64 value
channels of one head. 16 tokens at a time are prepared in shared memory by all threads together: keys and queries are
normalised, and carry the decay since the start of their 16 tokens (and the keys' second form its inverse), so that the
state itself decays only once in 16 tokens.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

VECTOR = 8  # bfloat16 values in 16 bytes
HALF = 4  # float32 values in 16 bytes
LANES = 8  # threads that share a column of the state
COLUMNS = 4  # that they share
THREADS = 128
TOKENS = THREADS // LANES  # that are prepared together: 8 threads have one
VALUES = TOKENS * COLUMNS  # value channels of a thread block
SMALLEST_SQUARE = 1e-24  # of a norm that is divided by


@cute.jit
def load_vectors(row: cute.Tensor, lane: cutlass.Int32, part: cute.Tensor):
    for c in cutlass.range_constexpr(cute.size(part, mode=[1])):
        cute.autovec_copy(cute.local_tile(row, (VECTOR,), (c * LANES + lane,)), part[None, c])


@cute.jit
def to_shared(part: cute.Tensor, row: cute.Tensor, lane: cutlass.Int32):
    """16 bytes of a thread lie beside those of its neighbours: no bank conflicts."""
    for c in cutlass.range_constexpr(cute.size(part, mode=[1])):
        cute.autovec_copy(part[None, c], cute.local_tile(row, (HALF,), (c * LANES + lane,)))


@cute.jit
def from_shared(row: cute.Tensor, lane: cutlass.Int32, part: cute.Tensor):
    for c in cutlass.range_constexpr(cute.size(part, mode=[1])):
        cute.autovec_copy(cute.local_tile(row, (HALF,), (c * LANES + lane,)), part[None, c])


@cute.jit
def summed(products) -> cutlass.Float32:
    total = products.reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
    return cute.arch.warp_reduction_sum(total, threads_in_group=LANES)


@cute.jit
def inverse_norm(square: cutlass.Float32) -> cutlass.Float32:
    return cute.math.rsqrt(cute.arch.fmax(square, cutlass.Float32(SMALLEST_SQUARE)))


@cute.kernel
def sequence_kernel(
    query: cute.Tensor,
    key: cute.Tensor,
    value: cute.Tensor,
    log_decay: cute.Tensor,
    strength: cute.Tensor,
    out: cute.Tensor,
):
    thread, _, _ = cute.arch.thread_idx()
    part, head, prompt = cute.arch.block_idx()
    group, lane = thread // LANES, thread % LANES  # the token that is prepared, then the four columns
    key_head = head // cutlass.const_expr(value.shape[2] // key.shape[2])
    key_size = cutlass.const_expr(key.shape[3])
    chunks = cutlass.const_expr(key_size // (VECTOR * LANES))
    length = key.shape[1]

    # Of every token: keys and queries with the decay, keys with its inverse. The first holds the log-decay before.
    shared = cutlass.utils.SmemAllocator()
    rows = cute.make_layout((TOKENS, key_size), stride=(key_size, 1))
    shared_k = shared.allocate_tensor(cutlass.Float32, rows, 16)
    shared_q = shared.allocate_tensor(cutlass.Float32, rows, 16)
    shared_pushed = shared.allocate_tensor(cutlass.Float32, rows, 16)
    shared_v = shared.allocate_tensor(cutlass.Float32, cute.make_layout((TOKENS, VALUES), stride=(VALUES, 1)), 16)
    shared_decay = shared.allocate_tensor(cutlass.Float32, cute.make_layout(key_size), 16)  # of all 16 tokens
    overlaps = shared.allocate_tensor(cutlass.Float32, cute.make_layout(TOKENS), 16)  # query times key
    strengths = shared.allocate_tensor(cutlass.Float32, cute.make_layout(TOKENS), 16)

    next_k = cute.make_rmem_tensor((VECTOR, chunks), cutlass.BFloat16)
    next_q = cute.make_rmem_tensor((VECTOR, chunks), cutlass.BFloat16)
    next_g = cute.make_rmem_tensor((VECTOR, chunks), cutlass.BFloat16)
    next_v = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    state = cute.make_rmem_tensor((HALF, 2 * chunks, COLUMNS), cutlass.Float32)
    first = cute.make_rmem_tensor((HALF, 2 * chunks), cutlass.Float32)
    second = cute.make_rmem_tensor((HALF, 2 * chunks), cutlass.Float32)
    third = cute.make_rmem_tensor((HALF, 2 * chunks), cutlass.Float32)
    v = cute.make_rmem_tensor(COLUMNS, cutlass.Float32)
    values = cute.make_rmem_tensor((HALF, VECTOR // HALF), cutlass.Float32)
    answers = cute.make_rmem_tensor(COLUMNS, cutlass.Float32)
    result = cute.make_rmem_tensor(COLUMNS, cutlass.BFloat16)
    state.fill(0.0)

    token = cutlass.min(group, length - 1)
    load_vectors(key[prompt, token, key_head, None], lane, next_k)
    load_vectors(query[prompt, token, key_head, None], lane, next_q)
    load_vectors(log_decay[prompt, token, head, None], lane, next_g)
    cute.autovec_copy(cute.local_tile(value[prompt, token, head, None], (VECTOR,), (part * LANES + lane,)), next_v)
    next_beta = strength[prompt, token, head]
    for turn in cutlass.range((length + TOKENS - 1) // TOKENS):
        # The decay since the start of the 16 tokens, channel by channel.
        for i in cutlass.range_constexpr(cute.size(next_g)):
            first[i] = next_g[i].to(cutlass.Float32)
        to_shared(first, shared_k[group, None], lane)
        cute.arch.sync_threads()
        if thread < key_size:
            total = cutlass.Float32(0.0)
            for t in cutlass.range_constexpr(TOKENS):
                total += shared_k[t, thread]
                shared_k[t, thread] = total

        for i in cutlass.range_constexpr(cute.size(next_k)):
            second[i] = next_k[i].to(cutlass.Float32)
            third[i] = next_q[i].to(cutlass.Float32)
        k, q = second.load(), third.load()
        key_scale = inverse_norm(summed(k * k))
        query_scale = inverse_norm(summed(q * q)) * cutlass.Float32(key_size**-0.5)
        overlap = summed(k * q) * key_scale * query_scale
        if lane == 0:
            overlaps[group] = overlap
            strengths[group] = next_beta.to(cutlass.Float32)
        for i in cutlass.range_constexpr(VECTOR):
            values[i] = next_v[i].to(cutlass.Float32)
        for i in cutlass.range_constexpr(VECTOR // HALF):
            place = (lane * (VECTOR // HALF) + i,)
            cute.autovec_copy(values[None, i], cute.local_tile(shared_v[group, None], (HALF,), place))
        cute.arch.sync_threads()
        from_shared(shared_k[group, None], lane, first)
        decay = cute.math.exp(first.load())
        k = k * key_scale
        third.store(q * query_scale * decay)
        second.store(k / decay)
        to_shared(third, shared_q[group, None], lane)
        to_shared(second, shared_pushed[group, None], lane)
        first.store(decay)
        if group == TOKENS - 1:
            to_shared(first, shared_decay, lane)
        first.store(k * decay)
        to_shared(first, shared_k[group, None], lane)
        cute.arch.sync_threads()

        token = cutlass.min(turn * TOKENS + TOKENS + group, length - 1)
        load_vectors(key[prompt, token, key_head, None], lane, next_k)
        load_vectors(query[prompt, token, key_head, None], lane, next_q)
        load_vectors(log_decay[prompt, token, head, None], lane, next_g)
        cute.autovec_copy(cute.local_tile(value[prompt, token, head, None], (VECTOR,), (part * LANES + lane,)), next_v)
        next_beta = strength[prompt, token, head]

        for t in cutlass.range(cutlass.min(cutlass.Int32(TOKENS), length - turn * TOKENS)):
            from_shared(shared_k[t, None], lane, first)
            from_shared(shared_q[t, None], lane, second)
            from_shared(shared_pushed[t, None], lane, third)
            cute.autovec_copy(cute.local_tile(shared_v[t, None], (COLUMNS,), (group,)), v)
            beta, overlap = strengths[t], overlaps[t]
            for column in cutlass.range_constexpr(COLUMNS):
                rows_before = state[None, None, column].load()
                predicted = summed(rows_before * first.load())
                answer = summed(rows_before * second.load())
                correction = (v[column] - predicted) * beta
                state[None, None, column].store(rows_before + third.load() * correction)
                answers[column] = answer + correction * overlap
            result.store(answers.load().to(cutlass.BFloat16))
            if lane == 0:
                row = out[prompt, turn * TOKENS + t, head, None]
                cute.autovec_copy(result, cute.local_tile(row, (COLUMNS,), (part * TOKENS + group,)))
        from_shared(shared_decay, lane, first)
        for column in cutlass.range_constexpr(COLUMNS):
            state[None, None, column].store(state[None, None, column].load() * first.load())
        cute.arch.sync_threads()


@cute.jit
def go_through_sequences(
    query: cute.Tensor,
    key: cute.Tensor,
    value: cute.Tensor,
    log_decay: cute.Tensor,
    strength: cute.Tensor,
    out: cute.Tensor,
    stream,
):
    sequence_kernel(query, key, value, log_decay, strength, out).launch(
        grid=(value.shape[3] // VALUES, value.shape[2], value.shape[0]), block=(THREADS, 1, 1), stream=stream
    )


def compile_for(arch: str, key_heads: int = 16, value_heads: int = 16, key_size: int = 128, value_size: int = 128):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert key_size in {64, 128} and value_size % VALUES == 0
    batch, length = cute.sym_int(), cute.sym_int()

    def fake(*shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(cutlass.BFloat16, shape, stride_order=order, assumed_align=16)

    return cute.compile(
        go_through_sequences,
        fake(batch, length, key_heads, key_size),
        fake(batch, length, key_heads, key_size),
        fake(batch, length, value_heads, value_size),
        fake(batch, length, value_heads, key_size),
        fake(batch, length, value_heads),
        fake(batch, length, value_heads, value_size),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, key_heads: int, value_heads: int, key_size: int, value_size: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", key_heads, value_heads, key_size, value_size)


def solve(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    output = torch.empty_like(v)
    kernel_for(v.device, k.shape[2], v.shape[2], k.shape[3], v.shape[3])(q, k, v, g, beta, output)
    return output
