"""p45, a mixture layer with fixed expert capacity, in TIRx. The batched products stay with eager PyTorch.

CUDA, four kernels:
1. Places: a thread block has one expert. Every thread counts the expert's pairs in a stretch of its own, a sum over the
   threads before it says where its pairs stand, and what is beyond the capacity gets no place.
2. Buffers: a thread block copies one row, or writes zeros where an expert has fewer pairs than places.
3. Gating of the two products, 8 values a thread.
4. Combination: a thread block adds up one token's surviving results in float32.

CPU: the same four in plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

VECTOR = 8
SCANNERS = 1024
THREADS = 256
NOWHERE = -1


def float32(x):
    return T.cast(x, "float32")


def gated(gate, up):
    return T.cast(float32(gate) / (T.float32(1) + T.exp(-float32(gate))) * float32(up), "bfloat16")


@T.jit
def place_cuda(e: T.handle, p: T.handle, b: T.handle, *, experts: T.constexpr):
    pairs = T.int32()
    capacity = T.int32()
    pair_experts = T.match_buffer(e, (pairs,), "int64")
    places = T.match_buffer(p, (pairs,), "int32")
    buffer_pairs = T.match_buffer(b, (experts, capacity), "int32")
    T.device_entry()
    expert = T.cta_id([experts])
    thread = T.thread_id([SCANNERS])
    sums = T.alloc_shared((SCANNERS,), "int32")
    stretch = T.alloc_local((1,), "int32")
    count = T.alloc_local((1,), "int32")
    other = T.alloc_local((1,), "int32")
    place = T.alloc_local((1,), "int32")
    pair = T.alloc_local((1,), "int32")
    stretch[0] = T.ceildiv(pairs, SCANNERS)
    count[0] = 0
    for i in T.serial(stretch[0]):
        pair[0] = thread * stretch[0] + i
        if pair[0] < pairs and pair_experts[pair[0]] == T.cast(expert, "int64"):
            count[0] = count[0] + 1
    sums[thread] = count[0]
    T.cuda.cta_sync()
    for k in T.unroll(10):  # doubling steps up to all 1024 threads
        other[0] = 0
        if thread >= (1 << k):
            other[0] = sums[thread - (1 << k)]
        T.cuda.cta_sync()
        sums[thread] = sums[thread] + other[0]
        T.cuda.cta_sync()
    place[0] = sums[thread] - count[0]
    for i in T.serial(stretch[0]):
        pair[0] = thread * stretch[0] + i
        if pair[0] < pairs and pair_experts[pair[0]] == T.cast(expert, "int64"):
            if place[0] < capacity:
                places[pair[0]] = place[0]
                buffer_pairs[expert, place[0]] = pair[0]
            else:
                places[pair[0]] = NOWHERE
            place[0] = place[0] + 1
    for turn in T.serial(T.ceildiv(capacity, SCANNERS)):
        place[0] = turn * SCANNERS + thread
        if place[0] >= sums[SCANNERS - 1] and place[0] < capacity:
            buffer_pairs[expert, place[0]] = NOWHERE


@T.jit
def buffer_cuda(h: T.handle, p: T.handle, b: T.handle, *, experts: T.constexpr, width: T.constexpr, top_k: T.constexpr):
    tokens = T.int32()
    capacity = T.int32()
    hidden = T.match_buffer(h, (tokens, width), "bfloat16")
    buffer_pairs = T.match_buffer(p, (experts, capacity), "int32")
    buffer = T.match_buffer(b, (experts, capacity, width), "bfloat16")
    T.device_entry()
    place, expert = T.cta_id([capacity, experts])
    thread = T.thread_id([width // VECTOR])
    x = T.alloc_local((VECTOR,), "bfloat16")
    pair = T.alloc_local((1,), "int32")
    pair[0] = buffer_pairs[expert, place]
    for e in T.unroll(VECTOR):
        x[e] = T.bfloat16(0)
    if pair[0] >= 0:
        for e in T.vectorized(VECTOR):
            x[e] = hidden[pair[0] // top_k, thread * VECTOR + e]
    for e in T.vectorized(VECTOR):
        buffer[expert, place, thread * VECTOR + e] = x[e]


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
def combine_cuda(
    x: T.handle,
    s: T.handle,
    p: T.handle,
    w: T.handle,
    o: T.handle,
    *,
    experts: T.constexpr,
    width: T.constexpr,
    top_k: T.constexpr,
):
    tokens = T.int32()
    capacity = T.int32()
    expert_out = T.match_buffer(x, (experts, capacity, width), "bfloat16")
    selected = T.match_buffer(s, (tokens, top_k), "int64")
    places = T.match_buffer(p, (tokens, top_k), "int32")
    weights = T.match_buffer(w, (tokens, top_k), "bfloat16")
    out = T.match_buffer(o, (tokens, width), "bfloat16")
    T.device_entry()
    token = T.cta_id([tokens])
    thread = T.thread_id([width // VECTOR])
    total = T.alloc_local((VECTOR,), "float32")
    row = T.alloc_local((VECTOR,), "bfloat16")
    expert = T.alloc_local((1,), "int32")
    place = T.alloc_local((1,), "int32")
    for e in T.unroll(VECTOR):
        total[e] = T.float32(0)
    for slot in T.unroll(top_k):
        place[0] = places[token, slot]
        if place[0] >= 0:
            expert[0] = T.cast(selected[token, slot], "int32")
            for e in T.vectorized(VECTOR):
                row[e] = expert_out[expert[0], place[0], thread * VECTOR + e]
            for e in T.unroll(VECTOR):
                total[e] = total[e] + float32(weights[token, slot]) * float32(row[e])
    for e in T.unroll(VECTOR):
        row[e] = T.cast(total[e], "bfloat16")
    for e in T.vectorized(VECTOR):
        out[token, thread * VECTOR + e] = row[e]


@T.jit
def place_cpu(e: T.handle, p: T.handle, b: T.handle, *, experts: T.constexpr):
    pairs = T.int32()
    capacity = T.int32()
    pair_experts = T.match_buffer(e, (pairs,), "int64")
    places = T.match_buffer(p, (pairs,), "int32")
    buffer_pairs = T.match_buffer(b, (experts, capacity), "int32")
    taken = T.alloc_buffer((experts,), "int32", scope="local")
    for expert in T.serial(experts):
        taken[expert] = 0
        for place in T.serial(capacity):
            buffer_pairs[expert, place] = NOWHERE
    for pair in T.serial(pairs):
        places[pair] = NOWHERE
        if taken[pair_experts[pair]] < capacity:
            places[pair] = taken[pair_experts[pair]]
            buffer_pairs[pair_experts[pair], taken[pair_experts[pair]]] = pair
        taken[pair_experts[pair]] = taken[pair_experts[pair]] + 1


@T.jit
def buffer_cpu(h: T.handle, p: T.handle, b: T.handle, *, experts: T.constexpr, width: T.constexpr, top_k: T.constexpr):
    tokens = T.int32()
    capacity = T.int32()
    hidden = T.match_buffer(h, (tokens, width), "bfloat16")
    buffer_pairs = T.match_buffer(p, (experts, capacity), "int32")
    buffer = T.match_buffer(b, (experts, capacity, width), "bfloat16")
    for expert, place, c in T.grid(experts, capacity, width):
        if buffer_pairs[expert, place] >= 0:
            buffer[expert, place, c] = hidden[buffer_pairs[expert, place] // top_k, c]
        else:
            buffer[expert, place, c] = T.bfloat16(0)


@T.jit
def gate_cpu(g: T.handle, u: T.handle):
    vectors = T.int32()
    gate = T.match_buffer(g, (vectors, VECTOR), "bfloat16")
    up = T.match_buffer(u, (vectors, VECTOR), "bfloat16")
    for v, e in T.grid(vectors, VECTOR):
        gate[v, e] = gated(gate[v, e], up[v, e])


@T.jit
def combine_cpu(
    x: T.handle,
    e: T.handle,
    p: T.handle,
    w: T.handle,
    o: T.handle,
    *,
    experts: T.constexpr,
    width: T.constexpr,
    top_k: T.constexpr,
):
    tokens = T.int32()
    capacity = T.int32()
    expert_out = T.match_buffer(x, (experts, capacity, width), "bfloat16")
    selected = T.match_buffer(e, (tokens, top_k), "int64")
    places = T.match_buffer(p, (tokens, top_k), "int32")
    weights = T.match_buffer(w, (tokens, top_k), "bfloat16")
    out = T.match_buffer(o, (tokens, width), "bfloat16")
    total = T.alloc_buffer((1,), "float32", scope="local")
    for token, c in T.grid(tokens, width):
        total[0] = T.float32(0)
        for slot in T.serial(top_k):
            if places[token, slot] >= 0:
                total[0] = total[0] + float32(weights[token, slot]) * float32(
                    expert_out[selected[token, slot], places[token, slot], c]
                )
        out[token, c] = T.cast(total[0], "bfloat16")


def compile_for(arch: str, width: int = 6144, experts: int = 160, top_k: int = 8) -> list[tvm.runtime.Executable]:
    """Places, buffers, gating, combination for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    on_cpu = arch == "llvm"
    sizes = {"experts": experts, "width": width, "top_k": top_k}
    kernels = [
        (place_cpu if on_cpu else place_cuda).specialize(experts=experts),
        (buffer_cpu if on_cpu else buffer_cuda).specialize(**sizes),
        (gate_cpu if on_cpu else gate_cuda).specialize(),
        (combine_cpu if on_cpu else combine_cuda).specialize(**sizes),
    ]
    if on_cpu:
        return [tvm.compile(tvm.IRModule({"main": kernel}), target="llvm") for kernel in kernels]
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return [tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx") for kernel in kernels]


@cache
def kernels_for(device: torch.device, width: int, experts: int, top_k: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return [executable["main"] for executable in compile_for(arch, width, experts, top_k)]


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
    find_places, fill_buffers, gate_both, combine = kernels_for(device, width, experts, top_k)
    places = torch.empty(tokens, top_k, dtype=torch.int32, device=device)
    buffer_pairs = torch.empty(experts, capacity, dtype=torch.int32, device=device)
    buffer = hidden_states.new_empty(experts, capacity, width)
    find_places(selected_experts.view(-1), places.view(-1), buffer_pairs)
    fill_buffers(hidden_states, buffer_pairs, buffer)
    gate, up = torch.bmm(buffer, expert_gate_weights), torch.bmm(buffer, expert_up_weights)
    gate_both(gate.view(-1, VECTOR), up.view(-1, VECTOR))
    expert_out = torch.bmm(gate, expert_down_weights, out=buffer)
    output = torch.empty_like(hidden_states)
    combine(expert_out, selected_experts, places, routing_weights, output)
    return output
