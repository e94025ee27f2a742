"""p41, query, key and value projections with an RMSNorm of every query and key head, in TIRx.

The three projections stay with eager PyTorch. One kernel then normalises the heads of queries and keys in place. CUDA:
32 threads share a head, 4 values (16 bytes) each, and have several heads on their way. CPU: plain loops.
"""

from functools import cache

import torch
import tvm
from torch.nn.functional import linear
from tvm.script import tirx as T  # noqa: N812

VECTOR = 4
THREADS = 256
DEPTH = 4  # heads in flight in each thread


@T.jit
def norm_cuda(
    q: T.handle,
    k: T.handle,
    qw: T.handle,
    kw: T.handle,
    eps: T.float32,
    *,
    size: T.constexpr,
    lanes: T.constexpr,
    together: T.constexpr,
):
    """`lanes` threads a head, `together` heads of a thread block at a time."""
    heads = T.int32()
    query = T.match_buffer(q, (heads, size), "float32")
    key = T.match_buffer(k, (heads, size), "float32")
    query_weight = T.match_buffer(qw, (size,), "float32")
    key_weight = T.match_buffer(kw, (size,), "float32")
    T.device_entry()
    block, which = T.cta_id([T.ceildiv(heads, together * DEPTH), 2])
    thread = T.thread_id([THREADS])
    values = T.alloc_local((DEPTH, VECTOR), "float32")
    w = T.alloc_local((VECTOR,), "float32")
    total = T.alloc_local((1,), "float32")
    scale = T.alloc_local((2,), "float32")
    lane = T.alloc_local((1,), "int32")
    first = T.alloc_local((1,), "int32")
    lane[0] = thread % lanes
    first[0] = block * (together * DEPTH) + thread // lanes
    if which == 0:
        for e in T.vectorized(VECTOR):
            w[e] = query_weight[lane[0] * VECTOR + e]
        for d in T.unroll(DEPTH):
            if first[0] + d * together < heads:
                for e in T.vectorized(VECTOR):
                    values[d, e] = query[first[0] + d * together, lane[0] * VECTOR + e]
    else:
        for e in T.vectorized(VECTOR):
            w[e] = key_weight[lane[0] * VECTOR + e]
        for d in T.unroll(DEPTH):
            if first[0] + d * together < heads:
                for e in T.vectorized(VECTOR):
                    values[d, e] = key[first[0] + d * together, lane[0] * VECTOR + e]
    for d in T.unroll(DEPTH):
        # Every thread takes part in the reduction, also those beyond the last head.
        total[0] = T.float32(0)
        for e in T.unroll(VECTOR):
            total[0] = total[0] + values[d, e] * values[d, e]
        total[0] = T.cuda.warp_sum(total[0], lanes)
        total[0] = total[0] * T.float32(1 / size) + eps
        # The hardware's reciprocal root, made as good as float32 by one step of Newton's.
        scale[0] = T.rsqrt(total[0])
        scale[1] = total[0] * scale[0]
        T.ptx.fma_f32(T.address_of(scale[1]), -scale[1], scale[0], T.float32(1))
        scale[1] = scale[1] * T.float32(0.5)
        T.ptx.fma_f32(T.address_of(scale[0]), scale[0], scale[1], scale[0])
        for e in T.unroll(VECTOR):
            values[d, e] = values[d, e] * scale[0] * w[e]
    if which == 0:
        for d in T.unroll(DEPTH):
            if first[0] + d * together < heads:
                for e in T.vectorized(VECTOR):
                    query[first[0] + d * together, lane[0] * VECTOR + e] = values[d, e]
    else:
        for d in T.unroll(DEPTH):
            if first[0] + d * together < heads:
                for e in T.vectorized(VECTOR):
                    key[first[0] + d * together, lane[0] * VECTOR + e] = values[d, e]


@T.jit
def norm_cpu(q: T.handle, k: T.handle, qw: T.handle, kw: T.handle, eps: T.float32, *, size: T.constexpr):
    heads = T.int32()
    query = T.match_buffer(q, (heads, size), "float32")
    key = T.match_buffer(k, (heads, size), "float32")
    query_weight = T.match_buffer(qw, (size,), "float32")
    key_weight = T.match_buffer(kw, (size,), "float32")
    totals = T.alloc_buffer((2,), "float32", scope="local")
    for head in T.serial(heads):
        totals[0] = T.float32(0)
        totals[1] = T.float32(0)
        for c in T.serial(size):
            totals[0] = totals[0] + query[head, c] * query[head, c]
            totals[1] = totals[1] + key[head, c] * key[head, c]
        for which in T.serial(2):
            totals[which] = T.float32(1) / T.sqrt(totals[which] / T.float32(size) + eps)
        for c in T.serial(size):
            query[head, c] = query[head, c] * totals[0] * query_weight[c]
            key[head, c] = key[head, c] * totals[1] * key_weight[c]


def compile_for(arch: str, size: int = 128) -> tvm.runtime.Executable:
    """The kernel for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    if arch == "llvm":
        return tvm.compile(tvm.IRModule({"main": norm_cpu.specialize(size=size)}), target="llvm")
    lanes = size // VECTOR
    assert size % VECTOR == 0 and lanes in (2, 4, 8, 16, 32), "a head must take a power of two of threads"
    kernel = norm_cuda.specialize(size=size, lanes=lanes, together=THREADS // lanes)
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx")


@cache
def kernel_for(device: torch.device, size: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return compile_for(arch, size)["main"]


def solve(
    hidden_states: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    v_weight: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    size = len(q_norm_weight)
    shape = (*hidden_states.shape[:2], -1, size)
    query, key, value = (linear(hidden_states, w).view(shape) for w in (q_weight, k_weight, v_weight))
    kernel = kernel_for(query.device, size)
    kernel(query.view(-1, size), key.view(-1, size), q_norm_weight, k_norm_weight, eps)
    return query, key, value
