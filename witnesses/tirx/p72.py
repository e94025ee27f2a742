"""p72, one decode step of the gated delta rule, in TIRx.

A row of the state (one value channel, all key channels) is updated from that row alone: decay it, take its product with
the key, add the correction times the key, take the product with the query. So every row is read once and written once.
CUDA: 8 threads share a row, 32 rows a thread block. CPU: the same in plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812


@T.jit
def step_cuda(
    q: T.handle,
    k: T.handle,
    v: T.handle,
    s: T.handle,
    al: T.handle,
    a: T.handle,
    dt: T.handle,
    b: T.handle,
    scale: T.float32,
    o: T.handle,
    ns: T.handle,
    *,
    query_heads: T.constexpr,
    key_heads: T.constexpr,
    heads: T.constexpr,
    size: T.constexpr,
    lanes: T.constexpr,
    rows: T.constexpr,
):
    batch = T.int32()
    query = T.match_buffer(q, (batch, 1, query_heads, size), "bfloat16")
    key = T.match_buffer(k, (batch, 1, key_heads, size), "bfloat16")
    value = T.match_buffer(v, (batch, 1, heads, size), "bfloat16")
    state = T.match_buffer(s, (batch, heads, size, size), "float32")
    log_rate = T.match_buffer(al, (heads,), "float32")
    gate = T.match_buffer(a, (batch, 1, heads), "bfloat16")
    gate_bias = T.match_buffer(dt, (heads,), "float32")
    strength = T.match_buffer(b, (batch, 1, heads), "bfloat16")
    out = T.match_buffer(o, (batch, 1, heads, size), "bfloat16")
    new_state = T.match_buffer(ns, (batch, heads, size, size), "float32")
    T.device_entry()
    part, head, request = T.cta_id([size // rows, heads, batch])
    thread = T.thread_id([rows * lanes])
    x = T.alloc_local((size // lanes,), "float32")
    kk = T.alloc_local((size // lanes,), "float32")
    qq = T.alloc_local((size // lanes,), "float32")
    half = T.alloc_local((4,), "bfloat16")
    decay = T.alloc_local((1,), "float32")
    beta = T.alloc_local((1,), "float32")
    total = T.alloc_local((1,), "float32")
    row = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    row[0] = part * rows + thread // lanes
    lane[0] = thread % lanes
    for c in T.unroll(size // lanes // 4):
        for e in T.vectorized(4):
            x[c * 4 + e] = state[request, head, row[0], (c * lanes + lane[0]) * 4 + e]
    for c in T.unroll(size // lanes // 4):
        for e in T.vectorized(4):
            half[e] = key[request, 0, head // (heads // key_heads), (c * lanes + lane[0]) * 4 + e]
        for e in T.unroll(4):
            kk[c * 4 + e] = T.cast(half[e], "float32")
        for e in T.vectorized(4):
            half[e] = query[request, 0, head // (heads // query_heads), (c * lanes + lane[0]) * 4 + e]
        for e in T.unroll(4):
            qq[c * 4 + e] = T.cast(half[e], "float32")
    decay[0] = T.cast(gate[request, 0, head], "float32") + gate_bias[head]
    decay[0] = T.max(decay[0], T.float32(0)) + T.log1p(T.exp(-T.abs(decay[0])))
    decay[0] = T.exp(-T.exp(log_rate[head]) * decay[0])
    beta[0] = T.float32(1) / (T.float32(1) + T.exp(-T.cast(strength[request, 0, head], "float32")))
    total[0] = T.float32(0)
    for c in T.unroll(size // lanes):
        x[c] = x[c] * decay[0]
        total[0] = total[0] + x[c] * kk[c]
    total[0] = T.cuda.warp_sum(total[0], lanes)
    beta[0] = beta[0] * (T.cast(value[request, 0, head, row[0]], "float32") - total[0])
    total[0] = T.float32(0)
    for c in T.unroll(size // lanes):
        x[c] = x[c] + beta[0] * kk[c]
        total[0] = total[0] + x[c] * qq[c]
    for c in T.unroll(size // lanes // 4):
        for e in T.vectorized(4):
            new_state[request, head, row[0], (c * lanes + lane[0]) * 4 + e] = x[c * 4 + e]
    total[0] = T.cuda.warp_sum(total[0], lanes)
    if lane[0] == 0:
        out[request, 0, head, row[0]] = T.cast(total[0] * scale, "bfloat16")


@T.jit
def step_cpu(
    q: T.handle,
    k: T.handle,
    v: T.handle,
    s: T.handle,
    al: T.handle,
    a: T.handle,
    dt: T.handle,
    b: T.handle,
    scale: T.float32,
    o: T.handle,
    ns: T.handle,
    *,
    query_heads: T.constexpr,
    key_heads: T.constexpr,
    heads: T.constexpr,
    size: T.constexpr,
):
    batch = T.int32()
    query = T.match_buffer(q, (batch, 1, query_heads, size), "bfloat16")
    key = T.match_buffer(k, (batch, 1, key_heads, size), "bfloat16")
    value = T.match_buffer(v, (batch, 1, heads, size), "bfloat16")
    state = T.match_buffer(s, (batch, heads, size, size), "float32")
    log_rate = T.match_buffer(al, (heads,), "float32")
    gate = T.match_buffer(a, (batch, 1, heads), "bfloat16")
    gate_bias = T.match_buffer(dt, (heads,), "float32")
    strength = T.match_buffer(b, (batch, 1, heads), "bfloat16")
    out = T.match_buffer(o, (batch, 1, heads, size), "bfloat16")
    new_state = T.match_buffer(ns, (batch, heads, size, size), "float32")
    decay = T.alloc_buffer((1,), "float32", scope="local")
    beta = T.alloc_buffer((1,), "float32", scope="local")
    total = T.alloc_buffer((1,), "float32", scope="local")
    for request, head in T.grid(batch, heads):
        decay[0] = T.cast(gate[request, 0, head], "float32") + gate_bias[head]
        decay[0] = T.max(decay[0], T.float32(0)) + T.log1p(T.exp(-T.abs(decay[0])))
        decay[0] = T.exp(-T.exp(log_rate[head]) * decay[0])
        for row in T.serial(size):
            beta[0] = T.float32(1) / (T.float32(1) + T.exp(-T.cast(strength[request, 0, head], "float32")))
            total[0] = T.float32(0)
            for c in T.serial(size):
                total[0] = total[0] + decay[0] * state[request, head, row, c] * T.cast(
                    key[request, 0, head // (heads // key_heads), c], "float32"
                )
            beta[0] = beta[0] * (T.cast(value[request, 0, head, row], "float32") - total[0])
            total[0] = T.float32(0)
            for c in T.serial(size):
                new_state[request, head, row, c] = decay[0] * state[request, head, row, c] + beta[0] * T.cast(
                    key[request, 0, head // (heads // key_heads), c], "float32"
                )
                total[0] = total[0] + new_state[request, head, row, c] * T.cast(
                    query[request, 0, head // (heads // query_heads), c], "float32"
                )
            out[request, 0, head, row] = T.cast(total[0] * scale, "bfloat16")


def compile_for(
    arch: str, query_heads: int = 8, key_heads: int = 8, heads: int = 16, size: int = 128
) -> tvm.runtime.Executable:
    """The kernel for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    sizes = {"query_heads": query_heads, "key_heads": key_heads, "heads": heads, "size": size}
    if arch == "llvm":
        return tvm.compile(tvm.IRModule({"main": step_cpu.specialize(**sizes)}), target="llvm")
    lanes = min(8, size // 4)
    kernel = step_cuda.specialize(**sizes, lanes=lanes, rows=min(32, size))
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx")


@cache
def kernel_for(device: torch.device, query_heads: int, key_heads: int, heads: int, size: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return compile_for(arch, query_heads, key_heads, heads, size)["main"]


def solve(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    output, new_state = torch.empty_like(v), torch.empty_like(state)
    kernel = kernel_for(q.device, q.shape[2], k.shape[2], v.shape[2], v.shape[3])
    kernel(q, k, v, state, A_log, a, dt_bias, b, scale, output, new_state)
    return output, new_state
