"""p59, NVFP4 projection with a float32 result, in CuTe DSL. The product stays with eager PyTorch.

An E2M1 code times its E4M3 block scale has at most six significant bits, so it is exact in bfloat16. After the search
for the largest magnitude, kernels turn hidden states and codes into such products, 8 values a thread, and torch.mm sums
them in float32; the last kernel applies both global scales in place. The quantiser follows the prescribed roundings.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

BLOCK = 16
VECTOR = 8  # bfloat16 values in 16 bytes, and codes in 4
QUAD = 4  # float32 values in 16 bytes
THREADS = 256
UNROLL = 4  # vectors that a thread has at a time
PARTS = 1024  # thread blocks that share the search for a maximum
LARGEST_CODE = 6.0
LARGEST_SCALE = 448.0
LARGEST_FLOAT = 3.4028234663852886e38


@cute.jit
def largest_magnitude(x: cute.Tensor) -> cutlass.Float32:
    values = x.load().to(cutlass.Float32)
    largest = cutlass.Float32(0.0)
    for e in cutlass.range_constexpr(cute.size(x)):
        largest = cute.arch.fmax(largest, cute.arch.fmax(values[e], -values[e]))
    return largest


@cute.jit
def block_maximum(value: cutlass.Float32, threads: cutlass.Constexpr[int]) -> cutlass.Float32:
    """The largest of a thread block's values."""
    thread, _, _ = cute.arch.thread_idx()
    warps = cutlass.const_expr(threads // cute.arch.WARP_SIZE)
    shared = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(warps), 16)
    value = cute.arch.warp_reduction_max(value)
    if thread % cute.arch.WARP_SIZE == 0:
        shared[thread // cute.arch.WARP_SIZE] = value
    cute.arch.sync_threads()
    for w in cutlass.range_constexpr(warps):
        value = cute.arch.fmax(value, shared[w])
    return value


@cute.jit
def to_e4m3(x: cutlass.Float32) -> cutlass.Float32:
    """The E4M3 value nearest to x, a number in 0 … 448; a tie goes to the even one."""
    bits = x.bitcast(cutlass.Uint32)
    value = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & cutlass.Uint32(0xFFF00000)).bitcast(cutlass.Float32)
    # Below 2^-6 the grid has the constant step 2^-9, which is the step of float32 at 2^14.
    if bits < 0x3C800000:
        value = ((x + 16384.0).bitcast(cutlass.Uint32) & 0xFF).to(cutlass.Float32) * (2**-9)
    return value


@cute.jit
def to_e2m1(y: cutlass.Float32) -> cutlass.Float32:
    """The E2M1 value nearest to y, a number in ±6; a tie goes to the even one."""
    magnitude = cute.arch.fmax(y, -y)
    # float32 has E2M1's step there: 0.5 below 2, 1 below 4, and 2 above.
    shift = cutlass.Float32(1.5 * 2**24)
    if magnitude < 4.0:
        shift = cutlass.Float32(1.5 * 2**23)
    if magnitude < 2.0:
        shift = cutlass.Float32(1.5 * 2**22)
    return (y + shift) - shift


@cute.kernel
def maximum_kernel(source: cute.Tensor, partial: cute.Tensor):
    """Each thread block's share of max|source|."""
    thread, _, _ = cute.arch.thread_idx()
    part, _, _ = cute.arch.block_idx()
    x = cute.make_rmem_tensor((VECTOR, UNROLL), cutlass.BFloat16)
    largest = cutlass.Float32(0.0)
    stretch = cutlass.const_expr(THREADS * UNROLL)
    for first in cutlass.range(part * stretch + thread, source.shape[0], PARTS * stretch):
        x.fill(0.0)
        for u in cutlass.range_constexpr(UNROLL):
            if first + u * THREADS < source.shape[0]:
                cute.autovec_copy(source[first + u * THREADS, None], x[None, u])
        largest = cute.arch.fmax(largest, largest_magnitude(x))
    largest = block_maximum(largest, THREADS)
    if thread == 0:
        partial[part] = largest


@cute.kernel
def encode_kernel(partial: cute.Tensor, scales: cute.Tensor):
    """The global scales of a tensor: what it is multiplied with, so that its largest element becomes 448 · 6, and one
    over that."""
    thread, _, _ = cute.arch.thread_idx()
    largest = block_maximum(partial[thread], PARTS)
    if thread == 0:
        encode = cute.arch.fmin(cutlass.Float32(LARGEST_SCALE * LARGEST_CODE) / largest, cutlass.Float32(LARGEST_FLOAT))
        scales[0] = encode
        scales[1] = cutlass.Float32(1.0) / encode


@cute.jit
def quantise(x: cute.Tensor, encode: cutlass.Float32, decode: cutlass.Float32):
    """Replace 8 values, half a block, by their codes times the scale of the block."""
    largest = largest_magnitude(x)
    largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=1))
    scale = largest / cutlass.Float32(LARGEST_CODE)
    scale = to_e4m3(cute.arch.fmin(scale * encode, cutlass.Float32(LARGEST_SCALE)))
    inverse = cute.arch.fmin(cutlass.Float32(1.0) / (scale * decode), cutlass.Float32(LARGEST_FLOAT))
    values = x.load().to(cutlass.Float32)
    rounded = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    for e in cutlass.range_constexpr(VECTOR):
        y = cute.arch.fmin(values[e] * inverse, cutlass.Float32(LARGEST_CODE))
        rounded[e] = to_e2m1(cute.arch.fmax(y, cutlass.Float32(-LARGEST_CODE)))
    x.store((rounded.load() * scale).to(cutlass.BFloat16))


