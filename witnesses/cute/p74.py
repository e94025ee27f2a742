"""p74, the delta rule without decay, in CuTe DSL: one kernel that goes through a sequence token by token.

A row of the state (one value channel, all key channels) needs nothing of the other rows, so it stays in registers from
the first token to the last: 8 threads share it, 16 values each, and a thread block has 32 rows of one head. All
sums of a token are taken before its update, so that they cross the threads together: with the state d before it, the
answer (d + c k)·q is d·q + c (k·q), where c is the correction. The next token is on its way while one is worked on.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

VECTOR = 8  # bfloat16 values in 16 bytes
LANES = 8  # threads that share a row of the state
ROWS = 32
SMALLEST_SQUARE = 1e-24  # of a norm that is divided by


@cute.jit
def load_token(
    key: cute.Tensor,
    query: cute.Tensor,
    token: cutlass.Int32,
    lane: cutlass.Int32,
    k: cute.Tensor,
    q: cute.Tensor,
):
    for c in cutlass.range_constexpr(cute.size(k, mode=[1])):
        place = (c * LANES + lane,)
        cute.autovec_copy(cute.local_tile(key[token, None], (VECTOR,), place), k[None, c])
        cute.autovec_copy(cute.local_tile(query[token, None], (VECTOR,), place), q[None, c])


@cute.jit
def summed(products, lanes: cutlass.Constexpr[int]) -> cutlass.Float32:
    total = products.reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
    return cute.arch.warp_reduction_sum(total, threads_in_group=lanes)


@cute.jit
def inverse_norm(square: cutlass.Float32) -> cutlass.Float32:
    return cute.math.rsqrt(cute.arch.fmax(square, cutlass.Float32(SMALLEST_SQUARE)))


@cute.kernel
def sequence_kernel(
    query: cute.Tensor,
    key: cute.Tensor,
    value: cute.Tensor,
    strength: cute.Tensor,
    initial_state: cute.Tensor,
    out: cute.Tensor,
    final_state: cute.Tensor,
):
    thread, _, _ = cute.arch.thread_idx()
    part, head, prompt = cute.arch.block_idx()
    row, lane = part * ROWS + thread // LANES, thread % LANES
    chunks = cutlass.const_expr(key.shape[3] // (VECTOR * LANES))
    length = key.shape[2]
    keys, queries = key[prompt, head, None, None], query[prompt, head, None, None]
    before, after = initial_state[prompt, head, None, row], final_state[prompt, head, None, row]

    state = cute.make_rmem_tensor((VECTOR, chunks), cutlass.Float32)
    next_k = cute.make_rmem_tensor((VECTOR, chunks), cutlass.BFloat16)
    next_q = cute.make_rmem_tensor((VECTOR, chunks), cutlass.BFloat16)
    # A row of ours is a column of theirs: read and written once, value by value.
    for c in cutlass.range_constexpr(chunks):
        for e in cutlass.range_constexpr(VECTOR):
            state[e, c] = before[(c * LANES + lane) * VECTOR + e]
    load_token(keys, queries, 0, lane, next_k, next_q)
    next_v, next_beta = value[prompt, head, 0, row], strength[prompt, head, 0]
    for token in cutlass.range(length):
        k, q = next_k.load().to(cutlass.Float32), next_q.load().to(cutlass.Float32)
        v, beta = next_v.to(cutlass.Float32), next_beta.to(cutlass.Float32)
        following = cutlass.min(token + 1, length - 1)
        load_token(keys, queries, following, lane, next_k, next_q)
        next_v, next_beta = value[prompt, head, following, row], strength[prompt, head, following]

        rows = state.load()
        key_scale = inverse_norm(summed(k * k, LANES))
        query_scale = inverse_norm(summed(q * q, LANES)) * cutlass.Float32(key.shape[3] ** -0.5)
        predicted = summed(rows * k, LANES) * key_scale
        answer = summed(rows * q, LANES)
        overlap = summed(k * q, LANES)
        correction = beta * (v - predicted) * key_scale
        state.store(rows + k * correction)
        if lane == 0:
            out[prompt, head, token, row] = ((answer + correction * overlap) * query_scale).to(cutlass.BFloat16)
    for c in cutlass.range_constexpr(chunks):
        for e in cutlass.range_constexpr(VECTOR):
            after[(c * LANES + lane) * VECTOR + e] = state[e, c]


@cute.jit
def go_through_sequences(
    query: cute.Tensor,
    key: cute.Tensor,
    value: cute.Tensor,
    strength: cute.Tensor,
    initial_state: cute.Tensor,
    out: cute.Tensor,
    final_state: cute.Tensor,
    stream,
):
    sequence_kernel(query, key, value, strength, initial_state, out, final_state).launch(
        grid=(value.shape[3] // ROWS, value.shape[1], value.shape[0]), block=(ROWS * LANES, 1, 1), stream=stream
    )


def compile_for(arch: str, heads: int = 16, key_size: int = 128, value_size: int = 128):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert key_size % (VECTOR * LANES) == 0 and value_size % ROWS == 0
    batch, length = cute.sym_int(), cute.sym_int()

    def fake(dtype, *shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    return cute.compile(
        go_through_sequences,
        fake(cutlass.BFloat16, batch, heads, length, key_size),
        fake(cutlass.BFloat16, batch, heads, length, key_size),
        fake(cutlass.BFloat16, batch, heads, length, value_size),
        fake(cutlass.BFloat16, batch, heads, length),
        fake(cutlass.Float32, batch, heads, key_size, value_size),
        fake(cutlass.BFloat16, batch, heads, length, value_size),
        fake(cutlass.Float32, batch, heads, key_size, value_size),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, heads: int, key_size: int, value_size: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", heads, key_size, value_size)


def solve(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, initial_state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    output, final_state = torch.empty_like(v), torch.empty_like(initial_state)
    kernel = kernel_for(v.device, v.shape[1], k.shape[3], v.shape[3])
    kernel(q, k, v, beta, initial_state, output, final_state)
    return output, final_state
