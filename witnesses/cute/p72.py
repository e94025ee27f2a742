"""p72, one decode step of the gated delta rule, in CuTe DSL.

A row of the state (one value channel, all key channels) is updated from that row alone: decay it, take its product with
the key, add the correction times the key, take the product with the query. So every row is read once and written once.
8 threads share a row, 16 bytes at a time; a thread block has 32 rows of one request and head.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

VECTOR = 4  # float32 values in 16 bytes


@cute.kernel
def step_kernel(
    query: cute.Tensor,
    key: cute.Tensor,
    value: cute.Tensor,
    state: cute.Tensor,
    log_rate: cute.Tensor,
    gate: cute.Tensor,
    gate_bias: cute.Tensor,
    strength: cute.Tensor,
    scale: cutlass.Float32,
    out: cute.Tensor,
    new_state: cute.Tensor,
    lanes: cutlass.Constexpr[int],
    rows: cutlass.Constexpr[int],
):
    thread, _, _ = cute.arch.thread_idx()
    part, head, request = cute.arch.block_idx()
    row = part * rows + thread // lanes
    lane = thread % lanes
    heads, size = cutlass.const_expr(state.shape[1]), cutlass.const_expr(state.shape[3])
    key_head = head // (heads // cutlass.const_expr(key.shape[2]))
    query_head = head // (heads // cutlass.const_expr(query.shape[2]))
    chunks = cutlass.const_expr(size // VECTOR // lanes)

    x = cute.make_rmem_tensor((VECTOR, chunks), cutlass.Float32)
    k = cute.make_rmem_tensor((VECTOR, chunks), cutlass.BFloat16)
    q = cute.make_rmem_tensor((VECTOR, chunks), cutlass.BFloat16)
    for c in cutlass.range_constexpr(chunks):
        place = (c * lanes + lane,)
        cute.autovec_copy(cute.local_tile(state[request, head, row, None], (VECTOR,), place), x[None, c])
    for c in cutlass.range_constexpr(chunks):
        place = (c * lanes + lane,)
        cute.autovec_copy(cute.local_tile(key[request, 0, key_head, None], (VECTOR,), place), k[None, c])
        cute.autovec_copy(cute.local_tile(query[request, 0, query_head, None], (VECTOR,), place), q[None, c])

    rate = gate[request, 0, head].to(cutlass.Float32) + gate_bias[head]
    magnitude = cute.arch.fmax(rate, -rate)
    step_size = cute.arch.fmax(rate, cutlass.Float32(0.0)) + cute.math.log1p(cute.math.exp(-magnitude))
    decay = cute.math.exp(-cute.math.exp(log_rate[head]) * step_size)
    beta = 1.0 / (1.0 + cute.math.exp(-strength[request, 0, head].to(cutlass.Float32)))

    keys = k.load().to(cutlass.Float32)
    decayed = x.load() * decay
    predicted = (decayed * keys).reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
    predicted = cute.arch.warp_reduction_sum(predicted, threads_in_group=lanes)
    correction = beta * (value[request, 0, head, row].to(cutlass.Float32) - predicted)
    updated = decayed + keys * correction
    x.store(updated)
    for c in cutlass.range_constexpr(chunks):
        place = (c * lanes + lane,)
        cute.autovec_copy(x[None, c], cute.local_tile(new_state[request, head, row, None], (VECTOR,), place))
    answer = (updated * q.load().to(cutlass.Float32)).reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
    answer = cute.arch.warp_reduction_sum(answer, threads_in_group=lanes)
    if lane == 0:
        out[request, 0, head, row] = (answer * scale).to(cutlass.BFloat16)


@cute.jit
def step(
    query: cute.Tensor,
    key: cute.Tensor,
    value: cute.Tensor,
    state: cute.Tensor,
    log_rate: cute.Tensor,
    gate: cute.Tensor,
    gate_bias: cute.Tensor,
    strength: cute.Tensor,
    scale: cutlass.Float32,
    out: cute.Tensor,
    new_state: cute.Tensor,
    stream,
):
    heads, size = cutlass.const_expr(state.shape[1]), cutlass.const_expr(state.shape[3])
    lanes = cutlass.const_expr(min(8, size // VECTOR))
    rows = cutlass.const_expr(min(32, size))
    step_kernel(
        query, key, value, state, log_rate, gate, gate_bias, strength, scale, out, new_state, lanes, rows
    ).launch(grid=(size // rows, heads, state.shape[0]), block=(rows * lanes, 1, 1), stream=stream)


def compile_for(arch: str, query_heads: int = 8, key_heads: int = 8, heads: int = 16, size: int = 128):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    batch = cute.sym_int()

    def fake(dtype, *shape: int):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    return cute.compile(
        step,
        fake(cutlass.BFloat16, batch, 1, query_heads, size),
        fake(cutlass.BFloat16, batch, 1, key_heads, size),
        fake(cutlass.BFloat16, batch, 1, heads, size),
        fake(cutlass.Float32, batch, heads, size, size),
        fake(cutlass.Float32, heads),
        fake(cutlass.BFloat16, batch, 1, heads),
        fake(cutlass.Float32, heads),
        fake(cutlass.BFloat16, batch, 1, heads),
        cutlass.Float32(0.0),
        fake(cutlass.BFloat16, batch, 1, heads, size),
        fake(cutlass.Float32, batch, heads, size, size),
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
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    output, new_state = torch.empty_like(v), torch.empty_like(state)
    kernel = kernel_for(q.device, q.shape[2], k.shape[2], v.shape[2], v.shape[3])
    kernel(q, k, v, state, A_log, a, dt_bias, b, scale, output, new_state)
    return output, new_state