@cute.kernel
def quantise_kernel(source: cute.Tensor, scales: cute.Tensor, target: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    group, _, _ = cute.arch.block_idx()
    first = group * (THREADS * UNROLL) + thread
    x = cute.make_rmem_tensor((VECTOR, UNROLL), cutlass.BFloat16)
    x.fill(0.0)
    for u in cutlass.range_constexpr(UNROLL):
        if first + u * THREADS < source.shape[0]:
            cute.autovec_copy(source[first + u * THREADS, None], x[None, u])
    encode, decode = scales[0], scales[1]
    for u in cutlass.range_constexpr(UNROLL):
        quantise(x[None, u], encode, decode)
    for u in cutlass.range_constexpr(UNROLL):
        if first + u * THREADS < source.shape[0]:
            cute.autovec_copy(x[None, u], target[first + u * THREADS, None])


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
def finish_kernel(product: cute.Tensor, scales: cute.Tensor, weight_global: cutlass.Float32):
    """In place; 4 values (16 bytes) a thread at a time."""
    thread, _, _ = cute.arch.thread_idx()
    group, _, _ = cute.arch.block_idx()
    first = group * (THREADS * UNROLL) + thread
    x = cute.make_rmem_tensor((QUAD, UNROLL), cutlass.Float32)
    x.fill(0.0)
    for u in cutlass.range_constexpr(UNROLL):
        if first + u * THREADS < product.shape[0]:
            cute.autovec_copy(product[first + u * THREADS, None], x[None, u])
    x.store(x.load() * (scales[1] * weight_global))
    for u in cutlass.range_constexpr(UNROLL):
        if first + u * THREADS < product.shape[0]:
            cute.autovec_copy(x[None, u], product[first + u * THREADS, None])


@cute.jit
def operands(
    tokens: cute.Tensor,
    partial: cute.Tensor,
    scales: cute.Tensor,
    new_tokens: cute.Tensor,
    codes: cute.Tensor,
    weight_scales: cute.Tensor,
    weight: cute.Tensor,
    stream,
):
    stretch = cutlass.const_expr(THREADS * UNROLL)
    maximum_kernel(tokens, partial).launch(grid=(PARTS, 1, 1), block=(THREADS, 1, 1), stream=stream)
    encode_kernel(partial, scales).launch(grid=(1, 1, 1), block=(PARTS, 1, 1), stream=stream)
    quantise_kernel(tokens, scales, new_tokens).launch(
        grid=(cute.ceil_div(tokens.shape[0], stretch), 1, 1), block=(THREADS, 1, 1), stream=stream
    )
    dequantise_kernel(codes, weight_scales, weight).launch(
        grid=(cute.ceil_div(weight.shape[0], stretch), 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.jit
def finish(product: cute.Tensor, scales: cute.Tensor, weight_global: cutlass.Float32, stream):
    finish_kernel(product, scales, weight_global).launch(
        grid=(cute.ceil_div(product.shape[0], THREADS * UNROLL), 1, 1), block=(THREADS, 1, 1), stream=stream
    )


def compile_for(arch: str):
    """The two functions for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    vectors, words, blocks, quads = (cute.sym_int() for _ in range(4))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {arch}"

    def fake(dtype, *shape, align: int = 16):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

    first = cute.compile(
        operands,
        fake(cutlass.BFloat16, vectors, VECTOR),
        fake(cutlass.Float32, PARTS),
        fake(cutlass.Float32, 2),
        fake(cutlass.BFloat16, vectors, VECTOR),
        fake(cutlass.Int32, words, align=4),
        fake(cutlass.Uint8, blocks, align=1),
        fake(cutlass.BFloat16, words, VECTOR),
        stream,
        options=options,
    )
    product, scales = fake(cutlass.Float32, quads, QUAD), fake(cutlass.Float32, 2)
    return first, cute.compile(finish, product, scales, cutlass.Float32(0.0), stream, options=options)


@cache
def kernels_for(device: torch.device):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a")


def solve(
    hidden_states: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, weight_global: float
) -> torch.Tensor:
    make_operands, apply_scales = kernels_for(hidden_states.device)
    tokens = torch.empty_like(hidden_states)
    values = tokens.new_empty(len(weight), tokens.shape[1])
    numbers = torch.empty(PARTS + 4, dtype=torch.float32, device=tokens.device)
    scales = numbers[PARTS : PARTS + 2]
    make_operands(
        *(hidden_states.view(-1, VECTOR), numbers[:PARTS], scales, tokens.view(-1, VECTOR)),
        *(weight.view(torch.uint8).view(-1).view(torch.int32), weight_scale.view(torch.uint8).view(-1)),
        values.view(-1, VECTOR),
    )
    product = torch.mm(tokens, values.t(), out_dtype=torch.float32)
    apply_scales(product.view(-1, QUAD), scales, weight_global)
    return product
