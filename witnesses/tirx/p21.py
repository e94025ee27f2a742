"""p21, FP8 append to paged caches, in TIRx.

Bytes must be exact: every step is one float32 operation as the problem states it. The CUDA back end compiles with fast
division, so the reciprocal is refined with fused multiply-adds, after which it is correctly rounded; the rounding to
E4M3 is done on the bits. CUDA: a few threads share a head's vector, 8 values each. CPU: the same in plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

SMALLEST_SCALE = 1e-6


def e4m3(y):
    """The E4M3 byte nearest to y, a float32 in ±448; a tie goes to the even one. An expression, for any target."""
    bits = T.reinterpret("uint32", y)
    magnitude = bits & T.uint32(0x7FFFFFFF)
    # Normal values: round to three bits of significand, then move the exponent's bias from 127 to 7.
    odd = (magnitude >> T.uint32(20)) & T.uint32(1)
    normal = ((magnitude + T.uint32(0x7FFFF) + odd) >> T.uint32(20)) - T.uint32(120 << 3)
    # Below 2^-6 the grid has the constant step 2^-9, which is the step of float32 at 2^14.
    shifted = T.reinterpret("float32", magnitude) + T.float32(16384)
    subnormal = T.reinterpret("uint32", shifted) & T.uint32(0xFF)
    rounded = T.if_then_else(magnitude < T.uint32(0x3C800000), subnormal, normal)
    return T.cast(((bits >> T.uint32(24)) & T.uint32(0x80)) | rounded, "uint8")


def clamped(y):
    return T.min(T.max(y, T.float32(-448)), T.float32(448))


def scale_of(largest):
    return T.max(largest * T.float32(1 / 448), T.float32(SMALLEST_SCALE))


@T.jit
def append_cuda(
    k: T.handle,
    v: T.handle,
    s: T.handle,
    kc: T.handle,
    vc: T.handle,
    ks: T.handle,
    vs: T.handle,
    *,
    heads: T.constexpr,
    size: T.constexpr,
    page: T.constexpr,
):
    tokens = T.int32()
    pages = T.int32()
    key = T.match_buffer(k, (tokens, heads, size), "bfloat16")
    value = T.match_buffer(v, (tokens, heads, size), "bfloat16")
    slots = T.match_buffer(s, (tokens,), "int64")
    key_cache = T.match_buffer(kc, (pages, page, heads, size), "uint8")
    value_cache = T.match_buffer(vc, (pages, page, heads, size), "uint8")
    k_scales = T.match_buffer(ks, (pages, page, heads), "float32")
    v_scales = T.match_buffer(vs, (pages, page, heads), "float32")
    T.device_entry()
    token, which = T.cta_id([tokens, 2])
    thread = T.thread_id([heads * size // 8])
    x = T.alloc_local((8,), "bfloat16")
    code = T.alloc_local((8,), "uint8")
    largest = T.alloc_local((1,), "float32")
    scale = T.alloc_local((1,), "float32")
    inverse = T.alloc_local((1,), "float32")
    error = T.alloc_local((1,), "float32")
    head = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    slot = T.alloc_local((1,), "int32")
    head[0] = thread // (size // 8)
    lane[0] = thread % (size // 8)
    slot[0] = T.cast(slots[token], "int32")
    if slot[0] >= 0:
        if which == 0:
            for e in T.vectorized(8):
                x[e] = key[token, head[0], lane[0] * 8 + e]
        else:
            for e in T.vectorized(8):
                x[e] = value[token, head[0], lane[0] * 8 + e]
        largest[0] = T.float32(0)
        for e in T.unroll(8):
            largest[0] = T.max(largest[0], T.abs(T.cast(x[e], "float32")))
        largest[0] = T.cuda.warp_max(largest[0], size // 8)
        scale[0] = scale_of(largest[0])
        inverse[0] = T.float32(1) / scale[0]
        for _ in T.unroll(2):
            T.ptx.fma_f32(T.address_of(error[0]), -scale[0], inverse[0], T.float32(1))
            T.ptx.fma_f32(T.address_of(inverse[0]), inverse[0], error[0], inverse[0])
        for e in T.unroll(8):
            code[e] = e4m3(clamped(T.cast(x[e], "float32") * inverse[0]))
        if which == 0:
            for e in T.vectorized(8):
                key_cache[slot[0] // page, slot[0] % page, head[0], lane[0] * 8 + e] = code[e]
            if lane[0] == 0:
                k_scales[slot[0] // page, slot[0] % page, head[0]] = scale[0]
        else:
            for e in T.vectorized(8):
                value_cache[slot[0] // page, slot[0] % page, head[0], lane[0] * 8 + e] = code[e]
            if lane[0] == 0:
                v_scales[slot[0] // page, slot[0] % page, head[0]] = scale[0]


@T.jit
def append_cpu(
    x: T.handle, s: T.handle, ch: T.handle, sc: T.handle, *, heads: T.constexpr, size: T.constexpr, page: T.constexpr
):
    tokens = T.int32()
    pages = T.int32()
    source = T.match_buffer(x, (tokens, heads, size), "bfloat16")
    slots = T.match_buffer(s, (tokens,), "int64")
    cache_ = T.match_buffer(ch, (pages, page, heads, size), "uint8")
    scales = T.match_buffer(sc, (pages, page, heads), "float32")
    largest = T.alloc_buffer((1,), "float32", scope="local")
    inverse = T.alloc_buffer((1,), "float32", scope="local")
    slot = T.alloc_buffer((1,), "int32", scope="local")
    for token, head in T.grid(tokens, heads):
        slot[0] = T.cast(slots[token], "int32")
        if slot[0] >= 0:
            largest[0] = T.float32(0)
            for c in T.serial(size):
                largest[0] = T.max(largest[0], T.abs(T.cast(source[token, head, c], "float32")))
            scales[slot[0] // page, slot[0] % page, head] = scale_of(largest[0])
            inverse[0] = T.float32(1) / scale_of(largest[0])
            for c in T.serial(size):
                cache_[slot[0] // page, slot[0] % page, head, c] = e4m3(
                    clamped(T.cast(source[token, head, c], "float32") * inverse[0])
                )


def compile_for(arch: str, heads: int = 8, size: int = 128, page: int = 16) -> tvm.runtime.Executable:
    """The kernel for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    sizes = {"heads": heads, "size": size, "page": page}
    if arch == "llvm":
        return tvm.compile(tvm.IRModule({"main": append_cpu.specialize(**sizes)}), target="llvm")
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return tvm.compile(tvm.IRModule({"main": append_cuda.specialize(**sizes)}), target=target, tir_pipeline="tirx")


@cache
def kernel_for(device: torch.device, heads: int, size: int, page: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return compile_for(arch, heads, size, page)["main"]


def solve(
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    k_scale_cache: torch.Tensor,
    v_scale_cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    kernel = kernel_for(key.device, key.shape[1], key.shape[2], key_cache.shape[1])
    if key.is_cuda:
        kernel(key, value, slot_mapping, key_cache, value_cache, k_scale_cache, v_scale_cache)
    else:
        kernel(key, slot_mapping, key_cache, k_scale_cache)
        kernel(value, slot_mapping, value_cache, v_scale_cache)
    return key_cache, value_cache, k_scale_cache, v_scale_cache
