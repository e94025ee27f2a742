"""p60, product of two NVFP4 operands, in CuTe DSL. The product stays with eager PyTorch.

An E2M1 code times its E4M3 block scale has at most six significant bits, so it is exact in bfloat16. A kernel turns the
codes of either operand into such products, 8 values a thread, torch.mm sums theirs in float32, and another kernel
applies both global scales in place.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

VECTOR = 8  # bfloat16 values in 16 bytes, and codes in 4
QUAD = 4  # float32 values in 16 bytes
THREADS = 256
UNROLL = 4  # vectors that a thread has at a time


@cute.jit
def dequantise(word: cutlass.Int32, scale_byte: cutlass.Uint8, x: cute.Tensor):
    """8 codes times their scale. E2M1's bits are the top bits of a float16 that is 2^14 times smaller."""
    digits = scale_byte.to(cutlass.Uint32)
    scale = ((digits << 20) + (120 << 23)).bitcast(cutlass.Float32)
    if digits < 8:
        scale = digits.to(cutlass.Float32) * (2**-9)
    codes = word.bitcast(cutlass.Uint32)
    pairs = cute.make_rmem_tensor(VECTOR // 2, cutlass.Uint32)
    for p in cutlass.range_constexpr(VECTOR // 2):
        pair = codes >> (8 * p)
        pairs[p] = ((pair & 7) << 9) | ((pair & 8) << 12) | ((pair & 0x70) << 21) | ((pair & 0x80) << 24)
    values = cute.recast_tensor(pairs, cutlass.Float16).load().to(cutlass.Float32)
    x.store((values * (scale * 2**14)).to(cutlass.BFloat16))


@cute.kernel
def dequantise_kernel(codes: cute.Tensor, scales: cute.Tensor, target: cute.Tensor):
    """Codes come 8 in a word, two words for a scale."""
    thread, _, _ = cute.arch.thread_idx()
    group, _, _ = cute.arch.block_idx()
    first = group * (THREADS * UNROLL) + thread
    x = cute.make_rmem_tensor((VECTOR, UNROLL), cutlass.BFloat16)
    words = cute.make_rmem_tensor(UNROLL, cutlass.Int32)
    scale_bytes = cute.make_rmem_tensor(UNROLL, cutlass.Uint8)
    words.fill(0)
    scale_bytes.fill(0)
    for u in cutlass.range_constexpr(UNROLL):
        place = first + u * THREADS
        if place < target.shape[0]:
            words[u] = codes[place]
            scale_bytes[u] = scales[place // 2]
    for u in cutlass.range_constexpr(UNROLL):
        dequantise(words[u], scale_bytes[u], x[None, u])
        if first + u * THREADS < target.shape[0]:
            cute.autovec_copy(x[None, u], target[first + u * THREADS, None])


@cute.kernel
def finish_kernel(product: cute.Tensor, a_global: cute.Tensor, b_global: cute.Tensor):
    """In place; 4 values (16 bytes) a thread at a time."""
    thread, _, _ = cute.arch.thread_idx()
    group, _, _ = cute.arch.block_idx()
    first = group * (THREADS * UNROLL) + thread
    x = cute.make_rmem_tensor((QUAD, UNROLL), cutlass.Float32)
    x.fill(0.0)
    for u in cutlass.range_constexpr(UNROLL):
        if first + u * THREADS < product.shape[0]:
            cute.autovec_copy(product[first + u * THREADS, None], x[None, u])
    x.store(x.load() * (a_global[0] * b_global[0]))
    for u in cutlass.range_constexpr(UNROLL):
        if first + u * THREADS < product.shape[0]:
            cute.autovec_copy(x[None, u], product[first + u * THREADS, None])


@cute.jit
def operands(
    a_codes: cute.Tensor,
    a_scales: cute.Tensor,
    a: cute.Tensor,
    b_codes: cute.Tensor,
    b_scales: cute.Tensor,
    b: cute.Tensor,
    stream,
):
    stretch = cutlass.const_expr(THREADS * UNROLL)
    dequantise_kernel(a_codes, a_scales, a).launch(
        grid=(cute.ceil_div(a.shape[0], stretch), 1, 1), block=(THREADS, 1, 1), stream=stream
    )
    dequantise_kernel(b_codes, b_scales, b).launch(
        grid=(cute.ceil_div(b.shape[0], stretch), 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.jit
def finish(product: cute.Tensor, a_global: cute.Tensor, b_global: cute.Tensor, stream):
    finish_kernel(product, a_global, b_global).launch(
        grid=(cute.ceil_div(product.shape[0], THREADS * UNROLL), 1, 1), block=(THREADS, 1, 1), stream=stream
    )


def compile_for(arch: str):
    """The two functions for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {arch}"

    def fake(dtype, *shape, align: int = 16):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

    def operand():
        words, blocks = cute.sym_int(), cute.sym_int()
        codes, scales = fake(cutlass.Int32, words, align=4), fake(cutlass.Uint8, blocks, align=1)
        return codes, scales, fake(cutlass.BFloat16, words, VECTOR)

    numbers = [fake(cutlass.Float32, 1, align=4) for _ in "ab"]
    product = fake(cutlass.Float32, cute.sym_int(), QUAD)
    return (
        cute.compile(operands, *operand(), *operand(), stream, options=options),
        cute.compile(finish, product, *numbers, stream, options=options),
    )


@cache
def kernels_for(device: torch.device):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a")


def raw(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return codes.view(torch.uint8).view(-1).view(torch.int32), scales.view(torch.uint8).view(-1)


def solve(
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor,
    global_decode_scale_input: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    global_decode_scale_weight: torch.Tensor,
) -> torch.Tensor:
    make_operands, apply_scales = kernels_for(weight.device)
    a, b = (
        torch.empty(codes.shape[1], 2 * codes.shape[2], dtype=torch.bfloat16, device=codes.device)
        for codes in (hidden_states, weight)
    )
    make_operands(
        *(*raw(hidden_states, hidden_states_scale), a.view(-1, VECTOR)),
        *(*raw(weight, weight_scale), b.view(-1, VECTOR)),
    )
    product = torch.mm(a, b.t(), out_dtype=torch.float32)
    numbers = global_decode_scale_input.view(1), global_decode_scale_weight.view(1)
    apply_scales(product.view(-1, QUAD), *numbers)
    return product.unsqueeze(0)
