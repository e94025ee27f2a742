"""p12, local attention with relative positions, in TIRx. The projections stay with eager PyTorch, in one product, and
so does the little that concerns the 13 distances and the query's scale.

CUDA: a thread block has consecutive frames of a batch member, 16 threads a head of a frame, 4 channels a thread. They
add up the 13 logits together; then each has one of them for the soft cap and the softmax. Keys and values come from the
first-level cache when the next frames need them again. CPU: plain loops.
"""

import math
from functools import cache

import torch
import tvm
from torch.nn.functional import softplus
from tvm.script import tirx as T  # noqa: N812

LOOK_BACK = 12
VECTOR = 4  # float32 values in 16 bytes
LANES = 16  # threads of a head
RUN = 32  # frames of a thread block
MASKED = -3.0e38


def capped(x, cap):
    """cap · tanh(x / cap): a series where the quotient is small, since 1 - 2 / (exp + 1) has no digits left there."""
    square = (x / cap) * (x / cap)
    series = square * (T.float32(-17 / 315) + square * T.float32(62 / 2835))
    series = square * (T.float32(-1 / 3) + square * (T.float32(2 / 15) + series))
    far = cap - T.float32(2) * cap / (T.exp(T.float32(2) * x / cap) + T.float32(1))
    return T.if_then_else(square < T.float32(0.0625), x + x * series, far)


@T.jit
def attend_cuda(x: T.handle, s: T.handle, r: T.handle, m: T.handle, cap: T.float32, o: T.handle, *, heads: T.constexpr):
    """Rows of `projected` hold the queries, then the keys, then the values of all heads."""
    batch = T.int32()
    frames = T.int32()
    projected = T.match_buffer(x, (batch, frames, 3, heads, LANES * VECTOR), "float32")
    scale = T.match_buffer(s, (LANES * VECTOR,), "float32")
    positions = T.match_buffer(r, (LOOK_BACK + 1, heads, LANES * VECTOR), "float32")
    mask = T.match_buffer(m, (batch, frames), "uint8")
    out = T.match_buffer(o, (batch, frames, heads, LANES * VECTOR), "float32")
    T.device_entry()
    block, member = T.cta_id([T.ceildiv(frames, RUN), batch])
    thread = T.thread_id([heads * LANES])
    head = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    frame = T.alloc_local((1,), "int32")
    own_scale = T.alloc_local((VECTOR,), "float32")
    position = T.alloc_local((LOOK_BACK + 1, VECTOR), "float32")
    q = T.alloc_local((VECTOR,), "float32")
    k = T.alloc_local((LOOK_BACK + 1, VECTOR), "float32")
    v = T.alloc_local((LOOK_BACK + 1, VECTOR), "float32")
    total = T.alloc_local((VECTOR,), "float32")
    dot = T.alloc_local((1,), "float32")
    logit = T.alloc_local((1,), "float32")
    power = T.alloc_local((1,), "float32")
    head[0] = thread // LANES
    lane[0] = thread % LANES
    for e in T.vectorized(VECTOR):
        own_scale[e] = scale[lane[0] * VECTOR + e]
    for d in T.unroll(LOOK_BACK + 1):
        for e in T.vectorized(VECTOR):
            position[d, e] = positions[d, head[0], lane[0] * VECTOR + e]
    for step in T.serial(RUN):
        frame[0] = block * RUN + step
        if frame[0] < frames:
            for e in T.vectorized(VECTOR):
                q[e] = projected[member, frame[0], 0, head[0], lane[0] * VECTOR + e]
            for d in T.unroll(LOOK_BACK + 1):
                for e in T.vectorized(VECTOR):
                    k[d, e] = projected[member, T.max(frame[0] - d, 0), 1, head[0], lane[0] * VECTOR + e]
            for d in T.unroll(LOOK_BACK + 1):
                for e in T.vectorized(VECTOR):
                    v[d, e] = projected[member, T.max(frame[0] - d, 0), 2, head[0], lane[0] * VECTOR + e]
            logit[0] = T.float32(MASKED)
            for e in T.unroll(VECTOR):
                q[e] = q[e] * own_scale[e]
            for d in T.unroll(LOOK_BACK + 1):
                dot[0] = T.float32(0)
                for e in T.unroll(VECTOR):
                    dot[0] = dot[0] + q[e] * (k[d, e] + position[d, e])
                dot[0] = T.cuda.warp_sum(dot[0], LANES)
                if lane[0] == d:
                    logit[0] = dot[0]
            if lane[0] <= LOOK_BACK and lane[0] <= frame[0]:
                logit[0] = capped(logit[0], cap)
                if mask[member, frame[0] - lane[0]] != T.uint8(0):
                    logit[0] = T.float32(MASKED)
            else:
                logit[0] = T.float32(MASKED)
            power[0] = T.exp(logit[0] - T.cuda.warp_max(logit[0], LANES))
            power[0] = power[0] / T.cuda.warp_sum(power[0], LANES)
            for e in T.unroll(VECTOR):
                total[e] = T.float32(0)
            for d in T.unroll(LOOK_BACK + 1):
                dot[0] = T.cuda.__shfl_sync(T.uint32(0xFFFFFFFF), power[0], d, LANES)
                for e in T.unroll(VECTOR):
                    total[e] = total[e] + dot[0] * v[d, e]
            for e in T.vectorized(VECTOR):
                out[member, frame[0], head[0], lane[0] * VECTOR + e] = total[e]


