"""p55, embeddings with projected vision features, in CuTe DSL. The product stays with eager PyTorch, in bfloat16.

The features' largest magnitude gives their global scale; then features and weight are replaced by what their NVFP4
codes and scales stand for, rounded to bfloat16, 8 values a thread. In the last kernel a thread block has a position:
its warps count the masked positions before it and fetch the row of the product, or else that of the table.
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
def assemble_kernel(
    ids: cute.Tensor,
    mask: cute.Tensor,
    table: cute.Tensor,
    projected: cute.Tensor,
    bias: cute.Tensor,
    out: cute.Tensor,
):
    thread, _, _ = cute.arch.thread_idx()
    position, sequence, _ = cute.arch.block_idx()
    vectors = cutlass.const_expr(out.shape[2] // VECTOR)
    passes = cutlass.const_expr((vectors + THREADS - 1) // THREADS)
    assert mask.shape[1] % cute.arch.WARP_SIZE == 0
    share = cutlass.const_expr(mask.shape[1] // cute.arch.WARP_SIZE)  # positions of a lane
    x = cute.make_rmem_tensor((VECTOR, passes), cutlass.BFloat16)
    b = cute.make_rmem_tensor((VECTOR, passes), cutlass.BFloat16)
    x.fill(0.0)
    b.fill(0.0)
    rank = cutlass.Int32(projected.shape[1])
    if mask[sequence, position] != 0:  # alike for the thread block
        lane = thread % cute.arch.WARP_SIZE
        masked = cute.make_rmem_tensor(share, cutlass.Uint8)
        cute.autovec_copy(cute.local_tile(mask[sequence, None], (share,), (lane,)), masked)
        before = cutlass.Int32(0)
        for e in cutlass.range_constexpr(share):
            if lane * share + e < position:
                before += masked[e].to(cutlass.Int32)
        rank = cute.arch.warp_redux_sync(before, kind="add")
    if rank < projected.shape[1]:
        for p in cutlass.range_constexpr(passes):
            place = p * THREADS + thread
            if place < vectors:
                cute.autovec_copy(cute.local_tile(projected[sequence, rank, None], (VECTOR,), (place,)), x[None, p])
                cute.autovec_copy(cute.local_tile(bias, (VECTOR,), (place,)), b[None, p])
        x.store((x.load().to(cutlass.Float32) + b.load().to(cutlass.Float32)).to(cutlass.BFloat16))
    else:
        id = ids[sequence, position]
        for p in cutlass.range_constexpr(passes):
            place = p * THREADS + thread
            if place < vectors:
                cute.autovec_copy(cute.local_tile(table[id, None], (VECTOR,), (place,)), x[None, p])
    for p in cutlass.range_constexpr(passes):
        place = p * THREADS + thread
        if place < vectors:
            cute.autovec_copy(x[None, p], cute.local_tile(out[sequence, position, None], (VECTOR,), (place,)))


@cute.jit
def operands(
    features: cute.Tensor,
    partial: cute.Tensor,
    scales: cute.Tensor,
    new_features: cute.Tensor,
    codes: cute.Tensor,
    weight_scales: cute.Tensor,
    weight_global: cutlass.Float32,
    weight: cute.Tensor,
    stream,
):
    stretch = cutlass.const_expr(THREADS * UNROLL)
    maximum_kernel(features, partial).launch(grid=(PARTS, 1, 1), block=(THREADS, 1, 1), stream=stream)
    encode_kernel(partial, scales).launch(grid=(1, 1, 1), block=(PARTS, 1, 1), stream=stream)
    quantise_kernel(features, scales, new_features).launch(
        grid=(cute.ceil_div(features.shape[0], stretch), 1, 1), block=(THREADS, 1, 1), stream=stream
    )
    dequantise_kernel(codes, weight_scales, weight_global, weight).launch(
        grid=(cute.ceil_div(weight.shape[0], stretch), 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.jit
def assemble(
    ids: cute.Tensor,
    mask: cute.Tensor,
    table: cute.Tensor,
    projected: cute.Tensor,
    bias: cute.Tensor,
    out: cute.Tensor,
    stream,
):
    assemble_kernel(ids, mask, table, projected, bias, out).launch(
        grid=(out.shape[1], out.shape[0], 1), block=(THREADS, 1, 1), stream=stream
    )


def compile_for(arch: str, sequence: int = 1024, hidden: int = 8192):
    """The two functions for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    vectors, words, blocks, batch, vocabulary, vision_tokens = (cute.sym_int() for _ in range(6))
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
        cutlass.Float32(0.0),
        fake(cutlass.BFloat16, words, VECTOR),
        stream,
        options=options,
    )
    second = cute.compile(
        assemble,
        fake(cutlass.Int64, batch, sequence, align=8),
        fake(cutlass.Uint8, batch, sequence),
        fake(cutlass.BFloat16, vocabulary, hidden),
        fake(cutlass.BFloat16, batch, vision_tokens, hidden),
        fake(cutlass.BFloat16, hidden),
        fake(cutlass.BFloat16, batch, sequence, hidden),
        stream,
        options=options,
    )
    return first, second


@cache
def kernels_for(device: torch.device, sequence: int, hidden: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", sequence, hidden)


def solve(
    input_ids: torch.Tensor,
    embed_weight: torch.Tensor,
    vision_features: torch.Tensor,
    vision_proj_weight: torch.Tensor,
    vision_proj_scale: torch.Tensor,
    vision_proj_global: float,
    vision_proj_bias: torch.Tensor,
    vision_token_mask: torch.Tensor,
) -> torch.Tensor:
    (batch, sequence), hidden, width = input_ids.shape, embed_weight.shape[1], vision_features.shape[2]
    make_operands, assemble_rows = kernels_for(input_ids.device, sequence, hidden)
    features = torch.empty_like(vision_features)
    weight = features.new_empty(hidden, width)
    numbers = torch.empty(PARTS + 4, dtype=torch.float32, device=features.device)
    make_operands(
        *(vision_features.view(-1, VECTOR), numbers[:PARTS], numbers[PARTS : PARTS + 2], features.view(-1, VECTOR)),
        *(
            vision_proj_weight.view(torch.uint8).view(-1).view(torch.int32),
            vision_proj_scale.view(torch.uint8).view(-1),
        ),
        *(vision_proj_global, weight.view(-1, VECTOR)),
    )
    projected = torch.mm(features.view(-1, width), weight.t()).view(batch, -1, hidden)
    out = features.new_empty(batch, sequence, hidden)
    mask = vision_token_mask.view(torch.uint8)
    assemble_rows(input_ids, mask, embed_weight, projected, vision_proj_bias, out)
    return out
