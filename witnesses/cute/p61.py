"""p61, NVFP4 feed-forward block, in CuTe DSL. The products stay with eager PyTorch, in bfloat16.

Operands are replaced by what their NVFP4 codes and scales stand for, rounded to bfloat16, 8 values a thread; an
activation's largest magnitude is found before. One product serves gate and up projection; a kernel gates its one half
by the other and notes each thread block's largest magnitude, and the result is quantised.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

BLOCK = 16
VECTOR = 8  # bfloat16 values in 16 bytes, and codes in 4
THREADS = 256
UNROLL = 4  # vectors that a thread has at a time
GATED = 3  # the same in the gating kernel, each twice
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
    """Replace 8 values, half a block, by what their codes and scales stand for, rounded to bfloat16."""
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
    x.store((rounded.load() * (scale * decode)).to(cutlass.BFloat16))


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
def dequantise(word: cutlass.Int32, scale_byte: cutlass.Uint8, factor: cutlass.Float32, x: cute.Tensor):
    """The values of 8 codes. The bits of an E2M1 number are the top bits of a float16 that is 2^14 times smaller."""
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
    x.store((values * (scale * 2**14 * factor)).to(cutlass.BFloat16))


@cute.kernel
def dequantise_kernel(codes: cute.Tensor, scales: cute.Tensor, factor: cutlass.Float32, target: cute.Tensor):
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
        dequantise(words[u], scale_bytes[u], factor, x[None, u])
        if first + u * THREADS < target.shape[0]:
            cute.autovec_copy(x[None, u], target[first + u * THREADS, None])


@cute.kernel
def gate_kernel(both: cute.Tensor, out: cute.Tensor, partial: cute.Tensor):
    """A row of `both` holds the gate's part, then the other. Every PARTS-th row belongs to a thread block."""
    thread, _, _ = cute.arch.thread_idx()
    part, _, _ = cute.arch.block_idx()
    vectors = cutlass.const_expr(out.shape[1] // VECTOR)
    steps = cutlass.const_expr((vectors + THREADS * GATED - 1) // (THREADS * GATED))
    gate = cute.make_rmem_tensor((VECTOR, GATED), cutlass.BFloat16)
    up = cute.make_rmem_tensor((VECTOR, GATED), cutlass.BFloat16)
    largest = cutlass.Float32(0.0)
    for row in cutlass.range(part, out.shape[0], PARTS):
        for step in cutlass.range_constexpr(steps):
            gate.fill(0.0)
            up.fill(0.0)
            for u in cutlass.range_constexpr(GATED):
                place = (step * GATED + u) * THREADS + thread
                if place < vectors:
                    cute.autovec_copy(cute.local_tile(both[row, None], (VECTOR,), (place,)), gate[None, u])
                    cute.autovec_copy(cute.local_tile(both[row, None], (VECTOR,), (vectors + place,)), up[None, u])
            g = gate.load().to(cutlass.Float32)
            gate.store((g / (1.0 + cute.math.exp(-g)) * up.load().to(cutlass.Float32)).to(cutlass.BFloat16))
            largest = cute.arch.fmax(largest, largest_magnitude(gate))
            for u in cutlass.range_constexpr(GATED):
                place = (step * GATED + u) * THREADS + thread
                if place < vectors:
                    cute.autovec_copy(gate[None, u], cute.local_tile(out[row, None], (VECTOR,), (place,)))
    largest = block_maximum(largest, THREADS)
    if thread == 0:
        partial[part] = largest


@cute.jit
def dequantise_weight(codes: cute.Tensor, scales: cute.Tensor, factor: cutlass.Float32, target: cute.Tensor, stream):
    dequantise_kernel(codes, scales, factor, target).launch(
        grid=(cute.ceil_div(target.shape[0], THREADS * UNROLL), 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.jit
def encode_and_quantise(source: cute.Tensor, partial: cute.Tensor, scales: cute.Tensor, target: cute.Tensor, stream):
    encode_kernel(partial, scales).launch(grid=(1, 1, 1), block=(PARTS, 1, 1), stream=stream)
    quantise_kernel(source, scales, target).launch(
        grid=(cute.ceil_div(source.shape[0], THREADS * UNROLL), 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.jit
def operands(
    tokens: cute.Tensor,
    partial: cute.Tensor,
    scales: cute.Tensor,
    new_tokens: cute.Tensor,
    gate_codes: cute.Tensor,
    gate_scales: cute.Tensor,
    gate_global: cutlass.Float32,
    gate: cute.Tensor,
    up_codes: cute.Tensor,
    up_scales: cute.Tensor,
    up_global: cutlass.Float32,
    up: cute.Tensor,
    down_codes: cute.Tensor,
    down_scales: cute.Tensor,
    down_global: cutlass.Float32,
    down: cute.Tensor,
    stream,
):
    maximum_kernel(tokens, partial).launch(grid=(PARTS, 1, 1), block=(THREADS, 1, 1), stream=stream)
    encode_and_quantise(tokens, partial, scales, new_tokens, stream)
    dequantise_weight(gate_codes, gate_scales, gate_global, gate, stream)
    dequantise_weight(up_codes, up_scales, up_global, up, stream)
    dequantise_weight(down_codes, down_scales, down_global, down, stream)


@cute.jit
def gate_and_quantise(
    both: cute.Tensor,
    hidden: cute.Tensor,
    hidden_vectors: cute.Tensor,
    partial: cute.Tensor,
    scales: cute.Tensor,
    new_hidden_vectors: cute.Tensor,
    stream,
):
    """`hidden` comes twice, in rows and in vectors."""
    gate_kernel(both, hidden, partial).launch(grid=(PARTS, 1, 1), block=(THREADS, 1, 1), stream=stream)
    encode_and_quantise(hidden_vectors, partial, scales, new_hidden_vectors, stream)


def compile_for(arch: str, intermediate: int = 12288):
    """The two functions for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    vectors, rows, hidden_vectors = (cute.sym_int() for _ in range(3))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {arch}"

    def fake(dtype, *shape, align: int = 16):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

    def weight():
        words, blocks = cute.sym_int(), cute.sym_int()
        codes, scales = fake(cutlass.Int32, words, align=4), fake(cutlass.Uint8, blocks, align=1)
        return codes, scales, cutlass.Float32(0.0), fake(cutlass.BFloat16, words, VECTOR)

    numbers = fake(cutlass.Float32, PARTS), fake(cutlass.Float32, 2)
    tokens = [fake(cutlass.BFloat16, vectors, VECTOR) for _ in "st"]
    weights = [part for _ in "gud" for part in weight()]
    both, hidden = (fake(cutlass.BFloat16, rows, width) for width in (2 * intermediate, intermediate))
    again = [fake(cutlass.BFloat16, hidden_vectors, VECTOR) for _ in "st"]
    return (
        cute.compile(operands, tokens[0], *numbers, tokens[1], *weights, stream, options=options),
        cute.compile(gate_and_quantise, both, hidden, again[0], *numbers, again[1], stream, options=options),
    )


@cache
def kernels_for(device: torch.device, intermediate: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", intermediate)


def raw(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return codes.view(torch.uint8).view(-1).view(torch.int32), scales.view(torch.uint8).view(-1)


def solve(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    gate_block_scales: torch.Tensor,
    gate_global_scale: float,
    up_weight: torch.Tensor,
    up_block_scales: torch.Tensor,
    up_global_scale: float,
    down_weight: torch.Tensor,
    down_block_scales: torch.Tensor,
    down_global_scale: float,
) -> torch.Tensor:
    width, intermediate = down_weight.shape[1], gate_weight.shape[1]
    make_operands, gate_and_requantise = kernels_for(x.device, intermediate)
    tokens = torch.empty_like(x).view(-1, width)
    weights, down = x.new_empty(2, intermediate, width), x.new_empty(width, intermediate)
    numbers = torch.empty(PARTS + 4, dtype=torch.float32, device=x.device)
    partial, scales = numbers[:PARTS], numbers[PARTS : PARTS + 2]
    make_operands(
        *(x.view(-1, VECTOR), partial, scales, tokens.view(-1, VECTOR)),
        *(*raw(gate_weight, gate_block_scales), gate_global_scale, weights[0].view(-1, VECTOR)),
        *(*raw(up_weight, up_block_scales), up_global_scale, weights[1].view(-1, VECTOR)),
        *(*raw(down_weight, down_block_scales), down_global_scale, down.view(-1, VECTOR)),
    )
    both = torch.mm(tokens, weights.view(-1, width).t())
    hidden, new_hidden = both.new_empty(2, len(both), intermediate)
    gate_and_requantise(both, hidden, hidden.view(-1, VECTOR), partial, scales, new_hidden.view(-1, VECTOR))
    return torch.mm(new_hidden, down.t()).view(x.shape)
