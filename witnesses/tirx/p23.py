"""p23, gathering FP8 cache entries of several requests, in TIRx.

CUDA: a thread block has one token, a thread 16 codes (16 bytes) and their 16 float32 values. Which request a token
belongs to is counted on the device; only their number must reach the host. CPU: plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

CODES = 16
VECTOR = 4  # float32 values in 16 bytes


def e4m3(code):
    """The float32 that an E4M3 byte stands for. An expression, for any target."""
    magnitude = T.cast(code, "uint32") & T.uint32(0x7F)
    normal = T.reinterpret("float32", (magnitude << T.uint32(20)) + T.uint32(120 << 23))
    subnormal = T.cast(magnitude, "float32") * T.float32(2**-9)
    value = T.if_then_else(magnitude < T.uint32(8), subnormal, normal)
    return T.if_then_else(code >= T.uint8(0x80), -value, value)


@T.jit
def gather_cuda(
    s: T.handle,
    b: T.handle,
    n: T.handle,
    scale: T.float32,
    o: T.handle,
    *,
    page: T.constexpr,
    entry: T.constexpr,
    threads: T.constexpr,
):
    pages = T.int32()
    requests = T.int32()
    listed = T.int32()
    tokens = T.int32()
    source = T.match_buffer(s, (pages, page, entry), "uint8")
    block_table = T.match_buffer(b, (requests, listed), "int32")
    lengths = T.match_buffer(n, (requests,), "int32")
    out = T.match_buffer(o, (tokens, entry), "float32")
    T.device_entry()
    token = T.cta_id([tokens])
    thread = T.thread_id([threads])
    raw = T.alloc_local((CODES,), "uint8")
    values = T.alloc_local((CODES // VECTOR, VECTOR), "float32")
    request = T.alloc_local((1,), "int32")
    first = T.alloc_local((1,), "int32")
    start = T.alloc_local((1,), "int32")
    block = T.alloc_local((1,), "int32")
    request[0] = 0
    first[0] = 0
    start[0] = 0
    for r in T.serial(requests):
        if token >= start[0]:  # the last request for which this holds is the token's
            request[0] = r
            first[0] = start[0]
        start[0] = start[0] + lengths[r]
    if thread < entry // CODES:
        block[0] = block_table[request[0], (token - first[0]) // page]
        for e in T.vectorized(CODES):
            raw[e] = source[block[0], (token - first[0]) % page, thread * CODES + e]
        for part in T.unroll(CODES // VECTOR):
            for e in T.unroll(VECTOR):
                values[part, e] = e4m3(raw[part * VECTOR + e]) * scale
            for e in T.vectorized(VECTOR):
                out[token, (thread * (CODES // VECTOR) + part) * VECTOR + e] = values[part, e]


@T.jit
def gather_cpu(
    s: T.handle, b: T.handle, n: T.handle, scale: T.float32, o: T.handle, *, page: T.constexpr, entry: T.constexpr
):
    pages = T.int32()
    requests = T.int32()
    listed = T.int32()
    tokens = T.int32()
    source = T.match_buffer(s, (pages, page, entry), "uint8")
    block_table = T.match_buffer(b, (requests, listed), "int32")
    lengths = T.match_buffer(n, (requests,), "int32")
    out = T.match_buffer(o, (tokens, entry), "float32")
    start = T.alloc_buffer((1,), "int32", scope="local")
    start[0] = 0
    for r in T.serial(requests):
        for t in T.serial(lengths[r]):
            for c in T.serial(entry):
                out[start[0] + t, c] = e4m3(source[block_table[r, t // page], t % page, c]) * scale
        start[0] = start[0] + lengths[r]


def compile_for(arch: str, page: int = 16, entry: int = 576) -> tvm.runtime.Executable:
    """The kernel for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    if arch == "llvm":
        return tvm.compile(tvm.IRModule({"main": gather_cpu.specialize(page=page, entry=entry)}), target="llvm")
    assert entry % CODES == 0
    kernel = gather_cuda.specialize(page=page, entry=entry, threads=-(-entry // CODES // 32) * 32)
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx")


@cache
def kernel_for(device: torch.device, page: int, entry: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return compile_for(arch, page, entry)["main"]


def solve(src_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, scale: float) -> torch.Tensor:
    _, page, entry = src_cache.shape
    tokens = int(seq_lens.sum())  # the shape of the result is in the data
    out = torch.empty(tokens, entry, dtype=torch.float32, device=src_cache.device)
    kernel_for(src_cache.device, page, entry)(src_cache, block_table, seq_lens, scale, out)
    return out
