"""p48, a mixture layer of many small experts, in CuTe DSL. The products stay with eager PyTorch: the router's and the
shared expert's as plain ones, the routed experts' as grouped ones.

1. Routing: a warp takes one token's logits, rounds them for the output, selects, and counts the pairs of each expert
   with atomic additions, which also say where in its expert's rows a pair goes (in no particular order).
2. Ends: the running sum of these counts.
3. Rows: a thread block reads one token, writes it to all of its rows and finds the shared expert's gate.
4. Gating of the two products, 8 values a thread.
5. Combination: a thread block adds up one token's results and the shared expert's in float32.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

TOP_K = 10
NEVER = -3.0e38
VECTOR = 8  # bfloat16 values in 16 bytes
WARPS = 4
SCANNERS = 1024
THREADS = 256


@cute.kernel
def route_kernel(
    logits: cute.Tensor,
    rounded: cute.Tensor,
    selected: cute.Tensor,
    weights: cute.Tensor,
    ranks: cute.Tensor,
    counts: cute.Tensor,
    vector: cutlass.Constexpr[int],
):
    """`counts` must be zero before."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    token = block * WARPS + thread // cute.arch.WARP_SIZE
    lane = thread % cute.arch.WARP_SIZE
    experts = cutlass.const_expr(logits.shape[1])
    lanes = cutlass.const_expr(cute.arch.WARP_SIZE)
    chunks = cutlass.const_expr((experts + lanes * vector - 1) // (lanes * vector))
    if token < logits.shape[0]:
        score = cute.make_rmem_tensor((vector, chunks), cutlass.Float32)
        short = cute.make_rmem_tensor((vector, chunks), cutlass.BFloat16)
        score.fill(NEVER)
        for c in cutlass.range_constexpr(chunks):
            if (c * lanes + lane) * vector < experts:
                part = cute.local_tile(logits[token, None], (vector,), (c * lanes + lane,))
                cute.autovec_copy(part, score[None, c])
        short.store(score.load().to(cutlass.BFloat16))
        for c in cutlass.range_constexpr(chunks):
            if (c * lanes + lane) * vector < experts:
                part = cute.local_tile(rounded[token, None], (vector,), (c * lanes + lane,))
                cute.autovec_copy(short[None, c], part)

        highest, own_score = cutlass.Float32(NEVER), cutlass.Float32(NEVER)
        own_expert = cutlass.Int32(0)
        for k in cutlass.range_constexpr(TOP_K):
            best = cutlass.Float32(NEVER)
            for c in cutlass.range_constexpr(chunks):
                for e in cutlass.range_constexpr(vector):
                    best = cute.arch.fmax(best, score[e, c])
            best = cute.arch.warp_reduction_max(best)
            chosen = cutlass.Int32(experts)
            for c in cutlass.range_constexpr(chunks):
                for e in cutlass.range_constexpr(vector):
                    if score[e, c] == best:
                        chosen = cutlass.min(chosen, (c * lanes + lane) * vector + e)
            chosen = cute.arch.warp_redux_sync(chosen, kind="min")
            for c in cutlass.range_constexpr(chunks):
                for e in cutlass.range_constexpr(vector):
                    if (c * lanes + lane) * vector + e == chosen:
                        score[e, c] = cutlass.Float32(NEVER)
            if cutlass.const_expr(k == 0):
                highest = best
            if lane == k:
                own_score = best
                own_expert = chosen
        # The softmax's denominator cancels in the normalised weights.
        own_score = cute.math.exp(own_score - highest)
        total = cute.arch.warp_reduction_sum(own_score)
        if lane < TOP_K:
            selected[token, lane] = own_expert
            weights[token, lane] = own_score / total
            ranks[token, lane] = cute.arch.atomic_add(counts.iterator + own_expert, cutlass.Int32(1))


@cute.kernel
def ends_kernel(counts: cute.Tensor, ends: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    sums = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.Int32, cute.make_layout(SCANNERS), 16)
    own = cutlass.Int32(0)
    if thread < counts.shape[0]:
        own = counts[thread]
    sums[thread] = own
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
    if thread < counts.shape[0]:
        ends[thread] = sums[thread]


@cute.kernel
def rows_kernel(
    hidden: cute.Tensor,
    shared_expert_gate: cute.Tensor,
    selected: cute.Tensor,
    counts: cute.Tensor,
    ends: cute.Tensor,
    places: cute.Tensor,
    shares: cute.Tensor,
    rows: cute.Tensor,
    warps: cutlass.Constexpr[int],
):
    """`places` hold the ranks before and the rows after."""
    thread, _, _ = cute.arch.thread_idx()
    token, _, _ = cute.arch.block_idx()
    vectors = cutlass.const_expr(hidden.shape[1] // VECTOR)
    shared = cutlass.utils.SmemAllocator()
    partial = shared.allocate_tensor(cutlass.Float32, cute.make_layout(warps), 16)
    places_here = shared.allocate_tensor(cutlass.Int32, cute.make_layout(TOP_K), 16)
    x = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    gate = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    x.fill(0.0)
    gate.fill(0.0)
    if thread < vectors:
        cute.autovec_copy(cute.local_tile(hidden[token, None], (VECTOR,), (thread,)), x)
        cute.autovec_copy(cute.local_tile(shared_expert_gate, (VECTOR,), (thread,)), gate)
    if thread < TOP_K:
        expert = selected[token, thread]
        place = ends[expert] - counts[expert] + places[token, thread]
        places[token, thread] = place
        places_here[thread] = place
    products = x.load().to(cutlass.Float32) * gate.load().to(cutlass.Float32)
    total = cute.arch.warp_reduction_sum(products.reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0))
    if thread % cute.arch.WARP_SIZE == 0:
        partial[thread // cute.arch.WARP_SIZE] = total
    cute.arch.sync_threads()
    if thread == 0:
        dot = cutlass.Float32(0.0)
        for w in cutlass.range_constexpr(warps):
            dot += partial[w]
        shares[token] = 1.0 / (1.0 + cute.math.exp(-dot))
    if thread < vectors:
        for k in cutlass.range_constexpr(TOP_K):
            cute.autovec_copy(x, cute.local_tile(rows[places_here[k], None], (VECTOR,), (thread,)))


@cute.kernel
def gate_kernel(gate: cute.Tensor, up: cute.Tensor):
    """Flat; replaces the gate."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    place = block * THREADS + thread
    if place < gate.shape[0] // VECTOR:
        a = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
        b = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
        cute.autovec_copy(cute.local_tile(gate, (VECTOR,), (place,)), a)
        cute.autovec_copy(cute.local_tile(up, (VECTOR,), (place,)), b)
        g = a.load().to(cutlass.Float32)
        a.store((g / (1.0 + cute.math.exp(-g)) * b.load().to(cutlass.Float32)).to(cutlass.BFloat16))
        cute.autovec_copy(a, cute.local_tile(gate, (VECTOR,), (place,)))


@cute.kernel
def combine_kernel(
    rows: cute.Tensor,
    places: cute.Tensor,
    weights: cute.Tensor,
    shared_out: cute.Tensor,
    shares: cute.Tensor,
    out: cute.Tensor,
):
    thread, _, _ = cute.arch.thread_idx()
    token, _, _ = cute.arch.block_idx()
    values = cute.make_rmem_tensor((VECTOR, TOP_K), cutlass.BFloat16)
    row = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    total = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    cute.autovec_copy(cute.local_tile(shared_out[token, None], (VECTOR,), (thread,)), row)
    for k in cutlass.range_constexpr(TOP_K):
        cute.autovec_copy(cute.local_tile(rows[places[token, k], None], (VECTOR,), (thread,)), values[None, k])
    total.store(row.load().to(cutlass.Float32) * shares[token])
    for k in cutlass.range_constexpr(TOP_K):
        total.store(total.load() + values[None, k].load().to(cutlass.Float32) * weights[token, k])
    row.store(total.load().to(cutlass.BFloat16))
    cute.autovec_copy(row, cute.local_tile(out[token, None], (VECTOR,), (thread,)))


@cute.jit
def route(
    logits: cute.Tensor,
    rounded: cute.Tensor,
    hidden: cute.Tensor,
    shared_expert_gate: cute.Tensor,
    selected: cute.Tensor,
    weights: cute.Tensor,
    places: cute.Tensor,
    shares: cute.Tensor,
    counts: cute.Tensor,
    ends: cute.Tensor,
    rows: cute.Tensor,
    stream,
    vector: cutlass.Constexpr[int],
    warps: cutlass.Constexpr[int],
):
    tokens = hidden.shape[0]
    route_kernel(logits, rounded, selected, weights, places, counts, vector).launch(
        grid=(cute.ceil_div(tokens, WARPS), 1, 1), block=(cute.arch.WARP_SIZE * WARPS, 1, 1), stream=stream
    )
    ends_kernel(counts, ends).launch(grid=(1, 1, 1), block=(SCANNERS, 1, 1), stream=stream)
    rows_kernel(hidden, shared_expert_gate, selected, counts, ends, places, shares, rows, warps).launch(
        grid=(tokens, 1, 1), block=(cute.arch.WARP_SIZE * warps, 1, 1), stream=stream
    )


@cute.jit
def gate_products(gate: cute.Tensor, up: cute.Tensor, stream):
    gate_kernel(gate, up).launch(
        grid=((gate.shape[0] // VECTOR + THREADS - 1) // THREADS, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.jit
def combine(
    rows: cute.Tensor,
    places: cute.Tensor,
    weights: cute.Tensor,
    shared_out: cute.Tensor,
    shares: cute.Tensor,
    out: cute.Tensor,
    stream,
):
    combine_kernel(rows, places, weights, shared_out, shares, out).launch(
        grid=(out.shape[0], 1, 1), block=(out.shape[1] // VECTOR, 1, 1), stream=stream
    )


def compile_for(arch: str, experts: int = 512, width: int = 2048):
    """The three functions for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert width % VECTOR == 0 and width // VECTOR <= 1024 and experts <= SCANNERS
    tokens, pairs = cute.sym_int(), cute.sym_int()
    values = cute.sym_int(divisibility=VECTOR)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {arch}"

    def fake(dtype, *shape, align: int = 16):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

    first = cute.compile(
        route,
        fake(cutlass.Float32, tokens, experts),
        fake(cutlass.BFloat16, tokens, experts),
        fake(cutlass.BFloat16, tokens, width),
        fake(cutlass.BFloat16, width),
        fake(cutlass.Int32, tokens, TOP_K),
        fake(cutlass.Float32, tokens, TOP_K),
        fake(cutlass.Int32, tokens, TOP_K),
        fake(cutlass.Float32, tokens),
        fake(cutlass.Int32, experts, align=4),
        fake(cutlass.Int32, experts, align=4),
        fake(cutlass.BFloat16, pairs, width),
        stream,
        4 if experts % 128 == 0 else 1,
        -(-width // (32 * VECTOR)),
        options=options,
    )
    flat = [fake(cutlass.BFloat16, values) for _ in "gu"]
    second = cute.compile(gate_products, *flat, stream, options=options)
    third = cute.compile(
        combine,
        fake(cutlass.BFloat16, pairs, width),
        fake(cutlass.Int32, tokens, TOP_K),
        fake(cutlass.Float32, tokens, TOP_K),
        fake(cutlass.BFloat16, tokens, width),
        fake(cutlass.Float32, tokens),
        fake(cutlass.BFloat16, tokens, width),
        stream,
        options=options,
    )
    return first, second, third


@cache
def kernels_for(device: torch.device, experts: int, width: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", experts, width)


def solve(
    hidden_states: torch.Tensor,
    router_weight: torch.Tensor,
    gate_proj: torch.Tensor,
    up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    shared_gate_proj: torch.Tensor,
    shared_up_proj: torch.Tensor,
    shared_down_proj: torch.Tensor,
    shared_expert_gate: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    (experts, width), device = router_weight.shape, hidden_states.device
    x = hidden_states.view(-1, width)
    tokens = len(x)
    find_rows, gate_both, combine_all = kernels_for(device, experts, width)
    logits = torch.mm(x, router_weight.t(), out_dtype=torch.float32)
    router_logits = x.new_empty(tokens, experts)
    selected, places = (torch.empty(tokens, TOP_K, dtype=torch.int32, device=device) for _ in range(2))
    weights, shares = logits.new_empty(tokens, TOP_K), logits.new_empty(tokens)
    counts, ends = torch.zeros(2, experts, dtype=torch.int32, device=device)
    rows = x.new_empty(tokens * TOP_K, width)
    find_rows(
        *(logits, router_logits, x, shared_expert_gate.view(-1)),
        *(selected, weights, places, shares, counts, ends, rows),
    )

    gate = torch._grouped_mm(rows, gate_proj.transpose(1, 2), offs=ends)
    up = torch._grouped_mm(rows, up_proj.transpose(1, 2), offs=ends)
    gate_both(gate.view(-1), up.view(-1))
    expert_out = torch._grouped_mm(gate, down_proj.transpose(1, 2), offs=ends)

    gate, up = torch.mm(x, shared_gate_proj.t()), torch.mm(x, shared_up_proj.t())
    gate_both(gate.view(-1), up.view(-1))
    shared_out = torch.mm(gate, shared_down_proj.t())
    output = torch.empty_like(hidden_states)
    combine_all(expert_out, places, weights, shared_out, shares, output.view(-1, width))
    return output, router_logits
