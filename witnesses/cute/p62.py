"""p62, the gated delta rule over whole prompts, in CuTe DSL: one kernel that goes through a prompt token by token.

A row of the state (one value channel, all key channels) needs nothing of the other rows, so it stays in registers from
the first token to the last: 8 threads share it, 16 values each, and a thread block has 32 rows of one value head. All
sums of a token are taken before its update, so that they cross the threads together: with the decayed state d, the
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
NORM_EPS = 1e-6


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


@cute.kernel
def prompt_kernel(
    query: cute.Tensor,
    key: cute.Tensor,
    value: cute.Tensor,
    log_decay: cute.Tensor,
    strength: cute.Tensor,
    scale: cutlass.Float32,
    out: cute.Tensor,
):
    thread, _, _ = cute.arch.thread_idx()
    part, head, prompt = cute.arch.block_idx()
    row, lane = part * ROWS + thread // LANES, thread % LANES
    key_head = head // cutlass.const_expr(value.shape[1] // key.shape[1])
    chunks = cutlass.const_expr(key.shape[3] // (VECTOR * LANES))
    length = key.shape[2]
    keys, queries = key[prompt, key_head, None, None], query[prompt, key_head, None, None]

    state = cute.make_rmem_tensor((VECTOR, chunks), cutlass.Float32)
    next_k = cute.make_rmem_tensor((VECTOR, chunks), cutlass.BFloat16)
    next_q = cute.make_rmem_tensor((VECTOR, chunks), cutlass.BFloat16)
    state.fill(0.0)
    load_token(keys, queries, 0, lane, next_k, next_q)
    next_v, next_decay = value[prompt, head, 0, row], log_decay[prompt, head, 0]
    next_beta = strength[prompt, head, 0]
    for token in cutlass.range(length):
        k, q = next_k.load().to(cutlass.Float32), next_q.load().to(cutlass.Float32)
        v, beta = next_v.to(cutlass.Float32), next_beta.to(cutlass.Float32)
        decay = cute.math.exp(next_decay.to(cutlass.Float32))
        following = cutlass.min(token + 1, length - 1)
        load_token(keys, queries, following, lane, next_k, next_q)
        next_v, next_decay = value[prompt, head, following, row], log_decay[prompt, head, following]
        next_beta = strength[prompt, head, following]

        decayed = state.load() * decay
        key_scale = cute.math.rsqrt(summed(k * k, LANES) + NORM_EPS)
        query_scale = cute.math.rsqrt(summed(q * q, LANES) + NORM_EPS) * scale
        predicted = summed(decayed * k, LANES) * key_scale
        answer = summed(decayed * q, LANES)
        overlap = summed(k * q, LANES)
        correction = beta * (v - predicted) * key_scale
        state.store(decayed + k * correction)
        if lane == 0:
            out[prompt, token, head, row] = ((answer + correction * overlap) * query_scale).to(cutlass.BFloat16)


@cute.jit
def go_through_prompts(
    query: cute.Tensor,
    key: cute.Tensor,
    value: cute.Tensor,
    log_decay: cute.Tensor,
    strength: cute.Tensor,
    scale: cutlass.Float32,
    out: cute.Tensor,
    stream,
):
    prompt_kernel(query, key, value, log_decay, strength, scale, out).launch(
        grid=(value.shape[3] // ROWS, value.shape[1], value.shape[0]), block=(ROWS * LANES, 1, 1), stream=stream
    )


def compile_for(arch: str, key_heads: int = 4, value_heads: int = 16, key_size: int = 128, value_size: int = 128):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert key_size % (VECTOR * LANES) == 0 and value_size % ROWS == 0
    batch, length = cute.sym_int(), cute.sym_int()

    def fake(*shape: int):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(cutlass.BFloat16, shape, stride_order=order, assumed_align=16)

    return cute.compile(
        go_through_prompts,
        fake(batch, key_heads, length, key_size),
        fake(batch, key_heads, length, key_size),
        fake(batch, value_heads, length, value_size),
        fake(batch, value_heads, length),
        fake(batch, value_heads, length),
        cutlass.Float32(0.0),
        fake(batch, length, value_heads, value_size),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, key_heads: int, value_heads: int, key_size: int, value_size: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", key_heads, value_heads, key_size, value_size)


def solve(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    batch, value_heads, length, value_size = value.shape
    out = torch.empty(batch, length, value_heads, value_size, dtype=value.dtype, device=value.device)
    kernel = kernel_for(value.device, key.shape[1], value_heads, key.shape[3], value_size)
    kernel(query, key, value, g, beta, scale, out)
    return out
