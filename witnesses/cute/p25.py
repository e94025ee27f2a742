"""p25, copying whole cache pages, in CuTe DSL.

A thread block copies a part of one page of one pool, a thread four times 16 bytes, all read before the first is
written.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

VECTOR = 16  # bytes
THREADS = 256
DEPTH = 4  # vectors in flight in each thread


@cute.jit
def copy_part(source: cute.Tensor, target: cute.Tensor, part: cutlass.Int32):
    thread, _, _ = cute.arch.thread_idx()
    vectors = cutlass.const_expr(source.shape[0] // VECTOR)
    x = cute.make_rmem_tensor((VECTOR, DEPTH), cutlass.Uint8)
    for d in cutlass.range_constexpr(DEPTH):
        place = (part * DEPTH + d) * THREADS + thread
        if place < vectors:
            cute.autovec_copy(cute.local_tile(source, (VECTOR,), (place,)), x[None, d])
    for d in cutlass.range_constexpr(DEPTH):
        place = (part * DEPTH + d) * THREADS + thread
        if place < vectors:
            cute.autovec_copy(x[None, d], cute.local_tile(target, (VECTOR,), (place,)))


@cute.kernel
def copy_kernel(
    source_k: cute.Tensor, source_v: cute.Tensor, target_k: cute.Tensor, target_v: cute.Tensor, pairs: cute.Tensor
):
    part, pair, which = cute.arch.block_idx()
    source, target = pairs[pair, 0].to(cutlass.Int32), pairs[pair, 1].to(cutlass.Int32)
    if which == 0:
        copy_part(source_k[source, None], target_k[target, None], part)
    else:
        copy_part(source_v[source, None], target_v[target, None], part)


@cute.jit
def copy(
    source_k: cute.Tensor,
    source_v: cute.Tensor,
    target_k: cute.Tensor,
    target_v: cute.Tensor,
    pairs: cute.Tensor,
    stream,
):
    parts = cutlass.const_expr(-(-source_k.shape[1] // (VECTOR * THREADS * DEPTH)))
    copy_kernel(source_k, source_v, target_k, target_v, pairs).launch(
        grid=(parts, pairs.shape[0], 2), block=(THREADS, 1, 1), stream=stream
    )


def compile_for(arch: str, page_bytes: int = 65536):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert page_bytes % VECTOR == 0
    pages, pairs = cute.sym_int(), cute.sym_int()
    pools = [
        make_fake_compact_tensor(cutlass.Uint8, (pages, page_bytes), stride_order=(1, 0), assumed_align=16)
        for _ in range(4)
    ]
    mapping = make_fake_compact_tensor(cutlass.Int64, (pairs, 2), stride_order=(1, 0), assumed_align=8)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(copy, *pools, mapping, stream, options=f"--enable-tvm-ffi --gpu-arch {arch}")


@cache
def kernel_for(device: torch.device, page_bytes: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", page_bytes)


def solve(
    src_k: torch.Tensor, src_v: torch.Tensor, dst_k: torch.Tensor, dst_v: torch.Tensor, block_mapping: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    pools = [pool.flatten(1) for pool in (src_k, src_v, dst_k, dst_v)]
    kernel_for(src_k.device, pools[0].shape[1])(*pools, block_mapping)
    return dst_k, dst_v
