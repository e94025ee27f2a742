"""p25, copying whole cache pages, in TIRx.

CUDA: a thread block copies a part of one page of one pool, a thread four times 16 bytes, all read before the first is
written. CPU: plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

VECTOR = 16
THREADS = 256
DEPTH = 4  # vectors in flight in each thread


@T.jit
def copy_cuda(
    sk: T.handle,
    sv: T.handle,
    tk: T.handle,
    tv: T.handle,
    pm: T.handle,
    *,
    page_bytes: T.constexpr,
    parts: T.constexpr,
):
    pages = T.int32()
    pairs = T.int32()
    source_k = T.match_buffer(sk, (pages, page_bytes), "uint8")
    source_v = T.match_buffer(sv, (pages, page_bytes), "uint8")
    target_k = T.match_buffer(tk, (pages, page_bytes), "uint8")
    target_v = T.match_buffer(tv, (pages, page_bytes), "uint8")
    mapping = T.match_buffer(pm, (pairs, 2), "int64")
    T.device_entry()
    part, pair, which = T.cta_id([parts, pairs, 2])
    thread = T.thread_id([THREADS])
    x = T.alloc_local((DEPTH, VECTOR), "uint8")
    source = T.alloc_local((1,), "int32")
    target = T.alloc_local((1,), "int32")
    source[0] = T.cast(mapping[pair, 0], "int32")
    target[0] = T.cast(mapping[pair, 1], "int32")
    for d in T.unroll(DEPTH):
        if ((part * DEPTH + d) * THREADS + thread) * VECTOR < page_bytes:
            if which == 0:
                for e in T.vectorized(VECTOR):
                    x[d, e] = source_k[source[0], ((part * DEPTH + d) * THREADS + thread) * VECTOR + e]
            else:
                for e in T.vectorized(VECTOR):
                    x[d, e] = source_v[source[0], ((part * DEPTH + d) * THREADS + thread) * VECTOR + e]
    for d in T.unroll(DEPTH):
        if ((part * DEPTH + d) * THREADS + thread) * VECTOR < page_bytes:
            if which == 0:
                for e in T.vectorized(VECTOR):
                    target_k[target[0], ((part * DEPTH + d) * THREADS + thread) * VECTOR + e] = x[d, e]
            else:
                for e in T.vectorized(VECTOR):
                    target_v[target[0], ((part * DEPTH + d) * THREADS + thread) * VECTOR + e] = x[d, e]


@T.jit
def copy_cpu(s: T.handle, t: T.handle, pm: T.handle, *, page_bytes: T.constexpr):
    pages = T.int32()
    pairs = T.int32()
    source = T.match_buffer(s, (pages, page_bytes), "uint8")
    target = T.match_buffer(t, (pages, page_bytes), "uint8")
    mapping = T.match_buffer(pm, (pairs, 2), "int64")
    for pair, byte in T.grid(pairs, page_bytes):
        target[mapping[pair, 1], byte] = source[mapping[pair, 0], byte]


def compile_for(arch: str, page_bytes: int = 65536) -> tvm.runtime.Executable:
    """The kernel for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    if arch == "llvm":
        return tvm.compile(tvm.IRModule({"main": copy_cpu.specialize(page_bytes=page_bytes)}), target="llvm")
    assert page_bytes % VECTOR == 0
    parts = -(-page_bytes // (VECTOR * THREADS * DEPTH))
    kernel = copy_cuda.specialize(page_bytes=page_bytes, parts=parts)
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx")


@cache
def kernel_for(device: torch.device, page_bytes: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return compile_for(arch, page_bytes)["main"]


def solve(
    src_k: torch.Tensor, src_v: torch.Tensor, dst_k: torch.Tensor, dst_v: torch.Tensor, block_mapping: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    pools = [pool.flatten(1) for pool in (src_k, src_v, dst_k, dst_v)]
    kernel = kernel_for(src_k.device, pools[0].shape[1])
    if src_k.is_cuda:
        kernel(*pools, block_mapping)
    else:
        kernel(pools[0], pools[2], block_mapping)
        kernel(pools[1], pools[3], block_mapping)
    return dst_k, dst_v
