"""p50, backward pass of routed experts, in CuTe DSL. The products, an expert's at a time, stay with eager PyTorch.

1. Places: a thread block has one expert and gives its pairs of token and expert rows behind those of the others before.
2. Rows: a thread block copies a pair's token and gradient.
3. Derivatives: a thread block has one pair. From the two pre-activations and the unweighted gradient Dᵀ g of the hidden
   layer it makes both gradients and the weighted hidden layer in their place, and the gradient of the routing weight,
   which is ⟨Dᵀ g, h⟩: the down projection itself is never computed.
4. Sum: a thread block adds up a token's gradients from its experts.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

VECTOR = 4  # float32 values in 16 bytes
SCANNERS = 1024
MOST_THREADS = 256


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
    gradient: cute.Tensor,
    row_pairs: cute.Tensor,
    hidden_rows: cute.Tensor,
    gradient_rows: cute.Tensor,
    top_k: cutlass.Constexpr[int],
    threads: cutlass.Constexpr[int],
):
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    token = row_pairs[row] // top_k
    chunks = cutlass.const_expr(hidden.shape[1] // VECTOR // threads)
    part = cute.make_rmem_tensor((VECTOR, chunks, 2), cutlass.Float32)
    for c in cutlass.range_constexpr(chunks):
        place = (c * threads + thread,)
        cute.autovec_copy(cute.local_tile(hidden[token, None], (VECTOR,), place), part[None, c, 0])
        cute.autovec_copy(cute.local_tile(gradient[token, None], (VECTOR,), place), part[None, c, 1])
    for c in cutlass.range_constexpr(chunks):
        place = (c * threads + thread,)
        cute.autovec_copy(part[None, c, 0], cute.local_tile(hidden_rows[row, None], (VECTOR,), place))
        cute.autovec_copy(part[None, c, 1], cute.local_tile(gradient_rows[row, None], (VECTOR,), place))


@cute.kernel
def derivative_kernel(
    gate: cute.Tensor,
    up: cute.Tensor,
    hidden: cute.Tensor,
    row_pairs: cute.Tensor,
    weights: cute.Tensor,
    weight_gradients: cute.Tensor,
    threads: cutlass.Constexpr[int],
):
    """Replaces gate, up half and unweighted gradient by both gradients and the weighted hidden layer."""
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    warps = cutlass.const_expr(threads // cute.arch.WARP_SIZE)
    partial = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(warps), 16)
    part = cute.make_rmem_tensor((VECTOR, 3), cutlass.Float32)
    pair = row_pairs[row]
    weight = weights[pair]
    total = cutlass.Float32(0.0)
    for c in cutlass.range_constexpr(gate.shape[1] // VECTOR // threads):
        place = (c * threads + thread,)
        cute.autovec_copy(cute.local_tile(gate[row, None], (VECTOR,), place), part[None, 0])
        cute.autovec_copy(cute.local_tile(up[row, None], (VECTOR,), place), part[None, 1])
        cute.autovec_copy(cute.local_tile(hidden[row, None], (VECTOR,), place), part[None, 2])
        a, u, z = part[None, 0].load(), part[None, 1].load(), part[None, 2].load()
        sigmoid = 1.0 / (1.0 + cute.math.exp(-a))
        h, gradient = a * sigmoid * u, z * weight
        total += (z * h).reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
        part[None, 0].store(gradient * u * sigmoid * (1.0 + a * (1.0 - sigmoid)))
        part[None, 1].store(gradient * a * sigmoid)
        part[None, 2].store(h * weight)
        cute.autovec_copy(part[None, 0], cute.local_tile(gate[row, None], (VECTOR,), place))
        cute.autovec_copy(part[None, 1], cute.local_tile(up[row, None], (VECTOR,), place))
        cute.autovec_copy(part[None, 2], cute.local_tile(hidden[row, None], (VECTOR,), place))
    total = cute.arch.warp_reduction_sum(total)
    if thread % cute.arch.WARP_SIZE == 0:
        partial[thread // cute.arch.WARP_SIZE] = total
    cute.arch.sync_threads()
    if thread == 0:
        total = cutlass.Float32(0.0)
        for k in cutlass.range_constexpr(warps):
            total += partial[k]
        weight_gradients[pair] = total


@cute.kernel
def sum_kernel(source: cute.Tensor, places: cute.Tensor, out: cute.Tensor, threads: cutlass.Constexpr[int]):
    thread, _, _ = cute.arch.thread_idx()
    token, _, _ = cute.arch.block_idx()
    top_k = cutlass.const_expr(places.shape[1])
    part = cute.make_rmem_tensor((VECTOR, top_k), cutlass.Float32)
    rows = cute.make_rmem_tensor(top_k, cutlass.Int32)
    for slot in cutlass.range_constexpr(top_k):
        rows[slot] = places[token, slot]
    for c in cutlass.range_constexpr(out.shape[1] // VECTOR // threads):
        place = (c * threads + thread,)
        for slot in cutlass.range_constexpr(top_k):
            cute.autovec_copy(cute.local_tile(source[rows[slot], None], (VECTOR,), place), part[None, slot])
        total = part[None, 0].load()
        for slot in cutlass.range_constexpr(1, top_k):
            total = total + part[None, slot].load()
        part[None, 0].store(total)
        cute.autovec_copy(part[None, 0], cute.local_tile(out[token, None], (VECTOR,), place))


@cute.jit
def dispatch(
    indices: cute.Tensor,
    places: cute.Tensor,
    row_pairs: cute.Tensor,
    ends: cute.Tensor,
    hidden: cute.Tensor,
    gradient: cute.Tensor,
    hidden_rows: cute.Tensor,
    gradient_rows: cute.Tensor,
    stream,
    top_k: cutlass.Constexpr[int],
):
    threads = cutlass.const_expr(threads_for(hidden.shape[1]))
    place_kernel(indices, places, row_pairs, ends).launch(
        grid=(ends.shape[0], 1, 1), block=(SCANNERS, 1, 1), stream=stream
    )
    rows_kernel(hidden, gradient, row_pairs, hidden_rows, gradient_rows, top_k, threads).launch(
        grid=(hidden_rows.shape[0], 1, 1), block=(threads, 1, 1), stream=stream
    )


@cute.jit
def derive(
    gate: cute.Tensor,
    up: cute.Tensor,
    hidden: cute.Tensor,
    row_pairs: cute.Tensor,
    weights: cute.Tensor,
    weight_gradients: cute.Tensor,
    stream,
):
    threads = cutlass.const_expr(threads_for(gate.shape[1]))
    derivative_kernel(gate, up, hidden, row_pairs, weights, weight_gradients, threads).launch(
        grid=(gate.shape[0], 1, 1), block=(threads, 1, 1), stream=stream
    )


@cute.jit
def add_up(source: cute.Tensor, places: cute.Tensor, out: cute.Tensor, stream):
    threads = cutlass.const_expr(threads_for(out.shape[1]))
    sum_kernel(source, places, out, threads).launch(grid=(out.shape[0], 1, 1), block=(threads, 1, 1), stream=stream)


def compile_for(arch: str, experts: int = 256, width: int = 4096, inner: int = 1024, top_k: int = 8):
    """The three functions for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert width % VECTOR == 0 and inner % VECTOR == 0 and threads_for(inner) % 32 == 0
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
        fake(cutlass.Float32, tokens, width),
        fake(cutlass.Float32, pairs, width),
        fake(cutlass.Float32, pairs, width),
        stream,
        top_k,
        options=options,
    )
    second = cute.compile(
        derive,
        *[fake(cutlass.Float32, pairs, inner) for _ in "auh"],
        fake(cutlass.Int32, pairs, align=4),
        fake(cutlass.Float32, pairs, align=4),
        fake(cutlass.Float32, pairs, align=4),
        stream,
        options=options,
    )
    third = cute.compile(
        add_up,
        fake(cutlass.Float32, pairs, width),
        fake(cutlass.Int32, tokens, top_k, align=4),
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
    fill_rows, derive_rows, add_up_rows = kernels_for(device, experts, width, inner, top_k)
    places, row_pairs = torch.empty(2, pairs, dtype=torch.int32, device=device)
    ends = torch.empty(experts, dtype=torch.int32, device=device)
    hidden, gradient = hidden_states.new_empty(2, pairs, width)
    fill_rows(topk_indices.view(-1), places, row_pairs, ends, hidden_states, grad_output, hidden, gradient)
    a, u, h = hidden_states.new_empty(3, pairs, inner)
    stops = ends.tolist()  # the heights of the products are in the data
    spans = [slice(start, stop) for start, stop in zip([0, *stops[:-1]], stops, strict=True)]
    for expert, rows in enumerate(spans):
        torch.mm(hidden[rows], gate_weights[expert].t(), out=a[rows])
        torch.mm(hidden[rows], up_weights[expert].t(), out=u[rows])
        torch.mm(gradient[rows], down_weights[expert], out=h[rows])

    grad_weights = torch.empty_like(topk_weights)
    derive_rows(a, u, h, row_pairs, topk_weights.view(-1), grad_weights.view(-1))
    grad_gate, grad_up = torch.empty_like(gate_weights), torch.empty_like(up_weights)
    grad_down, grad_rows = torch.empty_like(down_weights), torch.empty_like(hidden)
    for expert, rows in enumerate(spans):
        torch.mm(gradient[rows].t(), h[rows], out=grad_down[expert])
        torch.mm(a[rows].t(), hidden[rows], out=grad_gate[expert])
        torch.mm(u[rows].t(), hidden[rows], out=grad_up[expert])
        torch.mm(a[rows], gate_weights[expert], out=grad_rows[rows])
        grad_rows[rows].addmm_(u[rows], up_weights[expert])
    grad_hidden = torch.empty_like(hidden_states)
    add_up_rows(grad_rows, places.view(tokens, top_k), grad_hidden)
    return grad_hidden, grad_weights, grad_gate, grad_up, grad_down
