"""p24, gathering cache entries of mixed format, in TIRx.

CUDA: a thread block has one token. A thread turns 16 codes (16 bytes) into bfloat16 by their group's scale, or moves 16
bytes of the positional values as they are. Which request a token belongs to is counted on the device; only their number
must reach the host. CPU: plain loops. The cache is read as bytes, as float32 and as bfloat16: three views of a tensor.
"""

from functools import cache as cached

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

LATENT = 512
GROUP = 128  # latents that share a scale
ROTARY = 64
SCALES_END = LATENT + 4 * (LATENT // GROUP)
ENTRY_BYTES = SCALES_END + 2 * ROTARY
CODES = 16  # bytes that a thread reads
VECTOR = 8  # bfloat16 values in 16 bytes
LATENT_THREADS = LATENT // CODES
THREADS = 64


def e4m3(code):
    """The float32 that an E4M3 byte stands for. An expression, for any target."""
    magnitude = T.cast(code, "uint32") & T.uint32(0x7F)
    normal = T.reinterpret("float32", (magnitude << T.uint32(20)) + T.uint32(120 << 23))
    subnormal = T.cast(magnitude, "float32") * T.float32(2**-9)
    value = T.if_then_else(magnitude < T.uint32(8), subnormal, normal)
    return T.if_then_else(code >= T.uint8(0x80), -value, value)


@T.jit
def gather_cuda(sb: T.handle, sf: T.handle, sh: T.handle, b: T.handle, n: T.handle, o: T.handle, *, page: T.constexpr):
    pages = T.int32()
    requests = T.int32()
    listed = T.int32()
    tokens = T.int32()
    codes = T.match_buffer(sb, (pages, page, ENTRY_BYTES), "uint8")
    scales = T.match_buffer(sf, (pages, page, ENTRY_BYTES // 4), "float32")
    positional = T.match_buffer(sh, (pages, page, ENTRY_BYTES // 2), "bfloat16")
    block_table = T.match_buffer(b, (requests, listed), "int32")
    lengths = T.match_buffer(n, (requests,), "int32")
    out = T.match_buffer(o, (tokens, LATENT + ROTARY), "bfloat16")
    T.device_entry()
    token = T.cta_id([tokens])
    thread = T.thread_id([THREADS])
    raw = T.alloc_local((CODES,), "uint8")
    values = T.alloc_local((CODES // VECTOR, VECTOR), "bfloat16")
    scale = T.alloc_local((1,), "float32")
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
    block[0] = block_table[request[0], (token - first[0]) // page]
    if thread < LATENT_THREADS:
        scale[0] = scales[block[0], (token - first[0]) % page, LATENT // 4 + thread * CODES // GROUP]
        for e in T.vectorized(CODES):
            raw[e] = codes[block[0], (token - first[0]) % page, thread * CODES + e]
        for part in T.unroll(CODES // VECTOR):
            for e in T.unroll(VECTOR):
                values[part, e] = T.cast(e4m3(raw[part * VECTOR + e]) * scale[0], "bfloat16")
            for e in T.vectorized(VECTOR):
                out[token, (thread * (CODES // VECTOR) + part) * VECTOR + e] = values[part, e]
    elif thread < LATENT_THREADS + ROTARY // VECTOR:
        for e in T.vectorized(VECTOR):
            values[0, e] = positional[
                block[0], (token - first[0]) % page, SCALES_END // 2 + (thread - LATENT_THREADS) * VECTOR + e
            ]
        for e in T.vectorized(VECTOR):
            out[token, LATENT + (thread - LATENT_THREADS) * VECTOR + e] = values[0, e]


@T.jit
def gather_cpu(sb: T.handle, sf: T.handle, sh: T.handle, b: T.handle, n: T.handle, o: T.handle, *, page: T.constexpr):
    pages = T.int32()
    requests = T.int32()
    listed = T.int32()
    tokens = T.int32()
    codes = T.match_buffer(sb, (pages, page, ENTRY_BYTES), "uint8")
    scales = T.match_buffer(sf, (pages, page, ENTRY_BYTES // 4), "float32")
    positional = T.match_buffer(sh, (pages, page, ENTRY_BYTES // 2), "bfloat16")
    block_table = T.match_buffer(b, (requests, listed), "int32")
    lengths = T.match_buffer(n, (requests,), "int32")
    out = T.match_buffer(o, (tokens, LATENT + ROTARY), "bfloat16")
    start = T.alloc_buffer((1,), "int32", scope="local")
    start[0] = 0
    for r in T.serial(requests):
        for t in T.serial(lengths[r]):
            for c in T.serial(LATENT):
                out[start[0] + t, c] = T.cast(
                    e4m3(codes[block_table[r, t // page], t % page, c])
                    * scales[block_table[r, t // page], t % page, LATENT // 4 + c // GROUP],
                    "bfloat16",
                )
            for c in T.serial(ROTARY):
                out[start[0] + t, LATENT + c] = positional[block_table[r, t // page], t % page, SCALES_END // 2 + c]
        start[0] = start[0] + lengths[r]


def compile_for(arch: str, page: int = 64) -> tvm.runtime.Executable:
    """The kernel for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    if arch == "llvm":
        return tvm.compile(tvm.IRModule({"main": gather_cpu.specialize(page=page)}), target="llvm")
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    kernel = gather_cuda.specialize(page=page)
    return tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx")


@cached
def kernel_for(device: torch.device, page: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return compile_for(arch, page)["main"]


def solve(cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    tokens = int(seq_lens.sum())  # the shape of the result is in the data
    out = torch.empty(tokens, LATENT + ROTARY, dtype=torch.bfloat16, device=cache.device)
    views = (cache, cache.view(torch.float32), cache.view(torch.bfloat16))
    kernel_for(cache.device, cache.shape[1])(*views, block_table, seq_lens, out)
    return out
