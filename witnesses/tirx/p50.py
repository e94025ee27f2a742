"""p50, backward pass of routed experts, in TIRx. The products, an expert's at a time, stay with eager PyTorch.

CUDA, four kernels:
1. Places: a thread block has one expert and gives its pairs of token and expert rows behind those of the others before.
2. Rows: a thread block copies a pair's token and gradient.
3. Derivatives: a thread block has one pair. From the two pre-activations and the unweighted gradient Dᵀ g of the hidden
   layer it makes both gradients and the weighted hidden layer in their place, and the gradient of the routing weight,
   which is ⟨Dᵀ g, h⟩: the down projection itself is never computed.
4. Sum: a thread block adds up a token's gradients from its experts.

CPU: the same four in plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

VECTOR = 4  # float32 values in 16 bytes
SCANNERS = 1024
MOST_THREADS = 256


def sigmoid(x):
    return T.float32(1) / (T.float32(1) + T.exp(-x))


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
def rows_cuda(
    h: T.handle,
    g: T.handle,
    p: T.handle,
    x: T.handle,
    y: T.handle,
    *,
    width: T.constexpr,
    top_k: T.constexpr,
    threads: T.constexpr,
):
    tokens = T.int32()
    rows = T.int32()
    hidden = T.match_buffer(h, (tokens, width), "float32")
    gradient = T.match_buffer(g, (tokens, width), "float32")
    row_pairs = T.match_buffer(p, (rows,), "int32")
    hidden_rows = T.match_buffer(x, (rows, width), "float32")
    gradient_rows = T.match_buffer(y, (rows, width), "float32")
    T.device_entry()
    row = T.cta_id([rows])
    thread = T.thread_id([threads])
    token = T.alloc_local((1,), "int32")
    part = T.alloc_local((2, width // VECTOR // threads, VECTOR), "float32")
    token[0] = row_pairs[row] // top_k
    for c in T.unroll(width // VECTOR // threads):
        for e in T.vectorized(VECTOR):
            part[0, c, e] = hidden[token[0], (c * threads + thread) * VECTOR + e]
        for e in T.vectorized(VECTOR):
            part[1, c, e] = gradient[token[0], (c * threads + thread) * VECTOR + e]
    for c in T.unroll(width // VECTOR // threads):
        for e in T.vectorized(VECTOR):
            hidden_rows[row, (c * threads + thread) * VECTOR + e] = part[0, c, e]
        for e in T.vectorized(VECTOR):
            gradient_rows[row, (c * threads + thread) * VECTOR + e] = part[1, c, e]


@T.jit
def derivative_cuda(
    a: T.handle,
    u: T.handle,
    h: T.handle,
    p: T.handle,
    w: T.handle,
    g: T.handle,
    *,
    inner: T.constexpr,
    threads: T.constexpr,
):
    """Replaces gate, up half and unweighted gradient by both gradients and the weighted hidden layer."""
    rows = T.int32()
    gate = T.match_buffer(a, (rows, inner), "float32")
    up = T.match_buffer(u, (rows, inner), "float32")
    hidden = T.match_buffer(h, (rows, inner), "float32")
    row_pairs = T.match_buffer(p, (rows,), "int32")
    weights = T.match_buffer(w, (rows,), "float32")
    weight_gradients = T.match_buffer(g, (rows,), "float32")
    T.device_entry()
    row = T.cta_id([rows])
    thread = T.thread_id([threads])
    partial = T.alloc_shared((threads // 32,), "float32")
    av = T.alloc_local((VECTOR,), "float32")
    uv = T.alloc_local((VECTOR,), "float32")
    zv = T.alloc_local((VECTOR,), "float32")
    s = T.alloc_local((1,), "float32")
    silu = T.alloc_local((1,), "float32")
    gradient = T.alloc_local((1,), "float32")
    weight = T.alloc_local((1,), "float32")
    total = T.alloc_local((1,), "float32")
    pair = T.alloc_local((1,), "int32")
    pair[0] = row_pairs[row]
    weight[0] = weights[pair[0]]
    total[0] = T.float32(0)
    for c in T.unroll(inner // VECTOR // threads):
        for e in T.vectorized(VECTOR):
            av[e] = gate[row, (c * threads + thread) * VECTOR + e]
        for e in T.vectorized(VECTOR):
            uv[e] = up[row, (c * threads + thread) * VECTOR + e]
        for e in T.vectorized(VECTOR):
            zv[e] = hidden[row, (c * threads + thread) * VECTOR + e]
        for e in T.unroll(VECTOR):
            s[0] = sigmoid(av[e])
            silu[0] = av[e] * s[0]
            total[0] = total[0] + zv[e] * silu[0] * uv[e]
            gradient[0] = zv[e] * weight[0]
            zv[e] = silu[0] * uv[e] * weight[0]
            av[e] = gradient[0] * uv[e] * s[0] * (T.float32(1) + av[e] * (T.float32(1) - s[0]))
            uv[e] = gradient[0] * silu[0]
        for e in T.vectorized(VECTOR):
            gate[row, (c * threads + thread) * VECTOR + e] = av[e]
        for e in T.vectorized(VECTOR):
            up[row, (c * threads + thread) * VECTOR + e] = uv[e]
        for e in T.vectorized(VECTOR):
            hidden[row, (c * threads + thread) * VECTOR + e] = zv[e]
    total[0] = T.cuda.warp_sum(total[0])
    if thread % 32 == 0:
        partial[thread // 32] = total[0]
    T.cuda.cta_sync()
    if thread == 0:
        total[0] = T.float32(0)
        for k in T.unroll(threads // 32):
            total[0] = total[0] + partial[k]
        weight_gradients[pair[0]] = total[0]


@T.jit
def sum_cuda(x: T.handle, p: T.handle, o: T.handle, *, width: T.constexpr, top_k: T.constexpr, threads: T.constexpr):
    tokens = T.int32()
    rows = T.int32()
    source = T.match_buffer(x, (rows, width), "float32")
    places = T.match_buffer(p, (tokens, top_k), "int32")
    out = T.match_buffer(o, (tokens, width), "float32")
    T.device_entry()
    token = T.cta_id([tokens])
    thread = T.thread_id([threads])
    part = T.alloc_local((top_k, VECTOR), "float32")
    for c in T.unroll(width // VECTOR // threads):
        for slot in T.unroll(top_k):
            for e in T.vectorized(VECTOR):
                part[slot, e] = source[places[token, slot], (c * threads + thread) * VECTOR + e]
        for slot in T.unroll(top_k - 1):
            for e in T.unroll(VECTOR):
                part[0, e] = part[0, e] + part[slot + 1, e]
        for e in T.vectorized(VECTOR):
            out[token, (c * threads + thread) * VECTOR + e] = part[0, e]


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
def rows_cpu(
    h: T.handle, g: T.handle, p: T.handle, x: T.handle, y: T.handle, *, width: T.constexpr, top_k: T.constexpr
):
    tokens = T.int32()
    rows = T.int32()
    hidden = T.match_buffer(h, (tokens, width), "float32")
    gradient = T.match_buffer(g, (tokens, width), "float32")
    row_pairs = T.match_buffer(p, (rows,), "int32")
    hidden_rows = T.match_buffer(x, (rows, width), "float32")
    gradient_rows = T.match_buffer(y, (rows, width), "float32")
    for row, c in T.grid(rows, width):
        hidden_rows[row, c] = hidden[row_pairs[row] // top_k, c]
        gradient_rows[row, c] = gradient[row_pairs[row] // top_k, c]


@T.jit
def derivative_cpu(a: T.handle, u: T.handle, h: T.handle, p: T.handle, w: T.handle, g: T.handle, *, inner: T.constexpr):
    rows = T.int32()
    gate = T.match_buffer(a, (rows, inner), "float32")
    up = T.match_buffer(u, (rows, inner), "float32")
    hidden = T.match_buffer(h, (rows, inner), "float32")
    row_pairs = T.match_buffer(p, (rows,), "int32")
    weights = T.match_buffer(w, (rows,), "float32")
    weight_gradients = T.match_buffer(g, (rows,), "float32")
    x = T.alloc_buffer((4,), "float32", scope="local")  # gate, up half, gradient, sigmoid
    total = T.alloc_buffer((1,), "float64", scope="local")  # one after the other, float32 would lose digits
    for row in T.serial(rows):
        total[0] = T.float64(0)
        for c in T.serial(inner):
            x[0] = gate[row, c]
            x[1] = up[row, c]
            x[2] = hidden[row, c]
            x[3] = sigmoid(x[0])
            total[0] = total[0] + T.cast(x[2], "float64") * T.cast(x[0] * x[3] * x[1], "float64")
            hidden[row, c] = x[0] * x[3] * x[1] * weights[row_pairs[row]]
            x[2] = x[2] * weights[row_pairs[row]]
            gate[row, c] = x[2] * x[1] * x[3] * (T.float32(1) + x[0] * (T.float32(1) - x[3]))
            up[row, c] = x[2] * x[0] * x[3]
        weight_gradients[row_pairs[row]] = T.cast(total[0], "float32")


@T.jit
def sum_cpu(x: T.handle, p: T.handle, o: T.handle, *, width: T.constexpr, top_k: T.constexpr):
    tokens = T.int32()
    rows = T.int32()
    source = T.match_buffer(x, (rows, width), "float32")
    places = T.match_buffer(p, (tokens, top_k), "int32")
    out = T.match_buffer(o, (tokens, width), "float32")
    for token, c in T.grid(tokens, width):
        out[token, c] = source[places[token, 0], c]
        for slot in T.serial(top_k - 1):
            out[token, c] = out[token, c] + source[places[token, slot + 1], c]


def threads_for(width: int) -> int:
    """The most threads that share a row evenly."""
    vectors = width // VECTOR
    return max(count for count in range(1, MOST_THREADS + 1) if vectors % count == 0)


def compile_for(
    arch: str, experts: int = 256, width: int = 4096, inner: int = 1024, top_k: int = 8
) -> list[tvm.runtime.Executable]:
    """Places, rows, derivatives, sum for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    if arch == "llvm":
        kernels = [
            place_cpu.specialize(experts=experts),
            rows_cpu.specialize(width=width, top_k=top_k),
            derivative_cpu.specialize(inner=inner),
            sum_cpu.specialize(width=width, top_k=top_k),
        ]
        return [tvm.compile(tvm.IRModule({"main": kernel}), target="llvm") for kernel in kernels]
    assert width % VECTOR == 0 and inner % VECTOR == 0 and threads_for(inner) % 32 == 0
    kernels = [
        place_cuda.specialize(experts=experts),
        rows_cuda.specialize(width=width, top_k=top_k, threads=threads_for(width)),
        derivative_cuda.specialize(inner=inner, threads=threads_for(inner)),
        sum_cuda.specialize(width=width, top_k=top_k, threads=threads_for(width)),
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
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    topk_indices: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_weights: torch.Tensor,
    up_weights: torch.Tensor,
    down_weights: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    (experts, inner, width), (tokens, top_k) = gate_weights.shape, topk_indices.shape
    device, pairs = hidden_states.device, tokens * top_k
    find_places, fill_rows, derive, add_up = kernels_for(device, experts, width, inner, top_k)
    places, row_pairs = torch.empty(2, pairs, dtype=torch.int32, device=device)
    ends = torch.empty(experts, dtype=torch.int32, device=device)
    find_places(topk_indices.view(-1), places, row_pairs, ends)
    hidden, gradient = hidden_states.new_empty(2, pairs, width)
    fill_rows(hidden_states, grad_output, row_pairs, hidden, gradient)
    a, u, h = hidden_states.new_empty(3, pairs, inner)
    stops = ends.tolist()  # the heights of the products are in the data
    spans = [slice(start, stop) for start, stop in zip([0, *stops[:-1]], stops, strict=True)]
    for expert, rows in enumerate(spans):
        torch.mm(hidden[rows], gate_weights[expert].t(), out=a[rows])
        torch.mm(hidden[rows], up_weights[expert].t(), out=u[rows])
        torch.mm(gradient[rows], down_weights[expert], out=h[rows])

    grad_weights = torch.empty_like(topk_weights)
    derive(a, u, h, row_pairs, topk_weights.view(-1), grad_weights.view(-1))
    grad_gate, grad_up = torch.empty_like(gate_weights), torch.empty_like(up_weights)
    grad_down, grad_rows = torch.empty_like(down_weights), torch.empty_like(hidden)
    for expert, rows in enumerate(spans):
        torch.mm(gradient[rows].t(), h[rows], out=grad_down[expert])
        torch.mm(a[rows].t(), hidden[rows], out=grad_gate[expert])
        torch.mm(u[rows].t(), hidden[rows], out=grad_up[expert])
        torch.mm(a[rows], gate_weights[expert], out=grad_rows[rows])
        grad_rows[rows].addmm_(u[rows], up_weights[expert])
    grad_hidden = torch.empty_like(hidden_states)
    add_up(grad_rows, places.view(tokens, top_k), grad_hidden)
    return grad_hidden, grad_weights, grad_gate, grad_up, grad_down
