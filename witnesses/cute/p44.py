"""p44, one rank of an FP8 mixture layer, in CuTe DSL. The grouped products stay with eager PyTorch, in bfloat16.

1. Routing: a warp takes one token's logits, some consecutive experts a lane, through sigmoid, group ranking, selection
   and weights, all in registers.
2. Places: a thread block has one local expert and gives its pairs of token and expert rows behind those of the experts
   before it.
3. Operands: the tokens of these rows, and both kinds of weights, become the bfloat16 values of their codes and scales.
4. Gating of the first product, and 5. the sum of a token's results in float32.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

GROUPS = 8
KEPT = 4
TOP_K = 8
BLOCK = 128
NEVER = -3.0e38
NOWHERE = -1
WARPS = 4
SCANNERS = 1024
THREADS = 256
VECTOR = 8  # bfloat16 values in 16 bytes
CODES = 16


@cute.kernel
def route_kernel(
    logits: cute.Tensor,
    bias: cute.Tensor,
    offset: cutlass.Int32,
    factor: cutlass.Float32,
    local_experts: cutlass.Constexpr[int],
    selected: cute.Tensor,
    weights: cute.Tensor,
    places: cute.Tensor,
):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    token = block * WARPS + thread // cute.arch.WARP_SIZE
    lane = thread % cute.arch.WARP_SIZE
    share = cutlass.const_expr(logits.shape[1] // cute.arch.WARP_SIZE)  # experts a lane
    lanes = cutlass.const_expr(cute.arch.WARP_SIZE // GROUPS)  # lanes a group
    if token < logits.shape[0]:
        score = cute.make_rmem_tensor(share, cutlass.Float32)
        own_bias = cute.make_rmem_tensor(share, cutlass.BFloat16)
        biased = cute.make_rmem_tensor(share, cutlass.Float32)
        rank = cute.make_rmem_tensor(share, cutlass.Int32)
        cute.autovec_copy(cute.local_tile(logits[token, None], (share,), (lane,)), score)
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
            chosen = cutlass.Int32(logits.shape[1])
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
                local = lane * share + e - offset
                if local < 0 or local >= local_experts:
                    local = cutlass.Int32(NOWHERE)
                selected[token, rank[e]] = local
                weights[token, rank[e]] = score[e] / total * factor
                places[token, rank[e]] = cutlass.Int32(NOWHERE)


@cute.jit
def sum_before(value: cutlass.Int32, sums: cute.Tensor):
    """The sum of the threads before this one, and of all; `sums` has a place for every thread."""
    thread, _, _ = cute.arch.thread_idx()
    cute.arch.sync_threads()
    sums[thread] = value
    cute.arch.sync_threads()
    step = 1
    while cutlass.const_expr(step < SCANNERS):
        other = cutlass.Int32(0)
        if thread >= step:
            other = sums[thread - step]
        cute.arch.sync_threads()
        sums[thread] = sums[thread] + other
        cute.arch.sync_threads()
        step = step * 2
    return sums[thread] - value, sums[SCANNERS - 1]


@cute.kernel
def place_kernel(selected: cute.Tensor, places: cute.Tensor, row_pairs: cute.Tensor, ends: cute.Tensor):
    """All flat: a pair is token · 8 + slot."""
    thread, _, _ = cute.arch.thread_idx()
    expert, _, _ = cute.arch.block_idx()
    pairs = selected.shape[0]
    stretch = (pairs + SCANNERS - 1) // SCANNERS
    start, stop = thread * stretch, cutlass.min(thread * stretch + stretch, pairs)
    count, lower = cutlass.Int32(0), cutlass.Int32(0)
    for pair in cutlass.range(start, stop):
        local = selected[pair]
        if local == expert:
            count += 1
        elif local >= 0 and local < expert:
            lower += 1
    sums = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.Int32, cute.make_layout(SCANNERS), 16)
    _, base = sum_before(lower, sums)
    before, total = sum_before(count, sums)
    place = base + before
    for pair in cutlass.range(start, stop):
        if selected[pair] == expert:
            places[pair] = place
            row_pairs[place] = pair
            place += 1
    if thread == 0:
        ends[expert] = base + total


@cute.kernel
def token_kernel(codes: cute.Tensor, scales: cute.Tensor, row_pairs: cute.Tensor, rows: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    token = row_pairs[row] // TOP_K
    scale = scales[thread * CODES // BLOCK, token]
    raw = cute.make_rmem_tensor(CODES, cutlass.Uint8)
    values = cute.make_rmem_tensor(CODES, cutlass.BFloat16)
    cute.autovec_copy(cute.local_tile(codes[token, None], (CODES,), (thread,)), raw)
    elements = cute.recast_tensor(raw, cutlass.Float8E4M3FN).load().to(cutlass.Float32)
    values.store((elements * scale).to(cutlass.BFloat16))
    cute.autovec_copy(values, cute.local_tile(rows[row, None], (CODES,), (thread,)))


@cute.kernel
def weight_kernel(codes: cute.Tensor, scales: cute.Tensor, values: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    scale = scales[row // BLOCK, thread * CODES // BLOCK]
    raw = cute.make_rmem_tensor(CODES, cutlass.Uint8)
    part = cute.make_rmem_tensor(CODES, cutlass.BFloat16)
    cute.autovec_copy(cute.local_tile(codes[row, None], (CODES,), (thread,)), raw)
    elements = cute.recast_tensor(raw, cutlass.Float8E4M3FN).load().to(cutlass.Float32)
    part.store((elements * scale).to(cutlass.BFloat16))
    cute.autovec_copy(part, cute.local_tile(values[row, None], (CODES,), (thread,)))


@cute.kernel
def gate_kernel(both: cute.Tensor, out: cute.Tensor):
    """A row of `both` holds the values, then their gates."""
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    half = cutlass.const_expr(out.shape[1] // VECTOR)
    up = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    gate = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    cute.autovec_copy(cute.local_tile(both[row, None], (VECTOR,), (thread,)), up)
    cute.autovec_copy(cute.local_tile(both[row, None], (VECTOR,), (half + thread,)), gate)
    g = gate.load().to(cutlass.Float32)
    up.store((g / (1.0 + cute.math.exp(-g)) * up.load().to(cutlass.Float32)).to(cutlass.BFloat16))
    cute.autovec_copy(up, cute.local_tile(out[row, None], (VECTOR,), (thread,)))


@cute.kernel
def combine_kernel(rows: cute.Tensor, places: cute.Tensor, weights: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    token, _, _ = cute.arch.block_idx()
    total = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    x = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    total.fill(0.0)
    for slot in cutlass.range_constexpr(TOP_K):
        place = places[token, slot]
        if place >= 0:
            cute.autovec_copy(cute.local_tile(rows[place, None], (VECTOR,), (thread,)), x)
            total.store(total.load() + x.load().to(cutlass.Float32) * weights[token, slot])
    x.store(total.load().to(cutlass.BFloat16))
    cute.autovec_copy(x, cute.local_tile(out[token, None], (VECTOR,), (thread,)))


@cute.jit
def route(
    logits: cute.Tensor,
    bias: cute.Tensor,
    offset: cutlass.Int32,
    factor: cutlass.Float32,
    selected: cute.Tensor,
    weights: cute.Tensor,
    places: cute.Tensor,
    flat_selected: cute.Tensor,
    flat_places: cute.Tensor,
    row_pairs: cute.Tensor,
    ends: cute.Tensor,
    stream,
):
    local_experts = cutlass.const_expr(ends.shape[0])
    route_kernel(logits, bias, offset, factor, local_experts, selected, weights, places).launch(
        grid=(cute.ceil_div(logits.shape[0], WARPS), 1, 1), block=(cute.arch.WARP_SIZE * WARPS, 1, 1), stream=stream
    )
    place_kernel(flat_selected, flat_places, row_pairs, ends).launch(
        grid=(local_experts, 1, 1), block=(SCANNERS, 1, 1), stream=stream
    )


@cute.jit
def operands(
    codes: cute.Tensor,
    scales: cute.Tensor,
    row_pairs: cute.Tensor,
    rows: cute.Tensor,
    first_codes: cute.Tensor,
    first_scales: cute.Tensor,
    first: cute.Tensor,
    second_codes: cute.Tensor,
    second_scales: cute.Tensor,
    second: cute.Tensor,
    stream,
):
    token_kernel(codes, scales, row_pairs, rows).launch(
        grid=(rows.shape[0], 1, 1), block=(rows.shape[1] // CODES, 1, 1), stream=stream
    )
    weight_kernel(first_codes, first_scales, first).launch(
        grid=(first.shape[0], 1, 1), block=(first.shape[1] // CODES, 1, 1), stream=stream
    )
    weight_kernel(second_codes, second_scales, second).launch(
        grid=(second.shape[0], 1, 1), block=(second.shape[1] // CODES, 1, 1), stream=stream
    )


@cute.jit
def gate_rows(both: cute.Tensor, out: cute.Tensor, stream):
    gate_kernel(both, out).launch(grid=(out.shape[0], 1, 1), block=(out.shape[1] // VECTOR, 1, 1), stream=stream)


@cute.jit
def combine(rows: cute.Tensor, places: cute.Tensor, weights: cute.Tensor, out: cute.Tensor, stream):
    combine_kernel(rows, places, weights, out).launch(
        grid=(out.shape[0], 1, 1), block=(out.shape[1] // VECTOR, 1, 1), stream=stream
    )


def compile_for(arch: str, experts: int = 256, local_experts: int = 32, width: int = 7168, inner: int = 2048):
    """The four functions for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    tokens, pairs, rows = (cute.sym_int() for _ in range(3))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {arch}"

    def fake(dtype, *shape, align: int = 16):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

    def weights(out_features: int, in_features: int):
        height = local_experts * out_features
        return (
            fake(cutlass.Uint8, height, in_features),
            fake(cutlass.Float32, height // BLOCK, in_features // BLOCK, align=4),
            fake(cutlass.BFloat16, height, in_features),
        )

    return (
        cute.compile(
            route,
            fake(cutlass.Float32, tokens, experts),
            fake(cutlass.BFloat16, experts),
            cutlass.Int32(0),
            cutlass.Float32(0.0),
            fake(cutlass.Int32, tokens, TOP_K),
            fake(cutlass.Float32, tokens, TOP_K),
            fake(cutlass.Int32, tokens, TOP_K),
            fake(cutlass.Int32, pairs),
            fake(cutlass.Int32, pairs),
            fake(cutlass.Int32, pairs),
            fake(cutlass.Int32, local_experts),
            stream,
            options=options,
        ),
        cute.compile(
            operands,
            fake(cutlass.Uint8, tokens, width),
            fake(cutlass.Float32, width // BLOCK, tokens, align=4),
            fake(cutlass.Int32, pairs),
            fake(cutlass.BFloat16, rows, width),
            *weights(2 * inner, width),
            *weights(width, inner),
            stream,
            options=options,
        ),
        cute.compile(
            gate_rows,
            fake(cutlass.BFloat16, rows, 2 * inner),
            fake(cutlass.BFloat16, rows, inner),
            stream,
            options=options,
        ),
        cute.compile(
            combine,
            fake(cutlass.BFloat16, rows, width),
            fake(cutlass.Int32, tokens, TOP_K),
            fake(cutlass.Float32, tokens, TOP_K),
            fake(cutlass.BFloat16, tokens, width),
            stream,
            options=options,
        ),
    )


@cache
def kernels_for(device: torch.device, experts: int, local_experts: int, width: int, inner: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", experts, local_experts, width, inner)


def solve(
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    local_expert_offset: int,
    routed_scaling_factor: float,
) -> torch.Tensor:
    (tokens, experts), device = routing_logits.shape, routing_logits.device
    local_experts, width, inner = gemm2_weights.shape
    find_rows, make_operands, gate, combine_rows = kernels_for(device, experts, local_experts, width, inner)
    selected, places = (torch.empty(tokens, TOP_K, dtype=torch.int32, device=device) for _ in range(2))
    weights = torch.empty(tokens, TOP_K, dtype=torch.float32, device=device)
    row_pairs = torch.empty(tokens * TOP_K, dtype=torch.int32, device=device)
    ends = torch.empty(local_experts, dtype=torch.int32, device=device)
    find_rows(
        *(routing_logits, routing_bias, local_expert_offset, routed_scaling_factor, selected, weights, places),
        *(selected.view(-1), places.view(-1), row_pairs, ends),
    )
    output = torch.zeros(tokens, width, dtype=torch.bfloat16, device=device)
    count = int(ends[-1])  # the height of the products is in the data
    if count == 0:
        return output
    rows = output.new_empty(count, width)
    first, second = output.new_empty(local_experts, 2 * inner, width), output.new_empty(gemm2_weights.shape)
    make_operands(
        *(hidden_states.view(torch.uint8), hidden_states_scale, row_pairs, rows),
        *(gemm1_weights.view(torch.uint8).flatten(0, 1), gemm1_weights_scale.flatten(0, 1), first.flatten(0, 1)),
        *(gemm2_weights.view(torch.uint8).flatten(0, 1), gemm2_weights_scale.flatten(0, 1), second.flatten(0, 1)),
    )
    gated = output.new_empty(count, inner)
    gate(torch._grouped_mm(rows, first.transpose(1, 2), offs=ends), gated)
    combine_rows(torch._grouped_mm(gated, second.transpose(1, 2), offs=ends), places, weights, output)
    return output
