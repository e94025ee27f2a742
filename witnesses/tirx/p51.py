"""p51, experts with biases and a clamped unit, in TIRx. The products, an expert's at a time, stay with eager PyTorch.

CUDA, four kernels:
1. Places: a thread block has one expert and gives its pairs of token and expert rows behind those of the others before.
2. Rows: a thread block copies a pair's token.
3. Unit: a thread block has one pair, a thread 4 values at a time of the 8 alternating ones, with their biases.
4. Sum: a thread block adds up a token's results from its experts, with bias and weight.

CPU: the same four in plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

VECTOR = 4  # float32 values in 16 bytes
SCANNERS = 1024
MOST_THREADS = 256
ALPHA = 1.702
LIMIT = 7.0


def gated_unit(gate, up):
    gate = T.min(gate, T.float32(LIMIT))
    up = T.max(T.min(up, T.float32(LIMIT)), T.float32(-LIMIT))
    return (up + T.float32(1)) * (gate / (T.float32(1) + T.exp(gate * T.float32(-ALPHA))))


@T.jit
def place_cuda(i: T.handle, p: T.handle, r: T.handle, e: T.handle, *, experts: T.constexpr):
    pairs = T.int32()
    indices = T.match_buffer(i, (pairs,), "int64")
    places = T.match_buffer(p, (pairs,), "int32")
    row_pairs = T.match_buffer(r, (pairs,), "int32")
    ends = T.match_buffer(e, (experts,), "int32")
    T.device_entry()
    expert = T.cta_id([experts])
    thread = T.thread_id([SCANNERS])
    sums = T.alloc_shared((2, SCANNERS), "int32")  # pairs of the expert, and of those before it
    count = T.alloc_local((2,), "int32")
    other = T.alloc_local((2,), "int32")
    place = T.alloc_local((1,), "int32")
    pair = T.alloc_local((1,), "int32")
    stretch = T.alloc_local((1,), "int32")
    stretch[0] = T.ceildiv(pairs, SCANNERS)
    count[0] = 0
    count[1] = 0
    for step in T.serial(stretch[0]):
        pair[0] = thread * stretch[0] + step
        if pair[0] < pairs:
            if indices[pair[0]] == T.cast(expert, "int64"):
                count[0] = count[0] + 1
            elif indices[pair[0]] < T.cast(expert, "int64"):
                count[1] = count[1] + 1
    for k in T.unroll(2):
        sums[k, thread] = count[k]
    T.cuda.cta_sync()
    for step in T.unroll(10):  # doubling steps up to all 1024 threads
        for k in T.unroll(2):
            other[k] = 0
            if thread >= (1 << step):
                other[k] = sums[k, thread - (1 << step)]
        T.cuda.cta_sync()
        for k in T.unroll(2):
            sums[k, thread] = sums[k, thread] + other[k]
        T.cuda.cta_sync()
    place[0] = sums[1, SCANNERS - 1] + sums[0, thread] - count[0]
    for step in T.serial(stretch[0]):
        pair[0] = thread * stretch[0] + step
        if pair[0] < pairs and indices[pair[0]] == T.cast(expert, "int64"):
            places[pair[0]] = place[0]
            row_pairs[place[0]] = pair[0]
            place[0] = place[0] + 1
    if thread == 0:
        ends[expert] = sums[1, SCANNERS - 1] + sums[0, SCANNERS - 1]


@T.jit
def rows_cuda(h: T.handle, p: T.handle, x: T.handle, *, width: T.constexpr, top_k: T.constexpr, threads: T.constexpr):
    tokens = T.int32()
    rows = T.int32()
    hidden = T.match_buffer(h, (tokens, width), "float32")
    row_pairs = T.match_buffer(p, (rows,), "int32")
    hidden_rows = T.match_buffer(x, (rows, width), "float32")
    T.device_entry()
    row = T.cta_id([rows])
    thread = T.thread_id([threads])
    token = T.alloc_local((1,), "int32")
    part = T.alloc_local((width // VECTOR // threads, VECTOR), "float32")
    token[0] = row_pairs[row] // top_k
    for c in T.unroll(width // VECTOR // threads):
        for e in T.vectorized(VECTOR):
            part[c, e] = hidden[token[0], (c * threads + thread) * VECTOR + e]
    for c in T.unroll(width // VECTOR // threads):
        for e in T.vectorized(VECTOR):
            hidden_rows[row, (c * threads + thread) * VECTOR + e] = part[c, e]


@T.jit
def unit_cuda(
    z: T.handle,
    b: T.handle,
    p: T.handle,
    i: T.handle,
    h: T.handle,
    *,
    experts: T.constexpr,
    inner: T.constexpr,
    threads: T.constexpr,
):
    rows = T.int32()
    both = T.match_buffer(z, (rows, 2 * inner), "float32")
    bias = T.match_buffer(b, (experts, 2 * inner), "float32")
    row_pairs = T.match_buffer(p, (rows,), "int32")
    indices = T.match_buffer(i, (rows,), "int64")
    out = T.match_buffer(h, (rows, inner), "float32")
    T.device_entry()
    row = T.cta_id([rows])
    thread = T.thread_id([threads])
    expert = T.alloc_local((1,), "int32")
    x = T.alloc_local((inner // VECTOR // threads, 2, VECTOR), "float32")
    y = T.alloc_local((inner // VECTOR // threads, 2, VECTOR), "float32")
    result = T.alloc_local((VECTOR,), "float32")
    for c in T.unroll(inner // VECTOR // threads):
        for half in T.unroll(2):
            for e in T.vectorized(VECTOR):
                x[c, half, e] = both[row, ((c * threads + thread) * 2 + half) * VECTOR + e]
    expert[0] = T.cast(indices[row_pairs[row]], "int32")
    for c in T.unroll(inner // VECTOR // threads):
        for half in T.unroll(2):
            for e in T.vectorized(VECTOR):
                y[c, half, e] = bias[expert[0], ((c * threads + thread) * 2 + half) * VECTOR + e]
    for c in T.unroll(inner // VECTOR // threads):
        for half in T.unroll(2):
            for e in T.unroll(VECTOR):
                x[c, half, e] = x[c, half, e] + y[c, half, e]
        for e in T.unroll(VECTOR):
            result[e] = gated_unit(x[c, e // 2, e % 2 * 2], x[c, e // 2, e % 2 * 2 + 1])
        for e in T.vectorized(VECTOR):
            out[row, (c * threads + thread) * VECTOR + e] = result[e]


@T.jit
def sum_cuda(
    y: T.handle,
    p: T.handle,
    i: T.handle,
    w: T.handle,
    b: T.handle,
    o: T.handle,
    *,
    experts: T.constexpr,
    width: T.constexpr,
    top_k: T.constexpr,
    threads: T.constexpr,
):
    tokens = T.int32()
    rows = T.int32()
    source = T.match_buffer(y, (rows, width), "float32")
    places = T.match_buffer(p, (tokens, top_k), "int32")
    indices = T.match_buffer(i, (tokens, top_k), "int64")
    weights = T.match_buffer(w, (tokens, experts), "float32")
    bias = T.match_buffer(b, (experts, width), "float32")
    out = T.match_buffer(o, (tokens, width), "float32")
    T.device_entry()
    token = T.cta_id([tokens])
    thread = T.thread_id([threads])
    place = T.alloc_local((top_k,), "int32")
    expert = T.alloc_local((top_k,), "int32")
    weight = T.alloc_local((top_k,), "float32")
    part = T.alloc_local((top_k, VECTOR), "float32")
    biases = T.alloc_local((top_k, VECTOR), "float32")
    total = T.alloc_local((VECTOR,), "float32")
    for slot in T.unroll(top_k):
        place[slot] = places[token, slot]
        expert[slot] = T.cast(indices[token, slot], "int32")
        weight[slot] = weights[token, expert[slot]]
    for c in T.unroll(width // VECTOR // threads):
        for slot in T.unroll(top_k):
            for e in T.vectorized(VECTOR):
                part[slot, e] = source[place[slot], (c * threads + thread) * VECTOR + e]
            for e in T.vectorized(VECTOR):
                biases[slot, e] = bias[expert[slot], (c * threads + thread) * VECTOR + e]
        for e in T.unroll(VECTOR):
            total[e] = T.float32(0)
            for slot in T.unroll(top_k):
                total[e] = total[e] + (part[slot, e] + biases[slot, e]) * weight[slot]
        for e in T.vectorized(VECTOR):
            out[token, (c * threads + thread) * VECTOR + e] = total[e]


@T.jit
def place_cpu(i: T.handle, p: T.handle, r: T.handle, e: T.handle, *, experts: T.constexpr):
    pairs = T.int32()
    indices = T.match_buffer(i, (pairs,), "int64")
    places = T.match_buffer(p, (pairs,), "int32")
    row_pairs = T.match_buffer(r, (pairs,), "int32")
    ends = T.match_buffer(e, (experts,), "int32")
    place = T.alloc_buffer((1,), "int32", scope="local")
    place[0] = 0
    for expert in T.serial(experts):
        for pair in T.serial(pairs):
            if indices[pair] == T.cast(expert, "int64"):
                places[pair] = place[0]
                row_pairs[place[0]] = pair
                place[0] = place[0] + 1
        ends[expert] = place[0]


@T.jit
def rows_cpu(h: T.handle, p: T.handle, x: T.handle, *, width: T.constexpr, top_k: T.constexpr):
    tokens = T.int32()
    rows = T.int32()
    hidden = T.match_buffer(h, (tokens, width), "float32")
    row_pairs = T.match_buffer(p, (rows,), "int32")
    hidden_rows = T.match_buffer(x, (rows, width), "float32")
    for row, c in T.grid(rows, width):
        hidden_rows[row, c] = hidden[row_pairs[row] // top_k, c]


@T.jit
def unit_cpu(
    z: T.handle, b: T.handle, p: T.handle, i: T.handle, h: T.handle, *, experts: T.constexpr, inner: T.constexpr
):
    rows = T.int32()
    both = T.match_buffer(z, (rows, 2 * inner), "float32")
    bias = T.match_buffer(b, (experts, 2 * inner), "float32")
    row_pairs = T.match_buffer(p, (rows,), "int32")
    indices = T.match_buffer(i, (rows,), "int64")
    out = T.match_buffer(h, (rows, inner), "float32")
    for row, c in T.grid(rows, inner):
        out[row, c] = gated_unit(
            both[row, c * 2] + bias[indices[row_pairs[row]], c * 2],
            both[row, c * 2 + 1] + bias[indices[row_pairs[row]], c * 2 + 1],
        )


@T.jit
def sum_cpu(
    y: T.handle,
    p: T.handle,
    i: T.handle,
    w: T.handle,
    b: T.handle,
    o: T.handle,
    *,
    experts: T.constexpr,
    width: T.constexpr,
    top_k: T.constexpr,
):
    tokens = T.int32()
    rows = T.int32()
    source = T.match_buffer(y, (rows, width), "float32")
    places = T.match_buffer(p, (tokens, top_k), "int32")
    indices = T.match_buffer(i, (tokens, top_k), "int64")
    weights = T.match_buffer(w, (tokens, experts), "float32")
    bias = T.match_buffer(b, (experts, width), "float32")
    out = T.match_buffer(o, (tokens, width), "float32")
    for token, c in T.grid(tokens, width):
        out[token, c] = T.float32(0)
        for slot in T.serial(top_k):
            out[token, c] = (
                out[token, c]
                + (source[places[token, slot], c] + bias[indices[token, slot], c])
                * weights[token, indices[token, slot]]
            )


def threads_for(width: int) -> int:
    """The most threads that share a row evenly."""
    vectors = width // VECTOR
    return max(count for count in range(1, MOST_THREADS + 1) if vectors % count == 0)


def compile_for(
    arch: str, experts: int = 128, width: int = 2880, inner: int = 2880, top_k: int = 4
) -> list[tvm.runtime.Executable]:
    """Places, rows, unit, sum for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    if arch == "llvm":
        kernels = [
            place_cpu.specialize(experts=experts),
            rows_cpu.specialize(width=width, top_k=top_k),
            unit_cpu.specialize(experts=experts, inner=inner),
            sum_cpu.specialize(experts=experts, width=width, top_k=top_k),
        ]
        return [tvm.compile(tvm.IRModule({"main": kernel}), target="llvm") for kernel in kernels]
    assert width % VECTOR == 0 and inner % VECTOR == 0
    kernels = [
        place_cuda.specialize(experts=experts),
        rows_cuda.specialize(width=width, top_k=top_k, threads=threads_for(width)),
        unit_cuda.specialize(experts=experts, inner=inner, threads=threads_for(inner)),
        sum_cuda.specialize(experts=experts, width=width, top_k=top_k, threads=threads_for(width)),
    ]
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return [tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx") for kernel in kernels]


@cache
def kernels_for(device: torch.device, experts: int, width: int, inner: int, top_k: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return [executable["main"] for executable in compile_for(arch, experts, width, inner, top_k)]


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
    find_places, fill_rows, apply_unit, add_up = kernels_for(device, experts, width, inner, top_k)
    places, row_pairs = torch.empty(2, pairs, dtype=torch.int32, device=device)
    ends = torch.empty(experts, dtype=torch.int32, device=device)
    find_places(router_indices.view(-1), places, row_pairs, ends)
    rows = hidden_states.new_empty(pairs, width)
    fill_rows(hidden_states, row_pairs, rows)
    both, unit = hidden_states.new_empty(pairs, 2 * inner), hidden_states.new_empty(pairs, inner)
    stops = ends.tolist()  # the heights of the products are in the data
    spans = [slice(start, stop) for start, stop in zip([0, *stops[:-1]], stops, strict=True)]
    for expert, span in enumerate(spans):
        torch.mm(rows[span], gate_up_projection[expert], out=both[span])
    apply_unit(both, gate_up_projection_bias, row_pairs, router_indices.view(-1), unit)
    for expert, span in enumerate(spans):
        torch.mm(unit[span], down_projection[expert], out=rows[span])
    output = torch.empty_like(hidden_states)
    pair_places = places.view(tokens, top_k)
    add_up(rows, pair_places, router_indices, routing_weights, down_projection_bias, output)
    return output