@T.jit
def attend_cpu(
    x: T.handle,
    s: T.handle,
    r: T.handle,
    m: T.handle,
    cap: T.float32,
    o: T.handle,
    *,
    heads: T.constexpr,
    size: T.constexpr,
):
    batch = T.int32()
    frames = T.int32()
    projected = T.match_buffer(x, (batch, frames, 3, heads, size), "float32")
    scale = T.match_buffer(s, (size,), "float32")
    positions = T.match_buffer(r, (LOOK_BACK + 1, heads, size), "float32")
    mask = T.match_buffer(m, (batch, frames), "uint8")
    out = T.match_buffer(o, (batch, frames, heads, size), "float32")
    logits = T.alloc_buffer((LOOK_BACK + 1,), "float32", scope="local")
    top = T.alloc_buffer((1,), "float32", scope="local")
    total = T.alloc_buffer((1,), "float32", scope="local")
    for member, frame, head in T.grid(batch, frames, heads):
        top[0] = T.float32(MASKED)
        for d in T.serial(LOOK_BACK + 1):
            logits[d] = T.float32(MASKED)
            if d <= frame and mask[member, T.max(frame - d, 0)] == T.uint8(0):
                total[0] = T.float32(0)
                for c in T.serial(size):
                    total[0] = total[0] + projected[member, frame, 0, head, c] * scale[c] * (
                        projected[member, T.max(frame - d, 0), 1, head, c] + positions[d, head, c]
                    )
                logits[d] = capped(total[0], cap)
                top[0] = T.max(top[0], logits[d])
        total[0] = T.float32(0)
        for d in T.serial(LOOK_BACK + 1):
            logits[d] = T.exp(logits[d] - top[0])
            total[0] = total[0] + logits[d]
        for d in T.serial(LOOK_BACK + 1):
            logits[d] = logits[d] / total[0]
        for c in T.serial(size):
            total[0] = T.float32(0)
            for d in T.serial(LOOK_BACK + 1):
                total[0] = total[0] + logits[d] * projected[member, T.max(frame - d, 0), 2, head, c]
            out[member, frame, head, c] = total[0]


def compile_for(arch: str, heads: int = 8, size: int = 64) -> tvm.runtime.Executable:
    """The kernel for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    if arch == "llvm":
        kernel = attend_cpu.specialize(heads=heads, size=size)
        return tvm.compile(tvm.IRModule({"main": kernel}), target="llvm")
    assert size == LANES * VECTOR and heads % 2 == 0
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    kernel = attend_cuda.specialize(heads=heads)
    return tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx")


@cache
def kernel_for(device: torch.device, heads: int, size: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return compile_for(arch, heads, size)["main"]


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
