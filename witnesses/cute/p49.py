"""p49, group-limited top-k routing, in CuTe DSL. The router's product stays with eager PyTorch, in slices of its depth:
tensor cores accumulate with less than float32's care, and the error grows with the depth.

A warp adds up one token's logits, some consecutive experts a lane, and takes them through sigmoid, group ranking,
ordered selection and weights, all in registers.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

GROUPS = 8
KEPT = 4
TOP_K = 8
NEVER = -3.0e38
WARPS = 4
SLICES = 4


@cute.kernel
def route_kernel(
    logits: cute.Tensor, bias: cute.Tensor, factor: cutlass.Float32, indices: cute.Tensor, weights: cute.Tensor
):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    token = block * WARPS + thread // cute.arch.WARP_SIZE
    lane = thread % cute.arch.WARP_SIZE
    share = cutlass.const_expr(logits.shape[2] // cute.arch.WARP_SIZE)  # experts a lane
    lanes = cutlass.const_expr(cute.arch.WARP_SIZE // GROUPS)  # lanes a group
    if token < logits.shape[1]:
        score = cute.make_rmem_tensor(share, cutlass.Float32)
        part = cute.make_rmem_tensor(share, cutlass.Float32)
        own_bias = cute.make_rmem_tensor(share, cutlass.BFloat16)
        biased = cute.make_rmem_tensor(share, cutlass.Float32)
        rank = cute.make_rmem_tensor(share, cutlass.Int32)
        cute.autovec_copy(cute.local_tile(logits[0, token, None], (share,), (lane,)), score)
        for s in cutlass.range_constexpr(1, logits.shape[0]):
            cute.autovec_copy(cute.local_tile(logits[s, token, None], (share,), (lane,)), part)
            score.store(score.load() + part.load())
        cute.autovec_copy(cute.local_tile(bias, (share,), (lane,)), own_bias)
        score.store(1.0 / (1.0 + cute.math.exp(-score.load())))
        biased.store(score.load() + own_bias.load().to(cutlass.Float32))

        first, second = cutlass.Float32(NEVER), cutlass.Float32(NEVER)
        for e in cutlass.range_constexpr(share):
            second = cute.arch.fmax(second, cute.arch.fmin(first, biased[e]))
            first = cute.arch.fmax(first, biased[e])
            rank[e] = cutlass.Int32(TOP_K)
        step = 1
        while cutlass.const_expr(step < lanes):
            other_first = cute.arch.shuffle_sync_bfly(first, offset=step)
            other_second = cute.arch.shuffle_sync_bfly(second, offset=step)
            second = cute.arch.fmax(cute.arch.fmax(second, other_second), cute.arch.fmin(first, other_first))
            first = cute.arch.fmax(first, other_first)
            step = step * 2
        group_score = first + second
        better = cutlass.Int32(0)
        for g in cutlass.range_constexpr(GROUPS):
            other = cute.arch.shuffle_sync(group_score, offset=g * lanes)
            better += 1 if other > group_score else 0
        if better >= KEPT:
            biased.fill(NEVER)

        total = cutlass.Float32(0.0)
        for k in cutlass.range_constexpr(TOP_K):
            best = biased[0]
            for e in cutlass.range_constexpr(1, share):
                best = cute.arch.fmax(best, biased[e])
            best = cute.arch.warp_reduction_max(best)
            chosen = cutlass.Int32(logits.shape[2])
            for e in cutlass.range_constexpr(share):
                if biased[e] == best:
                    chosen = cutlass.min(chosen, lane * share + e)
            chosen = cute.arch.warp_redux_sync(chosen, kind="min")
            for e in cutlass.range_constexpr(share):
                if lane * share + e == chosen:
                    rank[e] = cutlass.Int32(k)
                    biased[e] = cutlass.Float32(NEVER)
                    total += score[e]
        total = cute.arch.warp_reduction_sum(total) + 1e-20
        for e in cutlass.range_constexpr(share):
            if rank[e] < TOP_K:
                indices[token, rank[e]] = cutlass.Int64(lane * share + e)
                weights[token, rank[e]] = score[e] / total * factor


@cute.jit
def route(
    logits: cute.Tensor, bias: cute.Tensor, factor: cutlass.Float32, indices: cute.Tensor, weights: cute.Tensor, stream
):
    route_kernel(logits, bias, factor, indices, weights).launch(
        grid=(cute.ceil_div(logits.shape[1], WARPS), 1, 1), block=(cute.arch.WARP_SIZE * WARPS, 1, 1), stream=stream
    )


def compile_for(arch: str, experts: int = 256):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    tokens = cute.sym_int()

    def fake(dtype, *shape: int):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    return cute.compile(
        route,
        fake(cutlass.Float32, SLICES, tokens, experts),
        fake(cutlass.BFloat16, experts),
        cutlass.Float32(1.0),
        fake(cutlass.Int64, tokens, TOP_K),
        fake(cutlass.Float32, tokens, TOP_K),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, experts: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", experts)


def solve(
    hidden_states: torch.Tensor, weight: torch.Tensor, expert_bias: torch.Tensor, routed_scaling_factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, experts = hidden_states.shape[0], weight.shape[0]
    tall = hidden_states.view(tokens, SLICES, -1).transpose(0, 1)
    wide = weight.view(experts, SLICES, -1).permute(1, 2, 0)
    logits = torch.bmm(tall, wide, out_dtype=torch.float32)  # [slices, tokens, experts]
    indices = torch.empty(tokens, TOP_K, dtype=torch.int64, device=weight.device)
    weights = torch.empty(tokens, TOP_K, dtype=torch.float32, device=weight.device)
    kernel_for(weight.device, experts)(logits, expert_bias, routed_scaling_factor, indices, weights)
    return indices, weights
