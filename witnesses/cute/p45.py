"""p45, a mixture layer with fixed expert capacity, in CuTe DSL. The batched products stay with eager PyTorch.

1. Places: a thread block has one expert. Every thread counts the expert's pairs in a stretch of its own, a sum over the
   threads before it says where its pairs stand, and what is beyond the capacity gets no place.
2. Buffers: a thread block copies one row, or writes zeros where an expert has fewer pairs than places.
3. Gating of the two products, 8 values a thread.
4. Combination: a thread block adds up one token's surviving results in float32.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

VECTOR = 8  # bfloat16 values in 16 bytes
SCANNERS = 1024
THREADS = 256
NOWHERE = -1


@cute.jit
def sum_before(value: cutlass.Int32, sums: cute.Tensor):
    """The sum of the threads before this one, and of all; `sums` has a place for every thread."""
    thread, _, _ = cute.arch.thread_idx()
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
def place_kernel(pair_experts: cute.Tensor, places: cute.Tensor, buffer_pairs: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    expert, _, _ = cute.arch.block_idx()
    pairs, capacity = pair_experts.shape[0], buffer_pairs.shape[1]
    stretch = (pairs + SCANNERS - 1) // SCANNERS
    start, stop = thread * stretch, cutlass.min(thread * stretch + stretch, pairs)
    count = cutlass.Int32(0)
    for pair in cutlass.range(start, stop):
        if pair_experts[pair].to(cutlass.Int32) == expert:
            count += 1
    sums = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.Int32, cute.make_layout(SCANNERS), 16)
    place, total = sum_before(count, sums)
    for pair in cutlass.range(start, stop):
        if pair_experts[pair].to(cutlass.Int32) == expert:
            if place < capacity:
                places[pair] = place
                buffer_pairs[expert, place] = pair
            else:
                places[pair] = cutlass.Int32(NOWHERE)
            place += 1
    for turn in cutlass.range((capacity + SCANNERS - 1) // SCANNERS):
        if turn * SCANNERS + thread >= total and turn * SCANNERS + thread < capacity:
            buffer_pairs[expert, turn * SCANNERS + thread] = cutlass.Int32(NOWHERE)


@cute.kernel
def buffer_kernel(hidden: cute.Tensor, buffer_pairs: cute.Tensor, buffer: cute.Tensor, top_k: cutlass.Constexpr[int]):
    thread, _, _ = cute.arch.thread_idx()
    place, expert, _ = cute.arch.block_idx()
    pair = buffer_pairs[expert, place]
    x = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    x.fill(0.0)
    if pair >= 0:
        cute.autovec_copy(cute.local_tile(hidden[pair // top_k, None], (VECTOR,), (thread,)), x)
    cute.autovec_copy(x, cute.local_tile(buffer[expert, place, None], (VECTOR,), (thread,)))


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
    expert_out: cute.Tensor, experts: cute.Tensor, places: cute.Tensor, weights: cute.Tensor, out: cute.Tensor
):
    thread, _, _ = cute.arch.thread_idx()
    token, _, _ = cute.arch.block_idx()
    total = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    x = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    total.fill(0.0)
    for slot in cutlass.range_constexpr(experts.shape[1]):
        place = places[token, slot]
        if place >= 0:
            row = expert_out[experts[token, slot].to(cutlass.Int32), place, None]
            cute.autovec_copy(cute.local_tile(row, (VECTOR,), (thread,)), x)
            weight = weights[token, slot].to(cutlass.Float32)
            total.store(total.load() + x.load().to(cutlass.Float32) * weight)
    x.store(total.load().to(cutlass.BFloat16))
    cute.autovec_copy(x, cute.local_tile(out[token, None], (VECTOR,), (thread,)))


@cute.jit
def dispatch(
    hidden: cute.Tensor,
    pair_experts: cute.Tensor,
    places: cute.Tensor,
    buffer_pairs: cute.Tensor,
    buffer: cute.Tensor,
    stream,
    top_k: cutlass.Constexpr[int],
):
    experts, capacity, width = buffer.shape
    place_kernel(pair_experts, places, buffer_pairs).launch(grid=(experts, 1, 1), block=(SCANNERS, 1, 1), stream=stream)
    buffer_kernel(hidden, buffer_pairs, buffer, top_k).launch(
        grid=(capacity, experts, 1), block=(width // VECTOR, 1, 1), stream=stream
    )


@cute.jit
def gate_products(gate: cute.Tensor, up: cute.Tensor, stream):
    gate_kernel(gate, up).launch(
        grid=((gate.shape[0] // VECTOR + THREADS - 1) // THREADS, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.jit
def combine(
    expert_out: cute.Tensor, experts: cute.Tensor, places: cute.Tensor, weights: cute.Tensor, out: cute.Tensor, stream
):
    combine_kernel(expert_out, experts, places, weights, out).launch(
        grid=(out.shape[0], 1, 1), block=(out.shape[1] // VECTOR, 1, 1), stream=stream
    )


def compile_for(arch: str, width: int = 6144, experts: int = 160, top_k: int = 8):
    """The three functions for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert width % VECTOR == 0 and width // VECTOR <= 1024
    tokens, pairs, capacity = (cute.sym_int() for _ in range(3))
    values = cute.sym_int(divisibility=VECTOR)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {arch}"

    def fake(dtype, *shape, align: int = 16):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

    first = cute.compile(
        dispatch,
        fake(cutlass.BFloat16, tokens, width),
        fake(cutlass.Int64, pairs),
        fake(cutlass.Int32, pairs),
        fake(cutlass.Int32, experts, capacity, align=4),
        fake(cutlass.BFloat16, experts, capacity, width),
        stream,
        top_k,
        options=options,
    )
    flat = [fake(cutlass.BFloat16, values) for _ in "gu"]
    second = cute.compile(gate_products, *flat, stream, options=options)
    third = cute.compile(
        combine,
        fake(cutlass.BFloat16, experts, capacity, width),
        fake(cutlass.Int64, tokens, top_k),
        fake(cutlass.Int32, tokens, top_k),
        fake(cutlass.BFloat16, tokens, top_k),
        fake(cutlass.BFloat16, tokens, width),
        stream,
        options=options,
    )
    return first, second, third


@cache
def kernels_for(device: torch.device, width: int, experts: int, top_k: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", width, experts, top_k)


def solve(
    hidden_states: torch.Tensor,
    selected_experts: torch.Tensor,
    routing_weights: torch.Tensor,
    expert_gate_weights: torch.Tensor,
    expert_up_weights: torch.Tensor,
    expert_down_weights: torch.Tensor,
) -> torch.Tensor:
    (tokens, width), experts = hidden_states.shape, len(expert_gate_weights)
    top_k, device = selected_experts.shape[1], hidden_states.device
    capacity = -(-5 * tokens * top_k // (4 * experts))
    fill_buffers, gate_both, combine_all = kernels_for(device, width, experts, top_k)
    places = torch.empty(tokens, top_k, dtype=torch.int32, device=device)
    buffer_pairs = torch.empty(experts, capacity, dtype=torch.int32, device=device)
    buffer = hidden_states.new_empty(experts, capacity, width)
    fill_buffers(hidden_states, selected_experts.view(-1), places.view(-1), buffer_pairs, buffer)
    gate, up = torch.bmm(buffer, expert_gate_weights), torch.bmm(buffer, expert_up_weights)
    gate_both(gate.view(-1), up.view(-1))
    expert_out = torch.bmm(gate, expert_down_weights, out=buffer)
    output = torch.empty_like(hidden_states)
    combine_all(expert_out, selected_experts, places, routing_weights, output)
    return output
