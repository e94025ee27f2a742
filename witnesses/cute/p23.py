"""p23, gathering FP8 cache entries of several requests, in CuTe DSL.

A thread block has one token, a thread 16 codes (16 bytes) and their 16 float32 values. Which request a token belongs to
is counted on the device; only their number must reach the host.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

CODES = 16  # in 16 bytes


@cute.kernel
def gather_kernel(
    source: cute.Tensor, block_table: cute.Tensor, lengths: cute.Tensor, scale: cutlass.Float32, out: cute.Tensor
):
    thread, _, _ = cute.arch.thread_idx()
    token, _, _ = cute.arch.block_idx()
    page = cutlass.const_expr(source.shape[1])
    request, first, start = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
    for r in cutlass.range(lengths.shape[0]):
        if token >= start:  # the last request for which this holds is the token's
            request = r
            first = start
        start += lengths[r]
    place = token - first
    if thread < cutlass.const_expr(source.shape[2] // CODES):
        raw = cute.make_rmem_tensor(CODES, cutlass.Uint8)
        values = cute.make_rmem_tensor(CODES, cutlass.Float32)
        entry = source[block_table[request, place // page], place % page, None]
        cute.autovec_copy(cute.local_tile(entry, (CODES,), (thread,)), raw)
        values.store(cute.recast_tensor(raw, cutlass.Float8E4M3FN).load().to(cutlass.Float32) * scale)
        cute.autovec_copy(values, cute.local_tile(out[token, None], (CODES,), (thread,)))


@cute.jit
def gather(
    source: cute.Tensor,
    block_table: cute.Tensor,
    lengths: cute.Tensor,
    scale: cutlass.Float32,
    out: cute.Tensor,
    stream,
):
    threads = cutlass.const_expr((source.shape[2] // CODES + 31) // 32 * 32)
    gather_kernel(source, block_table, lengths, scale, out).launch(
        grid=(out.shape[0], 1, 1), block=(threads, 1, 1), stream=stream
    )


def compile_for(arch: str, page: int = 16, entry: int = 576):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert entry % CODES == 0
    pages, requests, listed, tokens = (cute.sym_int() for _ in range(4))

    def fake(dtype, *shape, align: int = 16):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

    return cute.compile(
        gather,
        fake(cutlass.Uint8, pages, page, entry),
        fake(cutlass.Int32, requests, listed, align=4),
        fake(cutlass.Int32, requests, align=4),
        cutlass.Float32(0.0),
        fake(cutlass.Float32, tokens, entry),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, page: int, entry: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", page, entry)


def solve(src_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, scale: float) -> torch.Tensor:
    _, page, entry = src_cache.shape
    tokens = int(seq_lens.sum())  # the shape of the result is in the data
    out = torch.empty(tokens, entry, dtype=torch.float32, device=src_cache.device)
    kernel_for(src_cache.device, page, entry)(src_cache, block_table, seq_lens, scale, out)
    return out
