"""p47, a mixture layer with correction bias and shared expert, in TIRx. The products stay with eager PyTorch: the
router's in slices of its depth, the shared expert's as plain ones, the routed experts' as grouped ones.

CUDA:
1. Routing: a warp adds up one token's logits, takes their softmax, selects, and counts the pairs of each expert with
   atomic additions, which also say where in its expert's rows a pair goes (in no particular order).
2. Ends: the running sum of these counts.
3. Rows: a thread block reads one token and writes it to all of its rows.
4. Gating of the two products, 8 values a thread.
5. Combination: a thread block adds up one token's results and the shared expert's in float32.

CPU: the same in plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

TOP_K = 8
NEVER = -3.0e38
VECTOR = 8  # bfloat16 values in 16 bytes
WARPS = 4
SLICES = 4
SCANNERS = 1024
THREADS = 256


def float32(x):
    return T.cast(x, "float32")


def sigmoid(x):
    return T.float32(1) / (T.float32(1) + T.exp(-x))


def gated(gate, up):
    return T.cast(float32(gate) * sigmoid(float32(gate)) * float32(up), "bfloat16")


@T.jit
def route_cuda(
    x: T.handle,
    b: T.handle,
    norm_min: T.float32,
    r: T.handle,
    se: T.handle,
    we: T.handle,
    ra: T.handle,
    co: T.handle,
    *,
    experts: T.constexpr,
    share: T.constexpr,
):
    """`share` experts a lane. `counts` must be zero before."""
    tokens = T.int32()
    slices = T.match_buffer(x, (SLICES, tokens, experts), "float32")
    bias = T.match_buffer(b, (experts,), "float32")
    logits = T.match_buffer(r, (tokens, experts), "float32")
    selected = T.match_buffer(se, (tokens, TOP_K), "int32")
    weights = T.match_buffer(we, (tokens, TOP_K), "float32")
    ranks = T.match_buffer(ra, (tokens, TOP_K), "int32")
    counts = T.match_buffer(co, (experts,), "int32")
    T.device_entry()
    block = T.cta_id([T.ceildiv(tokens, WARPS)])
    thread = T.thread_id([32 * WARPS])
    token = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    score = T.alloc_local((share,), "float32")
    part = T.alloc_local((SLICES, share), "float32")
    biased = T.alloc_local((share,), "float32")
    best = T.alloc_local((1,), "float32")
    total = T.alloc_local((1,), "float32")
    chosen = T.alloc_local((1,), "int32")
    own_prob = T.alloc_local((1,), "float32")
    own_expert = T.alloc_local((1,), "int32")
    token[0] = block * WARPS + thread // 32
    lane[0] = thread % 32
    if token[0] < tokens:
        for e in T.unroll(share):
            score[e] = T.float32(NEVER)
            biased[e] = T.float32(0)
        if lane[0] * share < experts:
            for s in T.unroll(SLICES):
                for e in T.vectorized(share):
                    part[s, e] = slices[s, token[0], lane[0] * share + e]
            for e in T.vectorized(share):
                biased[e] = bias[lane[0] * share + e]
            for e in T.unroll(share):
                score[e] = part[0, e]
                for s in T.unroll(SLICES - 1):
                    score[e] = score[e] + part[s + 1, e]
            for e in T.vectorized(share):
                logits[token[0], lane[0] * share + e] = score[e]
        best[0] = T.float32(NEVER)
        for e in T.unroll(share):
            best[0] = T.max(best[0], score[e])
        best[0] = T.cuda.warp_max(best[0])
        total[0] = T.float32(0)
        for e in T.unroll(share):
            score[e] = T.exp(score[e] - best[0])
            total[0] = total[0] + score[e]
        total[0] = T.cuda.warp_sum(total[0])
        for e in T.unroll(share):
            score[e] = score[e] / total[0]
            biased[e] = biased[e] + score[e]
            if lane[0] * share + e >= experts:
                biased[e] = T.float32(NEVER)
        own_prob[0] = T.float32(0)
        own_expert[0] = 0
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
            total[0] = T.float32(0)
            for e in T.unroll(share):
                if lane[0] * share + e == chosen[0]:
                    biased[e] = T.float32(NEVER)
                    total[0] = score[e]
            total[0] = T.cuda.warp_sum(total[0])
            if lane[0] == k:
                own_prob[0] = total[0]
                own_expert[0] = chosen[0]
        total[0] = T.max(T.cuda.warp_sum(own_prob[0]), norm_min)
        if lane[0] < TOP_K:
            selected[token[0], lane[0]] = own_expert[0]
            weights[token[0], lane[0]] = own_prob[0] / total[0]
            ranks[token[0], lane[0]] = T.cuda.atomic_add(T.address_of(counts[own_expert[0]]), T.int32(1))


@T.jit
def ends_cuda(co: T.handle, en: T.handle, *, experts: T.constexpr):
    counts = T.match_buffer(co, (experts,), "int32")
    ends = T.match_buffer(en, (experts,), "int32")
    T.device_entry()
    block = T.cta_id([1])
    thread = T.thread_id([SCANNERS])
    sums = T.alloc_shared((SCANNERS,), "int32")
    other = T.alloc_local((1,), "int32")
    other[0] = block
    if thread < experts:
        other[0] = counts[thread]
    sums[thread] = other[0]
    T.cuda.cta_sync()
    for k in T.unroll(10):  # doubling steps up to all 1024 threads
        other[0] = 0
        if thread >= (1 << k):
            other[0] = sums[thread - (1 << k)]
        T.cuda.cta_sync()
        sums[thread] = sums[thread] + other[0]
        T.cuda.cta_sync()
    if thread < experts:
        ends[thread] = sums[thread]


@T.jit
def rows_cuda(
    h: T.handle,
    se: T.handle,
    co: T.handle,
    en: T.handle,
    pl: T.handle,
    v: T.handle,
    *,
    experts: T.constexpr,
    width: T.constexpr,
    threads: T.constexpr,
):
    """`places` hold the ranks before and the rows after."""
    tokens = T.int32()
    pairs = T.int32()
    hidden = T.match_buffer(h, (tokens, width), "bfloat16")
    selected = T.match_buffer(se, (tokens, TOP_K), "int32")
    counts = T.match_buffer(co, (experts,), "int32")
    ends = T.match_buffer(en, (experts,), "int32")
    places = T.match_buffer(pl, (tokens, TOP_K), "int32")
    rows = T.match_buffer(v, (pairs, width), "bfloat16")
    T.device_entry()
    token = T.cta_id([tokens])
    thread = T.thread_id([threads])
    places_here = T.alloc_shared((TOP_K,), "int32")
    x = T.alloc_local((VECTOR,), "bfloat16")
    expert = T.alloc_local((1,), "int32")
    place = T.alloc_local((1,), "int32")
    if thread < width // VECTOR:
        for e in T.vectorized(VECTOR):
            x[e] = hidden[token, thread * VECTOR + e]
    if thread < TOP_K:
        expert[0] = selected[token, thread]
        place[0] = ends[expert[0]] - counts[expert[0]] + places[token, thread]
        places[token, thread] = place[0]
        places_here[thread] = place[0]
    T.cuda.cta_sync()
    if thread < width // VECTOR:
        for k in T.unroll(TOP_K):
            place[0] = places_here[k]
            for e in T.vectorized(VECTOR):
                rows[place[0], thread * VECTOR + e] = x[e]


@T.jit
def gate_cuda(g: T.handle, u: T.handle):
    """Replaces the gate."""
    vectors = T.int32()
    gate = T.match_buffer(g, (vectors, VECTOR), "bfloat16")
    up = T.match_buffer(u, (vectors, VECTOR), "bfloat16")
    T.device_entry()
    block = T.cta_id([T.ceildiv(vectors, THREADS)])
    thread = T.thread_id([THREADS])
    a = T.alloc_local((VECTOR,), "bfloat16")
    b = T.alloc_local((VECTOR,), "bfloat16")
    place = T.alloc_local((1,), "int32")
    place[0] = block * THREADS + thread
    if place[0] < vectors:
        for e in T.vectorized(VECTOR):
            a[e] = gate[place[0], e]
        for e in T.vectorized(VECTOR):
            b[e] = up[place[0], e]
        for e in T.unroll(VECTOR):
            a[e] = gated(a[e], b[e])
        for e in T.vectorized(VECTOR):
            gate[place[0], e] = a[e]


@T.jit
def combine_cuda(x: T.handle, pl: T.handle, we: T.handle, s: T.handle, o: T.handle, *, width: T.constexpr):
    tokens = T.int32()
    pairs = T.int32()
    rows = T.match_buffer(x, (pairs, width), "bfloat16")
    places = T.match_buffer(pl, (tokens, TOP_K), "int32")
    weights = T.match_buffer(we, (tokens, TOP_K), "float32")
    shared_out = T.match_buffer(s, (tokens, width), "bfloat16")
    out = T.match_buffer(o, (tokens, width), "bfloat16")
    T.device_entry()
    token = T.cta_id([tokens])
    thread = T.thread_id([width // VECTOR])
    total = T.alloc_local((VECTOR,), "float32")
    values = T.alloc_local((TOP_K, VECTOR), "bfloat16")
    row = T.alloc_local((VECTOR,), "bfloat16")
    place = T.alloc_local((TOP_K,), "int32")
    for k in T.unroll(TOP_K):
        place[k] = places[token, k]
    for e in T.vectorized(VECTOR):
        row[e] = shared_out[token, thread * VECTOR + e]
    for k in T.unroll(TOP_K):
        for e in T.vectorized(VECTOR):
            values[k, e] = rows[place[k], thread * VECTOR + e]
    for e in T.unroll(VECTOR):
        total[e] = float32(row[e])
    for k in T.unroll(TOP_K):
        for e in T.unroll(VECTOR):
            total[e] = total[e] + weights[token, k] * float32(values[k, e])
    for e in T.unroll(VECTOR):
        row[e] = T.cast(total[e], "bfloat16")
    for e in T.vectorized(VECTOR):
        out[token, thread * VECTOR + e] = row[e]


@T.jit
def route_cpu(
    x: T.handle,
    b: T.handle,
    norm_min: T.float32,
    r: T.handle,
    se: T.handle,
    we: T.handle,
    ra: T.handle,
    co: T.handle,
    *,
    experts: T.constexpr,
):
    tokens = T.int32()
    slices = T.match_buffer(x, (SLICES, tokens, experts), "float32")
    bias = T.match_buffer(b, (experts,), "float32")
    logits = T.match_buffer(r, (tokens, experts), "float32")
    selected = T.match_buffer(se, (tokens, TOP_K), "int32")
    weights = T.match_buffer(we, (tokens, TOP_K), "float32")
    ranks = T.match_buffer(ra, (tokens, TOP_K), "int32")
    counts = T.match_buffer(co, (experts,), "int32")
    score = T.alloc_buffer((experts,), "float32", scope="local")
    biased = T.alloc_buffer((experts,), "float32", scope="local")
    chosen = T.alloc_buffer((1,), "int32", scope="local")
    highest = T.alloc_buffer((1,), "float32", scope="local")
    total = T.alloc_buffer((1,), "float32", scope="local")
    for token in T.serial(tokens):
        highest[0] = T.float32(NEVER)
        for e in T.serial(experts):
            score[e] = slices[0, token, e]
            for s in T.serial(SLICES - 1):
                score[e] = score[e] + slices[s + 1, token, e]
            logits[token, e] = score[e]
            highest[0] = T.max(highest[0], score[e])
        total[0] = T.float32(0)
        for e in T.serial(experts):
            score[e] = T.exp(score[e] - highest[0])
            total[0] = total[0] + score[e]
        for e in T.serial(experts):
            score[e] = score[e] / total[0]
            biased[e] = score[e] + bias[e]
        total[0] = T.float32(0)
        for k in T.serial(TOP_K):
            chosen[0] = 0
            for e in T.serial(experts):
                if biased[e] > biased[chosen[0]]:
                    chosen[0] = e
            weights[token, k] = score[chosen[0]]
            total[0] = total[0] + weights[token, k]
            biased[chosen[0]] = T.float32(NEVER)
            selected[token, k] = chosen[0]
            ranks[token, k] = counts[chosen[0]]
            counts[chosen[0]] = counts[chosen[0]] + 1
        for k in T.serial(TOP_K):
            weights[token, k] = weights[token, k] / T.max(total[0], norm_min)


@T.jit
def ends_cpu(co: T.handle, en: T.handle, *, experts: T.constexpr):
    counts = T.match_buffer(co, (experts,), "int32")
    ends = T.match_buffer(en, (experts,), "int32")
    total = T.alloc_buffer((1,), "int32", scope="local")
    total[0] = 0
    for expert in T.serial(experts):
        total[0] = total[0] + counts[expert]
        ends[expert] = total[0]


@T.jit
def rows_cpu(
    h: T.handle,
    se: T.handle,
    co: T.handle,
    en: T.handle,
    pl: T.handle,
    v: T.handle,
    *,
    experts: T.constexpr,
    width: T.constexpr,
):
    tokens = T.int32()
    pairs = T.int32()
    hidden = T.match_buffer(h, (tokens, width), "bfloat16")
    selected = T.match_buffer(se, (tokens, TOP_K), "int32")
    counts = T.match_buffer(co, (experts,), "int32")
    ends = T.match_buffer(en, (experts,), "int32")
    places = T.match_buffer(pl, (tokens, TOP_K), "int32")
    rows = T.match_buffer(v, (pairs, width), "bfloat16")
    for token, k in T.grid(tokens, TOP_K):
        places[token, k] = places[token, k] + ends[selected[token, k]] - counts[selected[token, k]]
        for c in T.serial(width):
            rows[places[token, k], c] = hidden[token, c]


@T.jit
def gate_cpu(g: T.handle, u: T.handle):
    vectors = T.int32()
    gate = T.match_buffer(g, (vectors, VECTOR), "bfloat16")
    up = T.match_buffer(u, (vectors, VECTOR), "bfloat16")
    for v, e in T.grid(vectors, VECTOR):
        gate[v, e] = gated(gate[v, e], up[v, e])


@T.jit
def combine_cpu(x: T.handle, pl: T.handle, we: T.handle, s: T.handle, o: T.handle, *, width: T.constexpr):
    tokens = T.int32()
    pairs = T.int32()
    rows = T.match_buffer(x, (pairs, width), "bfloat16")
    places = T.match_buffer(pl, (tokens, TOP_K), "int32")
    weights = T.match_buffer(we, (tokens, TOP_K), "float32")
    shared_out = T.match_buffer(s, (tokens, width), "bfloat16")
    out = T.match_buffer(o, (tokens, width), "bfloat16")
    total = T.alloc_buffer((1,), "float32", scope="local")
    for token, c in T.grid(tokens, width):
        total[0] = float32(shared_out[token, c])
        for k in T.serial(TOP_K):
            total[0] = total[0] + weights[token, k] * float32(rows[places[token, k], c])
        out[token, c] = T.cast(total[0], "bfloat16")


def compile_for(arch: str, experts: int = 64, width: int = 8192) -> list[tvm.runtime.Executable]:
    """Routing, ends, rows, gating and combination for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert width % VECTOR == 0 and width // VECTOR <= 1024 and experts <= SCANNERS
    if arch == "llvm":
        kernels = [
            route_cpu.specialize(experts=experts),
            ends_cpu.specialize(experts=experts),
            rows_cpu.specialize(experts=experts, width=width),
            gate_cpu.specialize(),
            combine_cpu.specialize(width=width),
        ]
        return [tvm.compile(tvm.IRModule({"main": kernel}), target="llvm") for kernel in kernels]
    share = 1 if experts <= 32 else 2
    assert share <= experts <= 32 * share and experts % share == 0
    kernels = [
        route_cuda.specialize(experts=experts, share=share),
        ends_cuda.specialize(experts=experts),
        rows_cuda.specialize(experts=experts, width=width, threads=max(32, width // VECTOR)),
        gate_cuda.specialize(),
        combine_cuda.specialize(width=width),
    ]
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return [tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx") for kernel in kernels]


@cache
def kernels_for(device: torch.device, experts: int, width: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return [executable["main"] for executable in compile_for(arch, experts, width)]


def solve(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    e_score_correction_bias: torch.Tensor,
    gate_proj: torch.Tensor,
    up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    shared_gate_proj: torch.Tensor,
    shared_up_proj: torch.Tensor,
    shared_down_proj: torch.Tensor,
    norm_min: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    (experts, width), device = gate_weight.shape, hidden_states.device
    x = hidden_states.view(-1, width)
    tokens = len(x)
    route, find_ends, fill_rows, gate_both, combine = kernels_for(device, experts, width)
    tall = x.float().view(tokens, SLICES, -1).transpose(0, 1)
    slices = torch.bmm(tall, gate_weight.view(experts, SLICES, -1).permute(1, 2, 0))  # [slices, tokens, experts]
    router_logits = slices.new_empty(tokens, experts)
    selected, places = (torch.empty(tokens, TOP_K, dtype=torch.int32, device=device) for _ in range(2))
    weights = slices.new_empty(tokens, TOP_K)
    counts, ends = torch.zeros(2, experts, dtype=torch.int32, device=device)
    rows = x.new_empty(tokens * TOP_K, width)
    route(slices, e_score_correction_bias.view(-1), norm_min, router_logits, selected, weights, places, counts)
    find_ends(counts, ends)
    fill_rows(x, selected, counts, ends, places, rows)

    gate = torch._grouped_mm(rows, gate_proj.transpose(1, 2), offs=ends)
    up = torch._grouped_mm(rows, up_proj.transpose(1, 2), offs=ends)
    gate_both(gate.view(-1, VECTOR), up.view(-1, VECTOR))
    expert_out = torch._grouped_mm(gate, down_proj.transpose(1, 2), offs=ends)

    gate, up = torch.mm(x, shared_gate_proj.t()), torch.mm(x, shared_up_proj.t())
    gate_both(gate.view(-1, VECTOR), up.view(-1, VECTOR))
    shared_out = torch.mm(gate, shared_down_proj.t())
    output = torch.empty_like(hidden_states)
    combine(expert_out, places, weights, shared_out, output.view(-1, width))
    return output, router_logits
