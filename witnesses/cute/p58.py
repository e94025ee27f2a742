"""p58, attention with NVFP4 operands, in CuTe DSL. The two products stay with eager PyTorch, in bfloat16.

An E2M1 code times its E4M3 block scale has at most six significant bits, so it is exact in bfloat16. After the search
for the largest magnitudes, kernels turn queries and keys into such products, 8 values a thread, and values into what
they stand for, in blocks of 16 positions that a thread has for 8 channels. The query heads of a KV head are further
rows of its products. The softmax kernel applies the global scales, writes the probabilities and, in the place of the
scores, their quantised form; the largest probability is 1, since the first position sees only itself.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

BLOCK = 16
VECTOR = 8  # bfloat16 values in 16 bytes
THREADS = 256
UNROLL = 4  # vectors that a thread has at a time
PARTS = 1024  # thread blocks that share the search for a maximum
LARGEST_CODE = 6.0
LARGEST_SCALE = 448.0
LARGEST_FLOAT = 3.4028234663852886e38
PROBABILITY_DECODE = 1 / (LARGEST_SCALE * LARGEST_CODE)
HIDDEN = -3.0e38  # the score of a key that may not be seen


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
    """The E2M1 value nearest to y, which saturates at ±6; a tie goes to the even one."""
    y = cute.arch.fmax(cute.arch.fmin(y, cutlass.Float32(LARGEST_CODE)), cutlass.Float32(-LARGEST_CODE))
    magnitude = cute.arch.fmax(y, -y)
    # float32 has E2M1's step there: 0.5 below 2, 1 below 4, and 2 above.
    shift = cutlass.Float32(1.5 * 2**24)
    if magnitude < 4.0:
        shift = cutlass.Float32(1.5 * 2**23)
    if magnitude < 2.0:
        shift = cutlass.Float32(1.5 * 2**22)
    return (y + shift) - shift


@cute.jit
def scale_of(largest: cutlass.Float32, encode: cutlass.Float32) -> cutlass.Float32:
    """The scale of a block with this largest magnitude."""
    scale = largest / cutlass.Float32(LARGEST_CODE)
    return to_e4m3(cute.arch.fmin(scale * encode, cutlass.Float32(LARGEST_SCALE)))


@cute.jit
def inverse_of(scale: cutlass.Float32) -> cutlass.Float32:
    return cute.arch.fmin(cutlass.Float32(1.0) / scale, cutlass.Float32(LARGEST_FLOAT))


@cute.kernel
def maximum_kernel(source: cute.Tensor, partial: cute.Tensor, tensor: cutlass.Constexpr[int]):
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
        partial[tensor, part] = largest


@cute.kernel
def encode_kernel(partial: cute.Tensor, scales: cute.Tensor):
    """Each tensor's global scales: what it is multiplied with, so that its largest element becomes 448 · 6, and one
    over that."""
    thread, _, _ = cute.arch.thread_idx()
    tensor, _, _ = cute.arch.block_idx()
    largest = block_maximum(partial[tensor, thread], PARTS)
    if thread == 0:
        encode = cute.arch.fmin(cutlass.Float32(LARGEST_SCALE * LARGEST_CODE) / largest, cutlass.Float32(LARGEST_FLOAT))
        scales[tensor, 0] = encode
        scales[tensor, 1] = cutlass.Float32(1.0) / encode


@cute.jit
def quantise(x: cute.Tensor, encode: cutlass.Float32, decode: cutlass.Float32):
    """Replace 8 values, half a block, by their codes times the scale of the block."""
    largest = largest_magnitude(x)
    largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=1))
    if largest == 0.0:
        largest = cutlass.Float32(1.0)  # zeros stay zeros, and need no slow division
    scale = scale_of(largest, encode)
    inverse = inverse_of(scale * decode)
    values = x.load().to(cutlass.Float32)
    rounded = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    for e in cutlass.range_constexpr(VECTOR):
        rounded[e] = to_e2m1(values[e] * inverse)
    x.store((rounded.load() * scale).to(cutlass.BFloat16))


@cute.kernel
def quantise_kernel(source: cute.Tensor, scales: cute.Tensor, target: cute.Tensor, tensor: cutlass.Constexpr[int]):
    thread, _, _ = cute.arch.thread_idx()
    group, _, _ = cute.arch.block_idx()
    first = group * (THREADS * UNROLL) + thread
    x = cute.make_rmem_tensor((VECTOR, UNROLL), cutlass.BFloat16)
    x.fill(0.0)
    for u in cutlass.range_constexpr(UNROLL):
        if first + u * THREADS < source.shape[0]:
            cute.autovec_copy(source[first + u * THREADS, None], x[None, u])
    encode, decode = scales[tensor, 0], scales[tensor, 1]
    for u in cutlass.range_constexpr(UNROLL):
        quantise(x[None, u], encode, decode)
    for u in cutlass.range_constexpr(UNROLL):
        if first + u * THREADS < source.shape[0]:
            cute.autovec_copy(x[None, u], target[first + u * THREADS, None])


@cute.kernel
def value_kernel(source: cute.Tensor, scales: cute.Tensor, target: cute.Tensor, tensor: cutlass.Constexpr[int]):
    """Rows are positions. The global scale of the probabilities is applied here as well."""
    thread, _, _ = cute.arch.thread_idx()
    group, _, _ = cute.arch.block_idx()
    lanes = cutlass.const_expr(source.shape[1] // VECTOR)
    first, lane = (group * THREADS + thread) // lanes * BLOCK, thread % lanes
    if first < source.shape[0]:
        encode, decode = scales[tensor, 0], scales[tensor, 1]
        x = cute.make_rmem_tensor((VECTOR, BLOCK), cutlass.BFloat16)
        largest = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
        inverse = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
        rounded = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
        for r in cutlass.range_constexpr(BLOCK):
            cute.autovec_copy(cute.local_tile(source[first + r, None], (VECTOR,), (lane,)), x[None, r])
        largest.fill(0.0)
        for r in cutlass.range_constexpr(BLOCK):
            values = x[None, r].load().to(cutlass.Float32)
            for e in cutlass.range_constexpr(VECTOR):
                largest[e] = cute.arch.fmax(largest[e], cute.arch.fmax(values[e], -values[e]))
        for e in cutlass.range_constexpr(VECTOR):
            largest[e] = scale_of(largest[e], encode) * decode
            inverse[e] = inverse_of(largest[e])
        for r in cutlass.range_constexpr(BLOCK):
            scaled = x[None, r].load().to(cutlass.Float32) * inverse.load()
            for e in cutlass.range_constexpr(VECTOR):
                rounded[e] = to_e2m1(scaled[e])
            x[None, r].store((rounded.load() * largest.load() * PROBABILITY_DECODE).to(cutlass.BFloat16))
            cute.autovec_copy(x[None, r], cute.local_tile(target[first + r, None], (VECTOR,), (lane,)))


@cute.kernel
def softmax_kernel(scores: cute.Tensor, scales: cute.Tensor, factor: cutlass.Constexpr[float], out: cute.Tensor):
    """A row is a query's; as many rows as there are keys belong to a head, and row i sees keys 0 to i."""
    thread, _, _ = cute.arch.thread_idx()
    group, _, _ = cute.arch.block_idx()
    keys = cutlass.const_expr(scores.shape[1])
    lanes = cutlass.const_expr(keys // VECTOR)
    rows = cutlass.const_expr(THREADS // lanes)
    first, lane = group * (rows * UNROLL) + thread // lanes, thread % lanes
    x = cute.make_rmem_tensor((VECTOR, UNROLL), cutlass.BFloat16)
    x.fill(0.0)
    for u in cutlass.range_constexpr(UNROLL):
        row = first + u * rows
        if row < scores.shape[0] and lane * VECTOR <= row % keys:
            cute.autovec_copy(cute.local_tile(scores[row, None], (VECTOR,), (lane,)), x[None, u])
    weight = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    encode = cutlass.Float32(LARGEST_SCALE * LARGEST_CODE)
    whole = scales[0, 1] * scales[1, 1] * factor
    for u in cutlass.range_constexpr(UNROLL):
        row = first + u * rows
        weight.store(x[None, u].load().to(cutlass.Float32) * whole)
        largest = cutlass.Float32(HIDDEN)
        for e in cutlass.range_constexpr(VECTOR):
            if lane * VECTOR + e > row % keys:
                weight[e] = cutlass.Float32(HIDDEN)
            largest = cute.arch.fmax(largest, weight[e])
        largest = cute.arch.warp_reduction_max(largest, threads_in_group=lanes)
        weight.store(cute.math.exp(weight.load() - largest))
        total = weight.load().reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
        total = cute.arch.warp_reduction_sum(total, threads_in_group=lanes)
        x[None, u].store((weight.load() * (1.0 / total)).to(cutlass.BFloat16))
        if row < scores.shape[0]:
            cute.autovec_copy(x[None, u], cute.local_tile(out[row, None], (VECTOR,), (lane,)))
        quantise(x[None, u], encode, cutlass.Float32(PROBABILITY_DECODE))
        if row < scores.shape[0]:
            cute.autovec_copy(x[None, u], cute.local_tile(scores[row, None], (VECTOR,), (lane,)))


@cute.jit
def operands(
    query: cute.Tensor,
    new_query: cute.Tensor,
    key: cute.Tensor,
    new_key: cute.Tensor,
    value: cute.Tensor,
    value_rows: cute.Tensor,
    new_value_rows: cute.Tensor,
    partial: cute.Tensor,
    scales: cute.Tensor,
    stream,
):
    """Queries and keys in vectors, values in vectors and in rows."""
    maximum_kernel(query, partial, 0).launch(grid=(PARTS, 1, 1), block=(THREADS, 1, 1), stream=stream)
    maximum_kernel(key, partial, 1).launch(grid=(PARTS, 1, 1), block=(THREADS, 1, 1), stream=stream)
    maximum_kernel(value, partial, 2).launch(grid=(PARTS, 1, 1), block=(THREADS, 1, 1), stream=stream)
    encode_kernel(partial, scales).launch(grid=(3, 1, 1), block=(PARTS, 1, 1), stream=stream)
    quantise_kernel(query, scales, new_query, 0).launch(
        grid=(cute.ceil_div(query.shape[0], THREADS * UNROLL), 1, 1), block=(THREADS, 1, 1), stream=stream
    )
    quantise_kernel(key, scales, new_key, 1).launch(
        grid=(cute.ceil_div(key.shape[0], THREADS * UNROLL), 1, 1), block=(THREADS, 1, 1), stream=stream
    )
    value_kernel(value_rows, scales, new_value_rows, 2).launch(
        grid=(cute.ceil_div(value.shape[0] // BLOCK, THREADS), 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.jit
def softmax(scores: cute.Tensor, scales: cute.Tensor, out: cute.Tensor, stream, factor: cutlass.Constexpr[float]):
    rows = cutlass.const_expr(THREADS // (scores.shape[1] // VECTOR) * UNROLL)
    softmax_kernel(scores, scales, factor, out).launch(
        grid=(cute.ceil_div(scores.shape[0], rows), 1, 1), block=(THREADS, 1, 1), stream=stream
    )


def compile_for(arch: str, sequence: int = 256, head_size: int = 128):
    """The two functions for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert sequence % BLOCK == 0 and head_size % BLOCK == 0 and sequence <= cute.arch.WARP_SIZE * VECTOR
    query_vectors, key_vectors, value_rows, rows = (cute.sym_int() for _ in range(4))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {arch}"

    def fake(dtype, *shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    shapes = [(query_vectors, VECTOR)] * 2 + [(key_vectors, VECTOR)] * 3 + [(value_rows, head_size)] * 2
    scales = fake(cutlass.Float32, 3, 2)
    vectors = [fake(cutlass.BFloat16, *shape) for shape in shapes]
    first = cute.compile(operands, *vectors, fake(cutlass.Float32, 3, PARTS), scales, stream, options=options)
    scores, out = (fake(cutlass.BFloat16, rows, sequence) for _ in "so")
    return first, cute.compile(softmax, scores, scales, out, stream, head_size**-0.5, options=options)


@cache
def kernels_for(device: torch.device, sequence: int, head_size: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", sequence, head_size)


def solve(
    query_states: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor, attention_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, sequence, head_size = query_states.shape
    kv = batch * key_states.shape[1]
    make_operands, attend = kernels_for(query_states.device, sequence, head_size)
    query, key, value = (torch.empty_like(x) for x in (query_states, key_states, value_states))
    numbers = torch.empty(3 * PARTS + 6, dtype=torch.float32, device=query.device)
    partial, scales = numbers[: 3 * PARTS].view(3, PARTS), numbers[3 * PARTS :].view(3, 2)
    make_operands(
        *(query_states.view(-1, VECTOR), query.view(-1, VECTOR), key_states.view(-1, VECTOR), key.view(-1, VECTOR)),
        *(value_states.view(-1, VECTOR), value_states.view(-1, head_size), value.view(-1, head_size)),
        *(partial, scales),
    )
    key, value = key.view(kv, sequence, head_size), value.view(kv, sequence, head_size)
    scores = torch.bmm(query.view(kv, -1, head_size), key.transpose(1, 2))
    probabilities = query.new_empty(batch, heads, sequence, sequence)
    attend(scores.view(-1, sequence), scales, probabilities.view(-1, sequence))
    return torch.bmm(scores, value).view(query.shape), probabilities
