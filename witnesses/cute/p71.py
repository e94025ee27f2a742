"""p71, gated delta rule prefill over packed sequences, in CuTe DSL: one kernel that goes through them token by token.

A row of the state (one value channel, all key channels) needs nothing of the other rows, so it stays in registers from
the first token to the last: 8 threads share it, 16 values each, and a thread block has 32 rows of one value head of one
sequence. All sums of a token are taken before its update, so that they cross the threads together: with the decayed
state d, the answer (d + c k)·q is d·q + c (k·q), where c is the correction. The next token is on its way while one is
worked on.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

VECTOR = 4  # float32 values in 16 bytes
LANES = 8  # threads that share a row of the state
ROWS = 32


@cute.jit
def load_token(key: cute.Tensor, query: cute.Tensor, lane: cutlass.Int32, k: cute.Tensor, q: cute.Tensor):
    for c in cutlass.range_constexpr(cute.size(k, mode=[1])):
        place = (c * LANES + lane,)
        cute.autovec_copy(cute.local_tile(key, (VECTOR,), place), k[None, c])
        cute.autovec_copy(cute.local_tile(query, (VECTOR,), place), q[None, c])


@cute.jit
def summed(products, lanes: cutlass.Constexpr[int]) -> cutlass.Float32:
    total = products.reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
    return cute.arch.warp_reduction_sum(total, threads_in_group=lanes)


@cute.kernel
def prefill_kernel(
    query: cute.Tensor,
    key: cute.Tensor,
    value: cute.Tensor,
    state: cute.Tensor,
    log_rate: cute.Tensor,
    gate: cute.Tensor,
    gate_bias: cute.Tensor,
    strength: cute.Tensor,
    boundaries: cute.Tensor,
    scale: cutlass.Float32,
    out: cute.Tensor,
    new_state: cute.Tensor,
):
    thread, _, _ = cute.arch.thread_idx()
    part, head, sequence = cute.arch.block_idx()
    row, lane = part * ROWS + thread // LANES, thread % LANES
    heads = cutlass.const_expr(value.shape[1])
    key_head = head // cutlass.const_expr(heads // key.shape[1])
    query_head = head // cutlass.const_expr(heads // query.shape[1])
    chunks = cutlass.const_expr(state.shape[3] // (VECTOR * LANES))
    first, end = boundaries[sequence].to(cutlass.Int32), boundaries[sequence + 1].to(cutlass.Int32)
    last = end - 1
    x = cute.make_rmem_tensor((VECTOR, chunks), cutlass.Float32)
    next_k = cute.make_rmem_tensor((VECTOR, chunks), cutlass.BFloat16)
    next_q = cute.make_rmem_tensor((VECTOR, chunks), cutlass.BFloat16)
    for c in cutlass.range_constexpr(chunks):
        place = (c * LANES + lane,)
        cute.autovec_copy(cute.local_tile(state[sequence, head, row, None], (VECTOR,), place), x[None, c])
    rate, bias = cute.math.exp(log_rate[head]), gate_bias[head]
    if first < end:
        load_token(key[first, key_head, None], query[first, query_head, None], lane, next_k, next_q)
        next_v, next_gate, next_beta = value[first, head, row], gate[first, head], strength[first, head]
        for token in cutlass.range(first, end):
            k, q = next_k.load().to(cutlass.Float32), next_q.load().to(cutlass.Float32)
            v, raw = next_v.to(cutlass.Float32), next_gate.to(cutlass.Float32) + bias
            beta = 1.0 / (1.0 + cute.math.exp(-next_beta.to(cutlass.Float32)))
            following = cutlass.min(token + 1, last)
            load_token(key[following, key_head, None], query[following, query_head, None], lane, next_k, next_q)
            next_v, next_gate = value[following, head, row], gate[following, head]
            next_beta = strength[following, head]

            magnitude = cute.arch.fmax(raw, -raw)
            step = cute.arch.fmax(raw, cutlass.Float32(0.0)) + cute.math.log1p(cute.math.exp(-magnitude))
            decayed = x.load() * cute.math.exp(-rate * step)
            predicted, answer = summed(decayed * k, LANES), summed(decayed * q, LANES)
            overlap = summed(k * q, LANES)
            correction = beta * (v - predicted)
            x.store(decayed + k * correction)
            if lane == 0:
                out[token, head, row] = ((answer + correction * overlap) * scale).to(cutlass.BFloat16)
    for c in cutlass.range_constexpr(chunks):
        place = (c * LANES + lane,)
        cute.autovec_copy(x[None, c], cute.local_tile(new_state[sequence, head, row, None], (VECTOR,), place))


@cute.jit
def prefill(
    query: cute.Tensor,
    key: cute.Tensor,
    value: cute.Tensor,
    state: cute.Tensor,
    log_rate: cute.Tensor,
    gate: cute.Tensor,
    gate_bias: cute.Tensor,
    strength: cute.Tensor,
    boundaries: cute.Tensor,
    scale: cutlass.Float32,
    out: cute.Tensor,
    new_state: cute.Tensor,
    stream,
):
    prefill_kernel(
        query, key, value, state, log_rate, gate, gate_bias, strength, boundaries, scale, out, new_state
    ).launch(grid=(state.shape[2] // ROWS, state.shape[1], state.shape[0]), block=(ROWS * LANES, 1, 1), stream=stream)


def compile_for(arch: str, query_heads: int = 8, key_heads: int = 8, heads: int = 16, size: int = 128):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert size % (VECTOR * LANES) == 0 and size % ROWS == 0
    tokens, sequences, boundaries = (cute.sym_int() for _ in range(3))

    def fake(dtype, *shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    return cute.compile(
        prefill,
        fake(cutlass.BFloat16, tokens, query_heads, size),
        fake(cutlass.BFloat16, tokens, key_heads, size),
        fake(cutlass.BFloat16, tokens, heads, size),
        fake(cutlass.Float32, sequences, heads, size, size),
        fake(cutlass.Float32, heads),
        fake(cutlass.BFloat16, tokens, heads),
        fake(cutlass.Float32, heads),
        fake(cutlass.BFloat16, tokens, heads),
        fake(cutlass.Int64, boundaries),
        cutlass.Float32(0.0),
        fake(cutlass.BFloat16, tokens, heads, size),
        fake(cutlass.Float32, sequences, heads, size, size),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, query_heads: int, key_heads: int, heads: int, size: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", query_heads, key_heads, heads, size)


def solve(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    output, new_state = torch.empty_like(v), torch.empty_like(state)
    kernel = kernel_for(q.device, q.shape[1], k.shape[1], v.shape[1], v.shape[2])
    kernel(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale, output, new_state)
    return output, new_state
