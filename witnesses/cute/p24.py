"""p24, gathering cache entries of mixed format, in CuTe DSL.

A thread block has one token. A thread turns 16 codes (16 bytes) into bfloat16 by their group's scale, or moves 16 bytes
of the positional values as they are. Which request a token belongs to is counted on the device; only their number must
reach the host.
"""

from functools import cache as cached

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

LATENT = 512
GROUP = 128  # latents that share a scale
ROTARY = 64
SCALES_END = LATENT + 4 * (LATENT // GROUP)
ENTRY_BYTES = SCALES_END + 2 * ROTARY
BYTES = 16  # that a thread reads
LATENT_THREADS = LATENT // BYTES
THREADS = LATENT_THREADS + 2 * ROTARY // BYTES


@cute.kernel
def gather_kernel(source: cute.Tensor, block_table: cute.Tensor, lengths: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    token, _, _ = cute.arch.block_idx()
    page = cutlass.const_expr(source.shape[1])
    request, first, start = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
    for r in cutlass.range(lengths.shape[0]):
        if token >= start:  # the last request for which this holds is the token's
            request = r
            first = start
        start += lengths[r]
    entry = source[block_table[request, (token - first) // page], (token - first) % page, None]
    raw = cute.make_rmem_tensor(BYTES, cutlass.Uint8)
    if thread < LATENT_THREADS:
        scale_bytes = cute.make_rmem_tensor(4, cutlass.Uint8)
        values = cute.make_rmem_tensor(BYTES, cutlass.BFloat16)
        group = LATENT // 4 + thread * BYTES // GROUP
        cute.autovec_copy(cute.local_tile(entry, (BYTES,), (thread,)), raw)
        cute.autovec_copy(cute.local_tile(entry, (4,), (group,)), scale_bytes)
        scale = cute.recast_tensor(scale_bytes, cutlass.Float32)[0]
        latents = cute.recast_tensor(raw, cutlass.Float8E4M3FN).load().to(cutlass.Float32)
        values.store((latents * scale).to(cutlass.BFloat16))
        cute.autovec_copy(values, cute.local_tile(out[token, None], (BYTES,), (thread,)))
    elif thread < THREADS:
        part = thread - LATENT_THREADS
        cute.autovec_copy(cute.local_tile(entry, (BYTES,), (SCALES_END // BYTES + part,)), raw)
        target = cute.local_tile(out[token, None], (BYTES // 2,), (LATENT // (BYTES // 2) + part,))
        cute.autovec_copy(cute.recast_tensor(raw, cutlass.BFloat16), target)


@cute.jit
def gather(source: cute.Tensor, block_table: cute.Tensor, lengths: cute.Tensor, out: cute.Tensor, stream):
    threads = cutlass.const_expr((THREADS + 31) // 32 * 32)
    gather_kernel(source, block_table, lengths, out).launch(
        grid=(out.shape[0], 1, 1), block=(threads, 1, 1), stream=stream
    )


def compile_for(arch: str, page: int = 64):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    pages, requests, listed, tokens = (cute.sym_int() for _ in range(4))

    def fake(dtype, *shape, align: int = 16):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

    return cute.compile(
        gather,
        fake(cutlass.Uint8, pages, page, ENTRY_BYTES),
        fake(cutlass.Int32, requests, listed, align=4),
        fake(cutlass.Int32, requests, align=4),
        fake(cutlass.BFloat16, tokens, LATENT + ROTARY),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cached
def kernel_for(device: torch.device, page: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", page)


def solve(cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    tokens = int(seq_lens.sum())  # the shape of the result is in the data
    out = torch.empty(tokens, LATENT + ROTARY, dtype=torch.bfloat16, device=cache.device)
    kernel_for(cache.device, cache.shape[1])(cache, block_table, seq_lens, out)
    return out
