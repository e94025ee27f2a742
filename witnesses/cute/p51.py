"""p51, experts with biases and a clamped unit, in CuTe DSL. The products, an expert's at once, stay with eager PyTorch.

1. Places: a thread block has one expert and gives its pairs of token and expert rows behind those of the others before.
2. Rows: a thread block copies a pair's token.
3. Unit: a thread block has one pair, a thread 4 values at a time of the 8 alternating ones, with their biases.
4. Sum: a thread block adds up a token's results from its experts, with bias and weight.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

VECTOR = 4  # float32 values in 16 bytes
SCANNERS = 1024
MOST_THREADS = 256
ALPHA = 1.702
LIMIT = 7.0


def threads_for(width: int) -> int:
    """The most threads that share a row evenly."""
    vectors = width // VECTOR
    return max(count for count in range(1, MOST_THREADS + 1) if vectors % count == 0)


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
def place_kernel(indices: cute.Tensor, places: cute.Tensor, row_pairs: cute.Tensor, ends: cute.Tensor):
    """All flat: a pair is token · top_k + slot."""
    thread, _, _ = cute.arch.thread_idx()
    expert, _, _ = cute.arch.block_idx()
    pairs = indices.shape[0]
    stretch = (pairs + SCANNERS - 1) // SCANNERS
    start, stop = thread * stretch, cutlass.min(thread * stretch + stretch, pairs)
    count, lower = cutlass.Int32(0), cutlass.Int32(0)
    for pair in cutlass.range(start, stop):
        index = indices[pair].to(cutlass.Int32)
        if index == expert:
            count += 1
        elif index < expert:
            lower += 1
    sums = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.Int32, cute.make_layout(SCANNERS), 16)
    _, base = sum_before(lower, sums)
    before, total = sum_before(count, sums)
    place = base + before
    for pair in cutlass.range(start, stop):
        if indices[pair].to(cutlass.Int32) == expert:
            places[pair] = place
            row_pairs[place] = pair
            place += 1
    if thread == 0:
        ends[expert] = base + total


@cute.kernel
def rows_kernel(
    hidden: cute.Tensor,
    row_pairs: cute.Tensor,
    hidden_rows: cute.Tensor,
    top_k: cutlass.Constexpr[int],
    threads: cutlass.Constexpr[int],
):
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    token = row_pairs[row] // top_k
    chunks = cutlass.const_expr(hidden.shape[1] // VECTOR // threads)
    part = cute.make_rmem_tensor((VECTOR, chunks), cutlass.Float32)
    for c in cutlass.range_constexpr(chunks):
        cute.autovec_copy(cute.local_tile(hidden[token, None], (VECTOR,), (c * threads + thread,)), part[None, c])
    for c in cutlass.range_constexpr(chunks):
        cute.autovec_copy(part[None, c], cute.local_tile(hidden_rows[row, None], (VECTOR,), (c * threads + thread,)))


@cute.kernel
def unit_kernel(
    both: cute.Tensor,
    bias: cute.Tensor,
    row_pairs: cute.Tensor,
    indices: cute.Tensor,
    out: cute.Tensor,
    threads: cutlass.Constexpr[int],
):
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    chunks = cutlass.const_expr(out.shape[1] // VECTOR // threads)
    x = cute.make_rmem_tensor((VECTOR, 2, chunks), cutlass.Float32)
    y = cute.make_rmem_tensor((VECTOR, 2), cutlass.Float32)
    result = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    for c in cutlass.range_constexpr(chunks):
        for half in cutlass.range_constexpr(2):
            place = ((c * threads + thread) * 2 + half,)
            cute.autovec_copy(cute.local_tile(both[row, None], (VECTOR,), place), x[None, half, c])
    expert = indices[row_pairs[row]].to(cutlass.Int32)
    for c in cutlass.range_constexpr(chunks):
        for half in cutlass.range_constexpr(2):
            place = ((c * threads + thread) * 2 + half,)
            cute.autovec_copy(cute.local_tile(bias[expert, None], (VECTOR,), place), y[None, half])
        for e in cutlass.range_constexpr(VECTOR):
            first, half = cutlass.const_expr(e % 2 * 2), cutlass.const_expr(e // 2)
            gate, up = x[first, half, c] + y[first, half], x[first + 1, half, c] + y[first + 1, half]
            gate = cute.arch.fmin(gate, cutlass.Float32(LIMIT))
            up = cute.arch.fmax(cute.arch.fmin(up, cutlass.Float32(LIMIT)), cutlass.Float32(-LIMIT))
            result[e] = (up + 1.0) * (gate / (1.0 + cute.math.exp(gate * -ALPHA)))
        cute.autovec_copy(result, cute.local_tile(out[row, None], (VECTOR,), (c * threads + thread,)))


@cute.kernel
def sum_kernel(
    source: cute.Tensor,
    places: cute.Tensor,
    indices: cute.Tensor,
    weights: cute.Tensor,
    bias: cute.Tensor,
    out: cute.Tensor,
    threads: cutlass.Constexpr[int],
):
    thread, _, _ = cute.arch.thread_idx()
    token, _, _ = cute.arch.block_idx()
    top_k = cutlass.const_expr(places.shape[1])
    rows = cute.make_rmem_tensor(top_k, cutlass.Int32)
    experts = cute.make_rmem_tensor(top_k, cutlass.Int32)
    weight = cute.make_rmem_tensor(top_k, cutlass.Float32)
    part = cute.make_rmem_tensor((VECTOR, top_k), cutlass.Float32)
    biases = cute.make_rmem_tensor((VECTOR, top_k), cutlass.Float32)
    total = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    for slot in cutlass.range_constexpr(top_k):
        rows[slot] = places[token, slot]
        experts[slot] = indices[token, slot].to(cutlass.Int32)
        weight[slot] = weights[token, experts[slot]]
    for c in cutlass.range_constexpr(out.shape[1] // VECTOR // threads):
        place = (c * threads + thread,)
        for slot in cutlass.range_constexpr(top_k):
            cute.autovec_copy(cute.local_tile(source[rows[slot], None], (VECTOR,), place), part[None, slot])
            cute.autovec_copy(cute.local_tile(bias[experts[slot], None], (VECTOR,), place), biases[None, slot])
        total.fill(0.0)
        for slot in cutlass.range_constexpr(top_k):
            total.store(total.load() + (part[None, slot].load() + biases[None, slot].load()) * weight[slot])
        cute.autovec_copy(total, cute.local_tile(out[token, None], (VECTOR,), place))


@cute.jit
def dispatch(
    indices: cute.Tensor,
    places: cute.Tensor,
    row_pairs: cute.Tensor,
    ends: cute.Tensor,
    hidden: cute.Tensor,
    hidden_rows: cute.Tensor,
    stream,
    top_k: cutlass.Constexpr[int],
):
    threads = cutlass.const_expr(threads_for(hidden.shape[1]))
    place_kernel(indices, places, row_pairs, ends).launch(
        grid=(ends.shape[0], 1, 1), block=(SCANNERS, 1, 1), stream=stream
    )
    rows_kernel(hidden, row_pairs, hidden_rows, top_k, threads).launch(
        grid=(hidden_rows.shape[0], 1, 1), block=(threads, 1, 1), stream=stream
    )


@cute.jit
def apply_unit(
    both: cute.Tensor,
    bias: cute.Tensor,
    row_pairs: cute.Tensor,
    indices: cute.Tensor,
    out: cute.Tensor,
    stream,
):
    threads = cutlass.const_expr(threads_for(out.shape[1]))
    unit_kernel(both, bias, row_pairs, indices, out, threads).launch(
        grid=(out.shape[0], 1, 1), block=(threads, 1, 1), stream=stream
    )


@cute.jit
def add_up(
    source: cute.Tensor,
    places: cute.Tensor,
    indices: cute.Tensor,
    weights: cute.Tensor,
    bias: cute.Tensor,
    out: cute.Tensor,
    stream,
):
    threads = cutlass.const_expr(threads_for(out.shape[1]))
    sum_kernel(source, places, indices, weights, bias, out, threads).launch(
        grid=(out.shape[0], 1, 1), block=(threads, 1, 1), stream=stream
    )


def compile_for(arch: str, experts: int = 128, width: int = 2880, inner: int = 2880, top_k: int = 4):
    """The three functions for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert width % VECTOR == 0 and inner % VECTOR == 0
    tokens, pairs = cute.sym_int(), cute.sym_int()
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {arch}"

    def fake(dtype, *shape, align: int = 16):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

    first = cute.compile(
        dispatch,
        fake(cutlass.Int64, pairs, align=8),
        fake(cutlass.Int32, pairs, align=4),
        fake(cutlass.Int32, pairs, align=4),
        fake(cutlass.Int32, experts, align=4),
        fake(cutlass.Float32, tokens, width),
        fake(cutlass.Float32, pairs, width),
        stream,
        top_k,
        options=options,
    )
    second = cute.compile(
        apply_unit,
        fake(cutlass.Float32, pairs, 2 * inner),
        fake(cutlass.Float32, experts, 2 * inner),
        fake(cutlass.Int32, pairs, align=4),
        fake(cutlass.Int64, pairs, align=8),
        fake(cutlass.Float32, pairs, inner),
        stream,
        options=options,
    )
    third = cute.compile(
        add_up,
        fake(cutlass.Float32, pairs, width),
        fake(cutlass.Int32, tokens, top_k, align=4),
        fake(cutlass.Int64, tokens, top_k, align=8),
        fake(cutlass.Float32, tokens, experts, align=4),
        fake(cutlass.Float32, experts, width),
        fake(cutlass.Float32, tokens, width),
        stream,
        options=options,
    )
    return first, second, third


