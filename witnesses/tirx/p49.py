"""p49, group-limited top-k routing, in TIRx. The router's product stays with eager PyTorch; on CUDA in slices of its
depth, since tensor cores accumulate with less than float32's care, and the error grows with the depth.

CUDA: a warp adds up one token's logits, some consecutive experts a lane, through sigmoid, group ranking, ordered
selection and weights, all in registers. CPU: the same in plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

GROUPS = 8
KEPT = 4
TOP_K = 8
NEVER = -3.0e38
LOG2_E = 1.4426950408889634
LOG2_E_ROUNDED = 1.44269502162933349609375
WARPS = 4
SLICES = 4


@T.jit
def route_cuda(
    x: T.handle,
    b: T.handle,
    factor: T.float32,
    i: T.handle,
    w: T.handle,
    *,
    experts: T.constexpr,
    share: T.constexpr,
    lanes: T.constexpr,
):
    """`share` experts a lane, `lanes` lanes a group."""
    tokens = T.int32()
    logits = T.match_buffer(x, (SLICES, tokens, experts), "float32")
    bias = T.match_buffer(b, (experts,), "bfloat16")
    indices = T.match_buffer(i, (tokens, TOP_K), "int64")
    weights = T.match_buffer(w, (tokens, TOP_K), "float32")
    T.device_entry()
    block = T.cta_id([T.ceildiv(tokens, WARPS)])
    thread = T.thread_id([32 * WARPS])
    token = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    score = T.alloc_local((share,), "float32")
    part = T.alloc_local((share,), "float32")
    biased = T.alloc_local((share,), "float32")
    rank = T.alloc_local((share,), "int32")
    best = T.alloc_local((2,), "float32")
    other = T.alloc_local((2,), "float32")
    power = T.alloc_local((2,), "float32")
    chosen = T.alloc_local((1,), "int32")
    better = T.alloc_local((1,), "int32")
    total = T.alloc_local((1,), "float32")
    inverse = T.alloc_local((1,), "float32")
    token[0] = block * WARPS + thread // 32
    lane[0] = thread % 32
    if token[0] < tokens:
        for e in T.vectorized(share):
            score[e] = logits[0, token[0], lane[0] * share + e]
        for s in T.unroll(SLICES - 1):
            for e in T.vectorized(share):
                part[e] = logits[s + 1, token[0], lane[0] * share + e]
            for e in T.unroll(share):
                score[e] = score[e] + part[e]
        best[0] = T.float32(NEVER)
        best[1] = T.float32(NEVER)
        for e in T.unroll(share):
            # Fast division and exp are too coarse for the weights. So exp(-x) is 2^(-x log2 e) with the product's
            # rounding error put back, and every quotient is corrected once by its remainder.
            power[0] = score[e] * T.float32(-LOG2_E)
            T.ptx.fma_f32(T.address_of(power[1]), score[e], T.float32(-LOG2_E), -power[0])
            power[1] = power[1] - score[e] * T.float32(LOG2_E - LOG2_E_ROUNDED)
            power[0] = T.exp2(power[0])
            power[0] = power[0] + power[0] * power[1] * T.float32(0.6931471805599453)
            power[0] = T.float32(1) + power[0]
            score[e] = T.float32(1) / power[0]
            T.ptx.fma_f32(T.address_of(power[1]), -power[0], score[e], T.float32(1))
            T.ptx.fma_f32(T.address_of(score[e]), score[e], power[1], score[e])
            biased[e] = score[e] + T.cast(bias[lane[0] * share + e], "float32")
            rank[e] = TOP_K
            best[1] = T.max(best[1], T.min(best[0], biased[e]))
            best[0] = T.max(best[0], biased[e])
        for k in T.unroll(5):
            if (1 << k) < lanes:
                other[0] = T.cuda.__shfl_xor_sync(T.uint32(0xFFFFFFFF), best[0], 1 << k, 32)
                other[1] = T.cuda.__shfl_xor_sync(T.uint32(0xFFFFFFFF), best[1], 1 << k, 32)
                best[1] = T.max(T.max(best[1], other[1]), T.min(best[0], other[0]))
                best[0] = T.max(best[0], other[0])
        best[0] = best[0] + best[1]
        better[0] = 0
        for g in T.unroll(GROUPS):
            other[0] = T.cuda.__shfl_sync(T.uint32(0xFFFFFFFF), best[0], g * lanes, 32)
            if other[0] > best[0]:
                better[0] = better[0] + 1
        if better[0] >= KEPT:
            for e in T.unroll(share):
                biased[e] = T.float32(NEVER)
        total[0] = T.float32(0)
        for k in T.unroll(TOP_K):
            best[0] = biased[0]
            for e in T.unroll(share):
                best[0] = T.max(best[0], biased[e])
            best[0] = T.cuda.warp_max(best[0])
            chosen[0] = experts
            for e in T.unroll(share):
                if biased[e] == best[0]:
                    chosen[0] = T.min(chosen[0], lane[0] * share + e)
            chosen[0] = T.cuda.warp_min(chosen[0])
            for e in T.unroll(share):
                if lane[0] * share + e == chosen[0]:
                    rank[e] = k
                    biased[e] = T.float32(NEVER)
                    total[0] = total[0] + score[e]
        total[0] = T.cuda.warp_sum(total[0]) + T.float32(1e-20)
        inverse[0] = T.float32(1) / total[0]
        for e in T.unroll(share):
            if rank[e] < TOP_K:
                indices[token[0], rank[e]] = T.cast(lane[0] * share + e, "int64")
                power[0] = score[e] * inverse[0]
                T.ptx.fma_f32(T.address_of(power[1]), -total[0], power[0], score[e])
                T.ptx.fma_f32(T.address_of(power[0]), power[1], inverse[0], power[0])
                weights[token[0], rank[e]] = power[0] * factor


@T.jit
def route_cpu(x: T.handle, b: T.handle, factor: T.float32, i: T.handle, w: T.handle, *, experts: T.constexpr):
    tokens = T.int32()
    logits = T.match_buffer(x, (tokens, experts), "float32")
    bias = T.match_buffer(b, (experts,), "bfloat16")
    indices = T.match_buffer(i, (tokens, TOP_K), "int64")
    weights = T.match_buffer(w, (tokens, TOP_K), "float32")
    score = T.alloc_buffer((experts,), "float32", scope="local")
    biased = T.alloc_buffer((experts,), "float32", scope="local")
    first = T.alloc_buffer((GROUPS,), "float32", scope="local")
    second = T.alloc_buffer((GROUPS,), "float32", scope="local")
    better = T.alloc_buffer((1,), "int32", scope="local")
    chosen = T.alloc_buffer((1,), "int32", scope="local")
    total = T.alloc_buffer((1,), "float32", scope="local")
    for token in T.serial(tokens):
        for g in T.serial(GROUPS):
            first[g] = T.float32(NEVER)
            second[g] = T.float32(NEVER)
        for e in T.serial(experts):
            score[e] = T.float32(1) / (T.float32(1) + T.exp(-logits[token, e]))
            biased[e] = score[e] + T.cast(bias[e], "float32")
            second[e // (experts // GROUPS)] = T.max(
                second[e // (experts // GROUPS)], T.min(first[e // (experts // GROUPS)], biased[e])
            )
            first[e // (experts // GROUPS)] = T.max(first[e // (experts // GROUPS)], biased[e])
        for g in T.serial(GROUPS):
            better[0] = 0
            for h in T.serial(GROUPS):
                if first[h] + second[h] > first[g] + second[g]:
                    better[0] = better[0] + 1
            if better[0] >= KEPT:
                for e in T.serial(experts // GROUPS):
                    biased[g * (experts // GROUPS) + e] = T.float32(NEVER)
        total[0] = T.float32(1e-20)
        for k in T.serial(TOP_K):
            chosen[0] = 0
            for e in T.serial(experts):
                if biased[e] > biased[chosen[0]]:
                    chosen[0] = e
            biased[chosen[0]] = T.float32(NEVER)
            indices[token, k] = T.cast(chosen[0], "int64")
            weights[token, k] = score[chosen[0]]
            total[0] = total[0] + score[chosen[0]]
        for k in T.serial(TOP_K):
            weights[token, k] = weights[token, k] / total[0] * factor


def compile_for(arch: str, experts: int = 256) -> tvm.runtime.Executable:
    """The kernel for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    if arch == "llvm":
        return tvm.compile(tvm.IRModule({"main": route_cpu.specialize(experts=experts)}), target="llvm")
    kernel = route_cuda.specialize(experts=experts, share=experts // 32, lanes=32 // GROUPS)
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx")


@cache
def kernel_for(device: torch.device, experts: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return compile_for(arch, experts)["main"]


def solve(
    hidden_states: torch.Tensor, weight: torch.Tensor, expert_bias: torch.Tensor, routed_scaling_factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, experts = hidden_states.shape[0], weight.shape[0]
    if hidden_states.is_cuda:
        tall = hidden_states.view(tokens, SLICES, -1).transpose(0, 1)
        wide = weight.view(experts, SLICES, -1).permute(1, 2, 0)
        logits = torch.bmm(tall, wide, out_dtype=torch.float32)  # [slices, tokens, experts]
    else:
        logits = torch.mm(hidden_states.float(), weight.float().t())
    indices = torch.empty(tokens, TOP_K, dtype=torch.int64, device=weight.device)
    weights = torch.empty(tokens, TOP_K, dtype=torch.float32, device=weight.device)
    kernel_for(weight.device, experts)(logits, expert_bias, routed_scaling_factor, indices, weights)
    return indices, weights
