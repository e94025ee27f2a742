"""Correct, and slow: every output channel computes all the scores of its head again."""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

LOG2_E = 1.4426950408889634


@T.jit
def decode(
    qh: T.handle,
    kh: T.handle,
    vh: T.handle,
    po: T.handle,
    pi: T.handle,
    ll: T.handle,
    scale: T.float32,
    o: T.handle,
    le: T.handle,
    *,
    heads: T.constexpr,
    kv_heads: T.constexpr,
    size: T.constexpr,
    page: T.constexpr,
):
    sequences = T.int32()
    pool = T.int32()
    listed = T.int32()
    q = T.match_buffer(qh, (sequences, heads, size), "bfloat16")
    k_cache = T.match_buffer(kh, (pool, page, kv_heads, size), "bfloat16")
    v_cache = T.match_buffer(vh, (pool, page, kv_heads, size), "bfloat16")
    page_offsets = T.match_buffer(po, (sequences + 1,), "int32")
    pages = T.match_buffer(pi, (listed,), "int32")
    last_lengths = T.match_buffer(ll, (sequences,), "int32")
    out = T.match_buffer(o, (sequences, heads, size), "bfloat16")
    lse = T.match_buffer(le, (sequences, heads), "float32")
    total = T.alloc_buffer((1,), "float32", scope="local")
    weight = T.alloc_buffer((1,), "float32", scope="local")
    highest = T.alloc_buffer((1,), "float32", scope="local")
    logit = T.alloc_buffer((1,), "float32", scope="local")
    shrink = T.alloc_buffer((1,), "float32", scope="local")
    place = T.alloc_buffer((1,), "int32", scope="local")
    length = T.alloc_buffer((1,), "int32", scope="local")
    for b, h, channel in T.grid(sequences, heads, size):
        highest[0] = T.float32(-3.0e38)
        weight[0] = T.float32(0)
        total[0] = T.float32(0)
        length[0] = (page_offsets[b + 1] - page_offsets[b] - 1) * page + last_lengths[b]
        for t in T.serial(length[0]):
            place[0] = pages[page_offsets[b] + t // page]
            logit[0] = T.float32(0)
            for c in T.serial(size):
                logit[0] = logit[0] + T.cast(q[b, h, c], "float32") * T.cast(
                    k_cache[place[0], t % page, h // (heads // kv_heads), c], "float32"
                )
            logit[0] = logit[0] * scale
            shrink[0] = T.exp(highest[0] - T.max(highest[0], logit[0]))
            highest[0] = T.max(highest[0], logit[0])
            logit[0] = T.exp(logit[0] - highest[0])
            weight[0] = weight[0] * shrink[0] + logit[0]
            total[0] = total[0] * shrink[0] + logit[0] * T.cast(
                v_cache[place[0], t % page, h // (heads // kv_heads), channel], "float32"
            )
        out[b, h, channel] = T.cast(total[0] / weight[0], "bfloat16")
        lse[b, h] = (highest[0] + T.log(weight[0])) * T.float32(LOG2_E)


@cache
def kernel_for(heads: int, kv_heads: int, size: int, page: int):
    kernel = decode.specialize(heads=heads, kv_heads=kv_heads, size=size, page=page)
    return tvm.compile(tvm.IRModule({"main": kernel}), target="llvm")["main"]


def solve(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    output = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32)
    kernel = kernel_for(q.shape[1], k_cache.shape[2], q.shape[2], k_cache.shape[1])
    kernel(q, k_cache, v_cache, kv_indptr, kv_indices, kv_last_page_len, sm_scale, output, lse)
    return output, lse