@cache
def kernels_for(device: torch.device, experts: int, width: int, inner: int, top_k: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", experts, width, inner, top_k)


def solve(
    hidden_states: torch.Tensor,
    router_indices: torch.Tensor,
    routing_weights: torch.Tensor,
    gate_up_projection: torch.Tensor,
    gate_up_projection_bias: torch.Tensor,
    down_projection: torch.Tensor,
    down_projection_bias: torch.Tensor,
) -> torch.Tensor:
    (experts, inner, width), (tokens, top_k) = down_projection.shape, router_indices.shape
    device, pairs = hidden_states.device, tokens * top_k
    fill_rows, unit_of_rows, add_up_rows = kernels_for(device, experts, width, inner, top_k)
    places, row_pairs = torch.empty(2, pairs, dtype=torch.int32, device=device)
    ends = torch.empty(experts, dtype=torch.int32, device=device)
    rows = hidden_states.new_empty(pairs, width)
    fill_rows(router_indices.view(-1), places, row_pairs, ends, hidden_states, rows)
    both, unit = hidden_states.new_empty(pairs, 2 * inner), hidden_states.new_empty(pairs, inner)
    stops = ends.tolist()  # the heights of the products are in the data
    spans = [slice(start, stop) for start, stop in zip([0, *stops[:-1]], stops, strict=True)]
    for expert, span in enumerate(spans):
        torch.mm(rows[span], gate_up_projection[expert], out=both[span])
    unit_of_rows(both, gate_up_projection_bias, row_pairs, router_indices.view(-1), unit)
    for expert, span in enumerate(spans):
        torch.mm(unit[span], down_projection[expert], out=rows[span])
    output = torch.empty_like(hidden_states)
    pair_places = places.view(tokens, top_k)
    add_up_rows(rows, pair_places, router_indices, routing_weights, down_projection_bias, output)
    return output
