"""p12, local attention with relative positions, in CuTe DSL. The projections stay with eager PyTorch, in one product,
and so does the little that concerns the 13 distances and the query's scale.

A thread block has consecutive frames of a batch member, 16 threads a head of a frame, 4 channels a thread. They add up
the 13 logits together; then each has one of them for the soft cap and the softmax. Keys and values come from the
first-level cache when the next frames need them again.
"""

import math
from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from torch.nn.functional import softplus

LOOK_BACK = 12
VECTOR = 4  # float32 values in 16 bytes
LANES = 16  # threads of a head
RUN = 32  # frames of a thread block
MASKED = -3.0e38


@cute.jit
def capped(x: cutlass.Float32, cap: cutlass.Float32):
    """cap · tanh(x / cap): a series where the quotient is small, since 1 - 2 / (exp + 1) has no digits left there."""
    square = (x / cap) * (x / cap)
    series = square * (-17 / 315 + square * (62 / 2835))
    series = square * (-1 / 3 + square * (2 / 15 + series))
    result = x + x * series
    if square >= 0.0625:
        result = cap - 2.0 * cap / (cute.math.exp(2.0 * x / cap) + 1.0)
    return result


@cute.kernel
def attend_kernel(
    projected: cute.Tensor,
    scale: cute.Tensor,
    positions: cute.Tensor,
    mask: cute.Tensor,
    cap: cutlass.Float32,
    out: cute.Tensor,
):
    """Rows of `projected` hold the queries, then the keys, then the values of all heads."""
    thread, _, _ = cute.arch.thread_idx()
    block, member, _ = cute.arch.block_idx()
    head, lane = thread // LANES, thread % LANES
    distances = cutlass.const_expr(LOOK_BACK + 1)
    own_scale = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    position = cute.make_rmem_tensor((VECTOR, distances), cutlass.Float32)
    q = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    k = cute.make_rmem_tensor((VECTOR, distances), cutlass.Float32)
    v = cute.make_rmem_tensor((VECTOR, distances), cutlass.Float32)
    total = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    cute.autovec_copy(cute.local_tile(scale, (VECTOR,), (lane,)), own_scale)
    for d in cutlass.range_constexpr(distances):
        cute.autovec_copy(cute.local_tile(positions[d, head, None], (VECTOR,), (lane,)), position[None, d])
    stop = cutlass.min(block * RUN + RUN, projected.shape[1])
    for frame in cutlass.range(block * RUN, stop):
        cute.autovec_copy(cute.local_tile(projected[member, frame, 0, head, None], (VECTOR,), (lane,)), q)
        for d in cutlass.range_constexpr(distances):
            source = projected[member, cutlass.max(frame - d, 0), 1, head, None]
            cute.autovec_copy(cute.local_tile(source, (VECTOR,), (lane,)), k[None, d])
        for d in cutlass.range_constexpr(distances):
            source = projected[member, cutlass.max(frame - d, 0), 2, head, None]
            cute.autovec_copy(cute.local_tile(source, (VECTOR,), (lane,)), v[None, d])
        scaled = q.load() * own_scale.load()
        logit = cutlass.Float32(MASKED)
        for d in cutlass.range_constexpr(distances):
            products = scaled * (k[None, d].load() + position[None, d].load())
            dot = products.reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
            dot = cute.arch.warp_reduction_sum(dot, threads_in_group=LANES)
            if lane == d:
                logit = dot
        padding = cutlass.Uint8(1)
        if lane <= LOOK_BACK and lane <= frame:
            padding = mask[member, frame - lane]
        logit = capped(logit, cap)
        if padding != 0:
            logit = cutlass.Float32(MASKED)
        power = cute.math.exp(logit - cute.arch.warp_reduction_max(logit, threads_in_group=LANES))
        power = power / cute.arch.warp_reduction_sum(power, threads_in_group=LANES)
        first_lane = thread % cute.arch.WARP_SIZE - lane
        total.fill(0.0)
        for d in cutlass.range_constexpr(distances):
            share = cute.arch.shuffle_sync(power, offset=first_lane + d)
            total.store(total.load() + v[None, d].load() * share)
        cute.autovec_copy(total, cute.local_tile(out[member, frame, head, None], (VECTOR,), (lane,)))


@cute.jit
def attend(
    projected: cute.Tensor,
    scale: cute.Tensor,
    positions: cute.Tensor,
    mask: cute.Tensor,
    cap: cutlass.Float32,
    out: cute.Tensor,
    stream,
):
    batch, frames, heads, _ = out.shape
    attend_kernel(projected, scale, positions, mask, cap, out).launch(
        grid=((frames + RUN - 1) // RUN, batch, 1), block=(heads * LANES, 1, 1), stream=stream
    )


def compile_for(arch: str, heads: int = 8, size: int = 64):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert size == LANES * VECTOR and heads % 2 == 0
    batch, frames = cute.sym_int(), cute.sym_int()

    def fake(dtype, *shape: int, align: int = 16):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

    return cute.compile(
        attend,
        fake(cutlass.Float32, batch, frames, 3, heads, size),
        fake(cutlass.Float32, size),
        fake(cutlass.Float32, LOOK_BACK + 1, heads, size),
        fake(cutlass.Uint8, batch, frames, align=1),
        cutlass.Float32(0.0),
        fake(cutlass.Float32, batch, frames, heads, size),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, heads: int, size: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", heads, size)


def solve(
    hidden_states: torch.Tensor,
    mask: torch.Tensor,
    q_proj_weight: torch.Tensor,
    k_proj_weight: torch.Tensor,
    v_proj_weight: torch.Tensor,
    pos_proj_weight: torch.Tensor,
    per_dim_scale: torch.Tensor,
    inv_timescales: torch.Tensor,
    attention_logits_soft_cap: float,
) -> torch.Tensor:
    batch, frames, hidden = hidden_states.shape
    size = per_dim_scale.shape[0]
    heads = hidden // size
    weights = torch.cat([q_proj_weight, k_proj_weight, v_proj_weight])
    projected = torch.mm(hidden_states.view(-1, hidden), weights.t()).view(batch, frames, 3, heads, size)
    angles = torch.arange(LOOK_BACK + 1, dtype=torch.float32, device=mask.device)[:, None] * inv_timescales
    positions = torch.mm(torch.cat([angles.sin(), angles.cos()], dim=-1), pos_proj_weight.t()).view(-1, heads, size)
    scale = softplus(per_dim_scale) * (size**-0.5 / math.log(2))
    attended = torch.empty(batch, frames, heads, size, dtype=torch.float32, device=mask.device)
    kernel_for(mask.device, heads, size)(
        projected, scale, positions, mask.view(torch.uint8), attention_logits_soft_cap, attended
    )
    return attended
