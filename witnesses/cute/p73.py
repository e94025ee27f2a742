"""p73, the gated delta rule over draft tokens from pooled states, in CuTe DSL.

A row of the state (one value channel, all key channels) needs nothing of the other rows, so it is read once and stays
in registers over the draft: 8 threads share it, 16 values each, and a thread block has 32 rows of one value head. All
sums of a token are taken before its update, so that they cross the threads together: with the decayed state d, the
answer (d + c k)·q is d·q + c (k·q), where c is the correction. The pool is handed back as it is.
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
def summed(products, lanes: cutlass.Constexpr[int]) -> cutlass.Float32:
    total = products.reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
    return cute.arch.warp_reduction_sum(total, threads_in_group=lanes)


@cute.kernel
def draft_kernel(
    query: cute.Tensor,
    key: cute.Tensor,
    value: cute.Tensor,
    pool: cute.Tensor,
    places: cute.Tensor,
    log_rate: cute.Tensor,
    gate: cute.Tensor,
    gate_bias: cute.Tensor,
    strength: cute.Tensor,
    scale: cutlass.Float32,
    out: cute.Tensor,
):
    thread, _, _ = cute.arch.thread_idx()
    part, head, request = cute.arch.block_idx()
    row, lane = part * ROWS + thread // LANES, thread % LANES
    heads = cutlass.const_expr(value.shape[2])
    key_head = head // cutlass.const_expr(heads // key.shape[2])
    query_head = head // cutlass.const_expr(heads // query.shape[2])
    chunks = cutlass.const_expr(pool.shape[3] // (VECTOR * LANES))
    x = cute.make_rmem_tensor((VECTOR, chunks), cutlass.Float32)
    keys = cute.make_rmem_tensor((VECTOR, chunks), cutlass.BFloat16)
    queries = cute.make_rmem_tensor((VECTOR, chunks), cutlass.BFloat16)
    state = pool[places[request], head, row, None]
    for c in cutlass.range_constexpr(chunks):
        cute.autovec_copy(cute.local_tile(state, (VECTOR,), (c * LANES + lane,)), x[None, c])
    rate, bias = cute.math.exp(log_rate[head]), gate_bias[head]
    for token in cutlass.range_constexpr(value.shape[1]):
        for c in cutlass.range_constexpr(chunks):
            place = (c * LANES + lane,)
            cute.autovec_copy(cute.local_tile(key[request, token, key_head, None], (VECTOR,), place), keys[None, c])
            row_of_query = query[request, token, query_head, None]
            cute.autovec_copy(cute.local_tile(row_of_query, (VECTOR,), place), queries[None, c])
        raw = gate[request, token, head].to(cutlass.Float32) + bias
        magnitude = cute.arch.fmax(raw, -raw)
        step = cute.arch.fmax(raw, cutlass.Float32(0.0)) + cute.math.log1p(cute.math.exp(-magnitude))
        beta = 1.0 / (1.0 + cute.math.exp(-strength[request, token, head].to(cutlass.Float32)))
        k, q = keys.load().to(cutlass.Float32), queries.load().to(cutlass.Float32)
        decayed = x.load() * cute.math.exp(-rate * step)
        predicted, answer, overlap = summed(decayed * k, LANES), summed(decayed * q, LANES), summed(k * q, LANES)
        correction = beta * (value[request, token, head, row].to(cutlass.Float32) - predicted)
        x.store(decayed + k * correction)
        if lane == 0:
            out[request, token, head, row] = ((answer + correction * overlap) * scale).to(cutlass.BFloat16)


@cute.jit
def verify_draft(
    query: cute.Tensor,
    key: cute.Tensor,
    value: cute.Tensor,
    pool: cute.Tensor,
    places: cute.Tensor,
    log_rate: cute.Tensor,
    gate: cute.Tensor,
    gate_bias: cute.Tensor,
    strength: cute.Tensor,
    scale: cutlass.Float32,
    out: cute.Tensor,
    stream,
):
    draft_kernel(query, key, value, pool, places, log_rate, gate, gate_bias, strength, scale, out).launch(
        grid=(pool.shape[2] // ROWS, value.shape[2], value.shape[0]), block=(ROWS * LANES, 1, 1), stream=stream
    )


def compile_for(arch: str, tokens: int = 4, query_heads: int = 8, key_heads: int = 8, heads: int = 16, size: int = 128):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert size % (VECTOR * LANES) == 0 and size % ROWS == 0
    batch, states = cute.sym_int(), cute.sym_int()

    def fake(dtype, *shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    return cute.compile(
        verify_draft,
        fake(cutlass.BFloat16, batch, tokens, query_heads, size),
        fake(cutlass.BFloat16, batch, tokens, key_heads, size),
        fake(cutlass.BFloat16, batch, tokens, heads, size),
        fake(cutlass.Float32, states, heads, size, size),
        fake(cutlass.Int32, batch),
        fake(cutlass.Float32, heads),
        fake(cutlass.BFloat16, batch, tokens, heads),
        fake(cutlass.Float32, heads),
        fake(cutlass.BFloat16, batch, tokens, heads),
        cutlass.Float32(0.0),
        fake(cutlass.BFloat16, batch, tokens, heads, size),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, tokens: int, query_heads: int, key_heads: int, heads: int, size: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", tokens, query_heads, key_heads, heads, size)


def solve(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    output = torch.empty_like(v)
    kernel = kernel_for(q.device, v.shape[1], q.shape[2], k.shape[2], v.shape[2], v.shape[3])
    kernel(q, k, v, initial_state, initial_state_indices, A_log, a, dt_bias, b, scale, output)
    return output, initial_state
