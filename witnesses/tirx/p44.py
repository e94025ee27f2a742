"""p44, one rank of an FP8 mixture layer, in TIRx. The grouped products stay with eager PyTorch, in bfloat16.

CUDA:
1. Routing: a warp takes one token's logits, some consecutive experts a lane, through sigmoid, group ranking, selection
   and weights, all in registers.
2. Places: a thread block has one local expert and gives its pairs of token and expert rows behind those of the experts
   before it.
3. Operands: the tokens of these rows, and both kinds of weights, become the bfloat16 values of their codes and scales.
4. Gating of the first product, and 5. the sum of a token's results in float32.

CPU: the same in plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

GROUPS = 8
KEPT = 4
TOP_K = 8
BLOCK = 128
NEVER = -3.0e38
NOWHERE = -1
LOG2_E = 1.4426950408889634
LOG2_E_ROUNDED = 1.44269502162933349609375
WARPS = 4
SCANNERS = 1024
VECTOR = 8
CODES = 16


def float32(x):
    return T.cast(x, "float32")


def e4m3(code):
    """The float32 that an E4M3 byte stands for. An expression, for any target."""
    magnitude = T.cast(code, "uint32") & T.uint32(0x7F)
    normal = T.reinterpret("float32", (magnitude << T.uint32(20)) + T.uint32(120 << 23))
    subnormal = T.cast(magnitude, "float32") * T.float32(2**-9)
    value = T.if_then_else(magnitude < T.uint32(8), subnormal, normal)
    return T.if_then_else(code >= T.uint8(0x80), -value, value)


def gated(gate, up):
    return T.cast(float32(gate) / (T.float32(1) + T.exp(-float32(gate))) * float32(up), "bfloat16")


@T.jit
def route_cuda(
    x: T.handle,
    b: T.handle,
    offset: T.int32,
    factor: T.float32,
    se: T.handle,
    we: T.handle,
    pl: T.handle,
    *,
    experts: T.constexpr,
    local_experts: T.constexpr,
    share: T.constexpr,
    lanes: T.constexpr,
):
    """`share` experts a lane, `lanes` lanes a group."""
    tokens = T.int32()
    logits = T.match_buffer(x, (tokens, experts), "float32")
    bias = T.match_buffer(b, (experts,), "bfloat16")
    selected = T.match_buffer(se, (tokens, TOP_K), "int32")
    weights = T.match_buffer(we, (tokens, TOP_K), "float32")
    places = T.match_buffer(pl, (tokens, TOP_K), "int32")
    T.device_entry()
    block = T.cta_id([T.ceildiv(tokens, WARPS)])
    thread = T.thread_id([32 * WARPS])
    token = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    score = T.alloc_local((share,), "float32")
    biased = T.alloc_local((share,), "float32")
    rank = T.alloc_local((share,), "int32")
    best = T.alloc_local((2,), "float32")
    other = T.alloc_local((2,), "float32")
    power = T.alloc_local((2,), "float32")
    chosen = T.alloc_local((1,), "int32")
    better = T.alloc_local((1,), "int32")
    total = T.alloc_local((1,), "float32")
    token[0] = block * WARPS + thread // 32
    lane[0] = thread % 32
    if token[0] < tokens:
        for e in T.vectorized(share):
            score[e] = logits[token[0], lane[0] * share + e]
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
        for e in T.unroll(share):
            if rank[e] < TOP_K:
                chosen[0] = lane[0] * share + e - offset
                if chosen[0] < 0 or chosen[0] >= local_experts:
                    chosen[0] = NOWHERE
                selected[token[0], rank[e]] = chosen[0]
                weights[token[0], rank[e]] = score[e] / total[0] * factor
                places[token[0], rank[e]] = NOWHERE


@T.jit
def place_cuda(se: T.handle, pl: T.handle, ro: T.handle, en: T.handle, *, local_experts: T.constexpr):
    """All flat: a pair is token · 8 + slot."""
    pairs = T.int32()
    selected = T.match_buffer(se, (pairs,), "int32")
    places = T.match_buffer(pl, (pairs,), "int32")
    row_pairs = T.match_buffer(ro, (pairs,), "int32")
    ends = T.match_buffer(en, (local_experts,), "int32")
    T.device_entry()
    expert = T.cta_id([local_experts])
    thread = T.thread_id([SCANNERS])
    sums = T.alloc_shared((2, SCANNERS), "int32")  # pairs of this expert, pairs of those before it
    stretch = T.alloc_local((1,), "int32")
    counts = T.alloc_local((2,), "int32")
    others = T.alloc_local((2,), "int32")
    place = T.alloc_local((1,), "int32")
    pair = T.alloc_local((1,), "int32")
    stretch[0] = T.ceildiv(pairs, SCANNERS)
    counts[0] = 0
    counts[1] = 0
    for i in T.serial(stretch[0]):
        pair[0] = thread * stretch[0] + i
        if pair[0] < pairs:
            if selected[pair[0]] == expert:
                counts[0] = counts[0] + 1
            elif selected[pair[0]] >= 0 and selected[pair[0]] < expert:
                counts[1] = counts[1] + 1
    for h in T.unroll(2):
        sums[h, thread] = counts[h]
    T.cuda.cta_sync()
    for k in T.unroll(10):  # doubling steps up to all 1024 threads
        for h in T.unroll(2):
            others[h] = 0
            if thread >= (1 << k):
                others[h] = sums[h, thread - (1 << k)]
        T.cuda.cta_sync()
        for h in T.unroll(2):
            sums[h, thread] = sums[h, thread] + others[h]
        T.cuda.cta_sync()
    place[0] = sums[1, SCANNERS - 1] + sums[0, thread] - counts[0]
    for i in T.serial(stretch[0]):
        pair[0] = thread * stretch[0] + i
        if pair[0] < pairs and selected[pair[0]] == expert:
            places[pair[0]] = place[0]
            row_pairs[place[0]] = pair[0]
            place[0] = place[0] + 1
    if thread == 0:
        ends[expert] = sums[0, SCANNERS - 1] + sums[1, SCANNERS - 1]


@T.jit
def token_cuda(c: T.handle, s: T.handle, ro: T.handle, v: T.handle, *, width: T.constexpr):
    tokens = T.int32()
    pairs = T.int32()
    count = T.int32()
    codes = T.match_buffer(c, (tokens, width), "uint8")
    scales = T.match_buffer(s, (width // BLOCK, tokens), "float32")
    row_pairs = T.match_buffer(ro, (pairs,), "int32")
    rows = T.match_buffer(v, (count, width), "bfloat16")
    T.device_entry()
    row = T.cta_id([count])
    thread = T.thread_id([width // CODES])
    raw = T.alloc_local((CODES,), "uint8")
    values = T.alloc_local((CODES // VECTOR, VECTOR), "bfloat16")
    token = T.alloc_local((1,), "int32")
    scale = T.alloc_local((1,), "float32")
    token[0] = row_pairs[row] // TOP_K
    scale[0] = scales[thread * CODES // BLOCK, token[0]]
    for e in T.vectorized(CODES):
        raw[e] = codes[token[0], thread * CODES + e]
    for part in T.unroll(CODES // VECTOR):
        for e in T.unroll(VECTOR):
            values[part, e] = T.cast(e4m3(raw[part * VECTOR + e]) * scale[0], "bfloat16")
        for e in T.vectorized(VECTOR):
            rows[row, (thread * (CODES // VECTOR) + part) * VECTOR + e] = values[part, e]


@T.jit
def weight_cuda(c: T.handle, s: T.handle, v: T.handle, *, columns: T.constexpr):
    height = T.int32()
    scale_rows = T.int32()
    codes = T.match_buffer(c, (height, columns), "uint8")
    scales = T.match_buffer(s, (scale_rows, columns // BLOCK), "float32")
    target = T.match_buffer(v, (height, columns), "bfloat16")
    T.device_entry()
    row = T.cta_id([height])
    thread = T.thread_id([columns // CODES])
    raw = T.alloc_local((CODES,), "uint8")
    values = T.alloc_local((CODES // VECTOR, VECTOR), "bfloat16")
    scale = T.alloc_local((1,), "float32")
    scale[0] = scales[row // BLOCK, thread * CODES // BLOCK]
    for e in T.vectorized(CODES):
        raw[e] = codes[row, thread * CODES + e]
    for part in T.unroll(CODES // VECTOR):
        for e in T.unroll(VECTOR):
            values[part, e] = T.cast(e4m3(raw[part * VECTOR + e]) * scale[0], "bfloat16")
        for e in T.vectorized(VECTOR):
            target[row, (thread * (CODES // VECTOR) + part) * VECTOR + e] = values[part, e]


@T.jit
def gate_cuda(b: T.handle, o: T.handle, *, inner: T.constexpr):
    """A row of `both` holds the values, then their gates."""
    count = T.int32()
    both = T.match_buffer(b, (count, 2 * inner), "bfloat16")
    out = T.match_buffer(o, (count, inner), "bfloat16")
    T.device_entry()
    row = T.cta_id([count])
    thread = T.thread_id([inner // VECTOR])
    up = T.alloc_local((VECTOR,), "bfloat16")
    gate = T.alloc_local((VECTOR,), "bfloat16")
    for e in T.vectorized(VECTOR):
        up[e] = both[row, thread * VECTOR + e]
    for e in T.vectorized(VECTOR):
        gate[e] = both[row, inner + thread * VECTOR + e]
    for e in T.unroll(VECTOR):
        up[e] = gated(gate[e], up[e])
    for e in T.vectorized(VECTOR):
        out[row, thread * VECTOR + e] = up[e]


@T.jit
def combine_cuda(x: T.handle, pl: T.handle, we: T.handle, o: T.handle, *, width: T.constexpr):
    tokens = T.int32()
    count = T.int32()
    rows = T.match_buffer(x, (count, width), "bfloat16")
    places = T.match_buffer(pl, (tokens, TOP_K), "int32")
    weights = T.match_buffer(we, (tokens, TOP_K), "float32")
    out = T.match_buffer(o, (tokens, width), "bfloat16")
    T.device_entry()
    token = T.cta_id([tokens])
    thread = T.thread_id([width // VECTOR])
    total = T.alloc_local((VECTOR,), "float32")
    row = T.alloc_local((VECTOR,), "bfloat16")
    place = T.alloc_local((1,), "int32")
    for e in T.unroll(VECTOR):
        total[e] = T.float32(0)
    for slot in T.unroll(TOP_K):
        place[0] = places[token, slot]
        if place[0] >= 0:
            for e in T.vectorized(VECTOR):
                row[e] = rows[place[0], thread * VECTOR + e]
            for e in T.unroll(VECTOR):
                total[e] = total[e] + weights[token, slot] * float32(row[e])
    for e in T.unroll(VECTOR):
        row[e] = T.cast(total[e], "bfloat16")
    for e in T.vectorized(VECTOR):
        out[token, thread * VECTOR + e] = row[e]


@T.jit
def route_cpu(
    x: T.handle,
    b: T.handle,
    offset: T.int32,
    factor: T.float32,
    se: T.handle,
    we: T.handle,
    pl: T.handle,
    *,
    experts: T.constexpr,
    local_experts: T.constexpr,
):
    tokens = T.int32()
    logits = T.match_buffer(x, (tokens, experts), "float32")
    bias = T.match_buffer(b, (experts,), "bfloat16")
    selected = T.match_buffer(se, (tokens, TOP_K), "int32")
    weights = T.match_buffer(we, (tokens, TOP_K), "float32")
    places = T.match_buffer(pl, (tokens, TOP_K), "int32")
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
            biased[e] = score[e] + float32(bias[e])
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
            weights[token, k] = score[chosen[0]]
            total[0] = total[0] + score[chosen[0]]
            places[token, k] = NOWHERE
            selected[token, k] = NOWHERE
            if chosen[0] >= offset and chosen[0] < offset + local_experts:
                selected[token, k] = chosen[0] - offset
        for k in T.serial(TOP_K):
            weights[token, k] = weights[token, k] / total[0] * factor


@T.jit
def place_cpu(se: T.handle, pl: T.handle, ro: T.handle, en: T.handle, *, local_experts: T.constexpr):
    pairs = T.int32()
    selected = T.match_buffer(se, (pairs,), "int32")
    places = T.match_buffer(pl, (pairs,), "int32")
    row_pairs = T.match_buffer(ro, (pairs,), "int32")
    ends = T.match_buffer(en, (local_experts,), "int32")
    place = T.alloc_buffer((1,), "int32", scope="local")
    place[0] = 0
    for expert in T.serial(local_experts):
        for pair in T.serial(pairs):
            if selected[pair] == expert:
                places[pair] = place[0]
                row_pairs[place[0]] = pair
                place[0] = place[0] + 1
        ends[expert] = place[0]


@T.jit
def token_cpu(c: T.handle, s: T.handle, ro: T.handle, v: T.handle, *, width: T.constexpr):
    tokens = T.int32()
    pairs = T.int32()
    count = T.int32()
    codes = T.match_buffer(c, (tokens, width), "uint8")
    scales = T.match_buffer(s, (width // BLOCK, tokens), "float32")
    row_pairs = T.match_buffer(ro, (pairs,), "int32")
    rows = T.match_buffer(v, (count, width), "bfloat16")
    for row, i in T.grid(count, width):
        rows[row, i] = T.cast(
            e4m3(codes[row_pairs[row] // TOP_K, i]) * scales[i // BLOCK, row_pairs[row] // TOP_K], "bfloat16"
        )


@T.jit
def weight_cpu(c: T.handle, s: T.handle, v: T.handle, *, columns: T.constexpr):
    height = T.int32()
    scale_rows = T.int32()
    codes = T.match_buffer(c, (height, columns), "uint8")
    scales = T.match_buffer(s, (scale_rows, columns // BLOCK), "float32")
    target = T.match_buffer(v, (height, columns), "bfloat16")
    for row, i in T.grid(height, columns):
        target[row, i] = T.cast(e4m3(codes[row, i]) * scales[row // BLOCK, i // BLOCK], "bfloat16")


@T.jit
def gate_cpu(b: T.handle, o: T.handle, *, inner: T.constexpr):
    count = T.int32()
    both = T.match_buffer(b, (count, 2 * inner), "bfloat16")
    out = T.match_buffer(o, (count, inner), "bfloat16")
    for row, i in T.grid(count, inner):
        out[row, i] = gated(both[row, inner + i], both[row, i])


@T.jit
def combine_cpu(x: T.handle, pl: T.handle, we: T.handle, o: T.handle, *, width: T.constexpr):
    tokens = T.int32()
    count = T.int32()
    rows = T.match_buffer(x, (count, width), "bfloat16")
    places = T.match_buffer(pl, (tokens, TOP_K), "int32")
    weights = T.match_buffer(we, (tokens, TOP_K), "float32")
    out = T.match_buffer(o, (tokens, width), "bfloat16")
    total = T.alloc_buffer((1,), "float32", scope="local")
    for token, i in T.grid(tokens, width):
        total[0] = T.float32(0)
        for slot in T.serial(TOP_K):
            if places[token, slot] >= 0:
                total[0] = total[0] + weights[token, slot] * float32(rows[places[token, slot], i])
        out[token, i] = T.cast(total[0], "bfloat16")


def compile_for(
    arch: str, experts: int = 256, local_experts: int = 32, width: int = 7168, inner: int = 2048
) -> list[tvm.runtime.Executable]:
    """Routing, places, tokens, both kinds of weights, gating and combination for `arch` (`llvm`, `sm_90a`, ...); needs
    no GPU."""
    on_cpu = arch == "llvm"
    sizes = {"experts": experts, "local_experts": local_experts}
    weight = weight_cpu if on_cpu else weight_cuda
    kernels = [
        route_cpu.specialize(**sizes)
        if on_cpu
        else route_cuda.specialize(**sizes, share=experts // 32, lanes=32 // GROUPS),
        (place_cpu if on_cpu else place_cuda).specialize(local_experts=local_experts),
        (token_cpu if on_cpu else token_cuda).specialize(width=width),
        weight.specialize(columns=width),
        weight.specialize(columns=inner),
        (gate_cpu if on_cpu else gate_cuda).specialize(inner=inner),
        (combine_cpu if on_cpu else combine_cuda).specialize(width=width),
    ]
    if on_cpu:
        return [tvm.compile(tvm.IRModule({"main": kernel}), target="llvm") for kernel in kernels]
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return [tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx") for kernel in kernels]


@cache
def kernels_for(device: torch.device, experts: int, local_experts: int, width: int, inner: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return [executable["main"] for executable in compile_for(arch, experts, local_experts, width, inner)]


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
    route, find_places, take_tokens, take_first, take_second, gate, combine = kernels_for(
        device, experts, local_experts, width, inner
    )
    selected, places = (torch.empty(tokens, TOP_K, dtype=torch.int32, device=device) for _ in range(2))
    weights = torch.empty(tokens, TOP_K, dtype=torch.float32, device=device)
    row_pairs = torch.empty(tokens * TOP_K, dtype=torch.int32, device=device)
    ends = torch.empty(local_experts, dtype=torch.int32, device=device)
    route(routing_logits, routing_bias, local_expert_offset, routed_scaling_factor, selected, weights, places)
    find_places(selected.view(-1), places.view(-1), row_pairs, ends)
    output = torch.zeros(tokens, width, dtype=torch.bfloat16, device=device)
    count = int(ends[-1])  # the height of the products is in the data
    if count == 0:
        return output
    rows = output.new_empty(count, width)
    first, second = output.new_empty(local_experts, 2 * inner, width), output.new_empty(gemm2_weights.shape)
    take_tokens(hidden_states.view(torch.uint8), hidden_states_scale, row_pairs, rows)
    take_first(gemm1_weights.view(torch.uint8).flatten(0, 1), gemm1_weights_scale.flatten(0, 1), first.flatten(0, 1))
    take_second(gemm2_weights.view(torch.uint8).flatten(0, 1), gemm2_weights_scale.flatten(0, 1), second.flatten(0, 1))
    gated_rows = output.new_empty(count, inner)
    gate(torch._grouped_mm(rows, first.transpose(1, 2), offs=ends), gated_rows)
    combine(torch._grouped_mm(gated_rows, second.transpose(1, 2), offs=ends), places, weights, output)
    return output
