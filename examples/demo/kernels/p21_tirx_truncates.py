"""Wrong: the bits below the FP8 significand are cut off instead of rounded to the nearest even."""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812


def cut_to_e4m3(y):
    bits = T.reinterpret("uint32", y)
    magnitude = bits & T.uint32(0x7FFFFFFF)
    normal = (magnitude >> T.uint32(20)) - T.uint32(120 << 3)
    small = T.cast(T.reinterpret("float32", magnitude) * T.float32(512), "uint32")
    cut = T.if_then_else(magnitude < T.uint32(0x3C800000), small, normal)
    return T.cast(((bits >> T.uint32(24)) & T.uint32(0x80)) | cut, "uint8")


@T.jit
def append(
    x: T.handle, s: T.handle, c: T.handle, sc: T.handle, *, heads: T.constexpr, size: T.constexpr, page: T.constexpr
):
    tokens = T.int32()
    pages = T.int32()
    source = T.match_buffer(x, (tokens, heads, size), "bfloat16")
    slots = T.match_buffer(s, (tokens,), "int64")
    codes = T.match_buffer(c, (pages, page, heads, size), "uint8")
    scales = T.match_buffer(sc, (pages, page, heads), "float32")
    largest = T.alloc_buffer((1,), "float32", scope="local")
    slot = T.alloc_buffer((1,), "int32", scope="local")
    for token, head in T.grid(tokens, heads):
        slot[0] = T.cast(slots[token], "int32")
        if slot[0] >= 0:
            largest[0] = T.float32(0)
            for e in T.serial(size):
                largest[0] = T.max(largest[0], T.abs(T.cast(source[token, head, e], "float32")))
            largest[0] = T.max(largest[0] * T.float32(1 / 448), T.float32(1e-6))
            scales[slot[0] // page, slot[0] % page, head] = largest[0]
            for e in T.serial(size):
                codes[slot[0] // page, slot[0] % page, head, e] = cut_to_e4m3(
                    T.cast(source[token, head, e], "float32") * (T.float32(1) / largest[0])
                )


@cache
def kernel_for(heads: int, size: int, page: int):
    kernel = append.specialize(heads=heads, size=size, page=page)
    return tvm.compile(tvm.IRModule({"main": kernel}), target="llvm")["main"]


def solve(
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    k_scale_cache: torch.Tensor,
    v_scale_cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    kernel = kernel_for(key.shape[1], key.shape[2], key_cache.shape[1])
    kernel(key, slot_mapping, key_cache, k_scale_cache)
    kernel(value, slot_mapping, value_cache, v_scale_cache)
    return key_cache, value_cache, k_scale_cache, v_scale_cache
