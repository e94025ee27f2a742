"""p57, attention block with NVFP4 projections, in CuTe DSL. All products stay with eager PyTorch, in bfloat16.

Operands of the projections are replaced by what their NVFP4 codes and scales stand for, rounded to bfloat16, 8 values a
thread; an activation's largest magnitude is found before. One projection gives queries, keys and values; a kernel turns
them and sorts them by heads, so that the query heads of a KV head are further rows of its products. The softmax is done
in place, and the attended values go back to their tokens while they are quantised.
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
def requantise_kernel(
    source: cute.Tensor,
    scales: cute.Tensor,
    target: cute.Tensor,
    heads: cutlass.Constexpr[int],
    positions: cutlass.Constexpr[int],
    vectors: cutlass.Constexpr[int],
):
    """Like `quantise_kernel`, from [batch, head, position] to [batch, position, head], each with some vectors."""
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
        place = first + u * THREADS
        if place < source.shape[0]:
            vector, row = place % vectors, place // vectors
            position, head, item = row % positions, row // positions % heads, row // (positions * heads)
            new_place = ((item * positions + position) * heads + head) * vectors + vector
            cute.autovec_copy(x[None, u], target[new_place, None])


@cute.kernel
def rotary_kernel(
    product: cute.Tensor, cos: cute.Tensor, sin: cute.Tensor, query: cute.Tensor, key: cute.Tensor, value: cute.Tensor
):
    """The last two axes of everything are the half of a head and the place in it; a thread block has a token."""
    thread, _, _ = cute.arch.thread_idx()
    token, _, _ = cute.arch.block_idx()
    queries, keys = cutlass.const_expr(query.shape[1]), cutlass.const_expr(key.shape[1])
    heads = cutlass.const_expr(queries + 2 * keys)
    lanes = cutlass.const_expr(query.shape[4] // VECTOR)
    rows = cutlass.const_expr(THREADS // lanes)  # heads at a time
    passes = cutlass.const_expr((heads + rows - 1) // rows)
    lane = thread % lanes
    item, position = token // query.shape[2], token % query.shape[2]
    x = cute.make_rmem_tensor((VECTOR, 2, passes), cutlass.BFloat16)
    c = cute.make_rmem_tensor((VECTOR, 2), cutlass.BFloat16)
    s = cute.make_rmem_tensor((VECTOR, 2), cutlass.BFloat16)
    for half in cutlass.range_constexpr(2):
        cute.autovec_copy(cute.local_tile(cos[token, half, None], (VECTOR,), (lane,)), c[None, half])
        cute.autovec_copy(cute.local_tile(sin[token, half, None], (VECTOR,), (lane,)), s[None, half])
    for p in cutlass.range_constexpr(passes):
        head = p * rows + thread // lanes
        if head < heads:
            for half in cutlass.range_constexpr(2):
                source = cute.local_tile(product[token, head, half, None], (VECTOR,), (lane,))
                cute.autovec_copy(source, x[None, half, p])
    for p in cutlass.range_constexpr(passes):
        head = p * rows + thread // lanes
        if head < queries + keys:
            first = x[None, 0, p].load().to(cutlass.Float32)
            second = x[None, 1, p].load().to(cutlass.Float32)
            turned = first * c[None, 0].load().to(cutlass.Float32) - second * s[None, 0].load().to(cutlass.Float32)
            x[None, 0, p].store(turned.to(cutlass.BFloat16))
            turned = second * c[None, 1].load().to(cutlass.Float32) + first * s[None, 1].load().to(cutlass.Float32)
            x[None, 1, p].store(turned.to(cutlass.BFloat16))
        for half in cutlass.range_constexpr(2):
            if head < queries:
                target = query[item, head, position, half, None]
                cute.autovec_copy(x[None, half, p], cute.local_tile(target, (VECTOR,), (lane,)))
            elif head < queries + keys:
                target = key[item, head - queries, position, half, None]
                cute.autovec_copy(x[None, half, p], cute.local_tile(target, (VECTOR,), (lane,)))
            elif head < heads:
                target = value[item, head - queries - keys, position, half, None]
                cute.autovec_copy(x[None, half, p], cute.local_tile(target, (VECTOR,), (lane,)))


@cute.kernel
def softmax_kernel(scores: cute.Tensor, factor: cutlass.Constexpr[float]):
    """In place. A row is a query's; as many rows as there are keys belong to a head, and row i sees keys 0 to i."""
    thread, _, _ = cute.arch.thread_idx()
    group, _, _ = cute.arch.block_idx()
    keys = cutlass.const_expr(scores.shape[1])
    lanes = cutlass.const_expr(keys // VECTOR)
    rows = cutlass.const_expr(THREADS // lanes)
    first, lane = group * (rows * UNROLL) + thread // lanes, thread % lanes
    x = cute.make_rmem_tensor((VECTOR, UNROLL), cutlass.BFloat16)
    x.fill(0.0)
    for u in cutlass.range_constexpr(UNROLL):
        if first + u * rows < scores.shape[0]:
            cute.autovec_copy(cute.local_tile(scores[first + u * rows, None], (VECTOR,), (lane,)), x[None, u])
    weight = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    for u in cutlass.range_constexpr(UNROLL):
        position = (first + u * rows) % keys
        weight.store(x[None, u].load().to(cutlass.Float32) * factor)
        largest = cutlass.Float32(HIDDEN)
        for e in cutlass.range_constexpr(VECTOR):
            if lane * VECTOR + e > position:
                weight[e] = cutlass.Float32(HIDDEN)
            largest = cute.arch.fmax(largest, weight[e])
        largest = cute.arch.warp_reduction_max(largest, threads_in_group=lanes)
        weight.store(cute.math.exp(weight.load() - largest))
        total = weight.load().reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0)
        total = cute.arch.warp_reduction_sum(total, threads_in_group=lanes)
        x[None, u].store((weight.load() * (1.0 / total)).to(cutlass.BFloat16))
    for u in cutlass.range_constexpr(UNROLL):
        if first + u * rows < scores.shape[0]:
            cute.autovec_copy(x[None, u], cute.local_tile(scores[first + u * rows, None], (VECTOR,), (lane,)))


@cute.jit
def encode(source: cute.Tensor, partial: cute.Tensor, scales: cute.Tensor, stream):
    maximum_kernel(source, partial).launch(grid=(PARTS, 1, 1), block=(THREADS, 1, 1), stream=stream)
    encode_kernel(partial, scales).launch(grid=(1, 1, 1), block=(PARTS, 1, 1), stream=stream)


@cute.jit
def dequantise_weight(codes: cute.Tensor, scales: cute.Tensor, factor: cutlass.Float32, target: cute.Tensor, stream):
    dequantise_kernel(codes, scales, factor, target).launch(
        grid=(cute.ceil_div(target.shape[0], THREADS * UNROLL), 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.jit
def operands(
    tokens: cute.Tensor,
    partial: cute.Tensor,
    scales: cute.Tensor,
    new_tokens: cute.Tensor,
    q_codes: cute.Tensor,
    q_scales: cute.Tensor,
    q_global: cutlass.Float32,
    q_weight: cute.Tensor,
    k_codes: cute.Tensor,
    k_scales: cute.Tensor,
    k_global: cutlass.Float32,
    k_weight: cute.Tensor,
    v_codes: cute.Tensor,
    v_scales: cute.Tensor,
    v_global: cutlass.Float32,
    v_weight: cute.Tensor,
    o_codes: cute.Tensor,
    o_scales: cute.Tensor,
    o_global: cutlass.Float32,
    o_weight: cute.Tensor,
    stream,
):
    encode(tokens, partial, scales, stream)
    quantise_kernel(tokens, scales, new_tokens).launch(
        grid=(cute.ceil_div(tokens.shape[0], THREADS * UNROLL), 1, 1), block=(THREADS, 1, 1), stream=stream
    )
    dequantise_weight(q_codes, q_scales, q_global, q_weight, stream)
    dequantise_weight(k_codes, k_scales, k_global, k_weight, stream)
    dequantise_weight(v_codes, v_scales, v_global, v_weight, stream)
    dequantise_weight(o_codes, o_scales, o_global, o_weight, stream)


@cute.jit
def rotate(
    product: cute.Tensor,
    cos: cute.Tensor,
    sin: cute.Tensor,
    query: cute.Tensor,
    key: cute.Tensor,
    value: cute.Tensor,
    stream,
):
    rotary_kernel(product, cos, sin, query, key, value).launch(
        grid=(product.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.jit
def softmax(scores: cute.Tensor, stream, factor: cutlass.Constexpr[float]):
    rows = cutlass.const_expr(THREADS // (scores.shape[1] // VECTOR) * UNROLL)
    softmax_kernel(scores, factor).launch(
        grid=(cute.ceil_div(scores.shape[0], rows), 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.jit
def requantise(
    source: cute.Tensor,
    partial: cute.Tensor,
    scales: cute.Tensor,
    target: cute.Tensor,
    stream,
    heads: cutlass.Constexpr[int],
    positions: cutlass.Constexpr[int],
    vectors: cutlass.Constexpr[int],
):
    encode(source, partial, scales, stream)
    requantise_kernel(source, scales, target, heads, positions, vectors).launch(
        grid=(cute.ceil_div(source.shape[0], THREADS * UNROLL), 1, 1), block=(THREADS, 1, 1), stream=stream
    )


def compile_for(arch: str, sequence: int = 128, query_heads: int = 64, kv_heads: int = 8, head_size: int = 128):
    """The four functions for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    half = head_size // 2
    assert half % VECTOR == 0 and head_size % BLOCK == 0 and sequence % VECTOR == 0
    vectors, tokens, batch, rows = (cute.sym_int() for _ in range(4))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {arch}"

    def fake(dtype, *shape, align: int = 16):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

    def weight():
        words, blocks = cute.sym_int(), cute.sym_int()
        codes, scales = fake(cutlass.Int32, words, align=4), fake(cutlass.Uint8, blocks, align=1)
        return codes, scales, cutlass.Float32(0.0), fake(cutlass.BFloat16, words, VECTOR)

    activation = (
        fake(cutlass.BFloat16, vectors, VECTOR),
        fake(cutlass.Float32, PARTS),
        fake(cutlass.Float32, 2),
        fake(cutlass.BFloat16, vectors, VECTOR),
    )
    weights = [part for _ in "qkvo" for part in weight()]
    first = cute.compile(operands, *activation, *weights, stream, options=options)
    second = cute.compile(
        rotate,
        fake(cutlass.BFloat16, tokens, query_heads + 2 * kv_heads, 2, half),
        *(fake(cutlass.BFloat16, tokens, 2, half) for _ in "cs"),
        *(fake(cutlass.BFloat16, batch, heads, sequence, 2, half) for heads in (query_heads, kv_heads, kv_heads)),
        stream,
        options=options,
    )
    scores = fake(cutlass.BFloat16, rows, sequence)
    third = cute.compile(softmax, scores, stream, head_size**-0.5, options=options)
    sizes = (query_heads, sequence, head_size // VECTOR)
    fourth = cute.compile(requantise, *activation, stream, *sizes, options=options)
    return first, second, third, fourth


@cache
def kernels_for(device: torch.device, sequence: int, query_heads: int, kv_heads: int, head_size: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", sequence, query_heads, kv_heads, head_size)


def raw(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return codes.view(torch.uint8).view(-1).view(torch.int32), scales.view(torch.uint8).view(-1)


def solve(
    hidden_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor,
    q_scale: torch.Tensor,
    q_global: float,
    k_weight: torch.Tensor,
    k_scale: torch.Tensor,
    k_global: float,
    v_weight: torch.Tensor,
    v_scale: torch.Tensor,
    v_global: float,
    o_weight: torch.Tensor,
    o_scale: torch.Tensor,
    o_global: float,
) -> torch.Tensor:
    batch, sequence, hidden = hidden_states.shape
    head_size = cos.shape[2]
    queries, keys, half = len(q_weight) // head_size, len(k_weight) // head_size, head_size // 2
    make_operands, turn, attend, quantise_again = kernels_for(cos.device, sequence, queries, keys, head_size)
    tokens = torch.empty_like(hidden_states).view(-1, hidden)
    weight = tokens.new_empty((queries + 2 * keys) * head_size, hidden)
    new_q, new_k, new_v = weight.split((len(q_weight), len(k_weight), len(v_weight)))
    new_o = tokens.new_empty(len(o_weight), 2 * o_weight.shape[1])
    numbers = torch.empty(PARTS + 4, dtype=torch.float32, device=cos.device)
    partial, scales = numbers[:PARTS], numbers[PARTS : PARTS + 2]
    make_operands(
        *(hidden_states.view(-1, VECTOR), partial, scales, tokens.view(-1, VECTOR)),
        *(*raw(q_weight, q_scale), q_global, new_q.view(-1, VECTOR)),
        *(*raw(k_weight, k_scale), k_global, new_k.view(-1, VECTOR)),
        *(*raw(v_weight, v_scale), v_global, new_v.view(-1, VECTOR)),
        *(*raw(o_weight, o_scale), o_global, new_o.view(-1, VECTOR)),
    )
    product = torch.mm(tokens, weight.t())
    query = tokens.new_empty(batch, queries, sequence, 2, half)
    key, value = (tokens.new_empty(batch, keys, sequence, 2, half) for _ in range(2))
    turn(product.view(-1, queries + 2 * keys, 2, half), cos.view(-1, 2, half), sin.view(-1, 2, half), query, key, value)
    key, value = key.view(batch * keys, sequence, head_size), value.view(batch * keys, sequence, head_size)
    scores = torch.bmm(query.view(batch * keys, -1, head_size), key.transpose(1, 2))
    attend(scores.view(-1, sequence))
    attended = torch.bmm(scores, value)
    tokens = tokens.new_empty(batch * sequence, queries * head_size)
    quantise_again(attended.view(-1, VECTOR), partial, scales, tokens.view(-1, VECTOR))
    return torch.mm(tokens, new_o.t()).view(hidden_states.shape)
