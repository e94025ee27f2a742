"""p57, attention block with NVFP4 projections, in TIRx. All products stay with eager PyTorch, on CUDA in bfloat16.

Operands of the projections are replaced by what their NVFP4 codes and scales stand for, rounded to bfloat16; an
activation's largest magnitude is found before. One projection gives queries, keys and values; a kernel turns them and
sorts them by heads, so that the query heads of a KV head are further rows of its products. The softmax is done in
place, and the attended values go back to their tokens while they are quantised. CUDA: a thread has 8 values, and the
divisions are refined until they are correctly rounded. CPU: plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

BLOCK = 16
VECTOR = 8  # bfloat16 values in 16 bytes, and codes in 4
THREADS = 256
UNROLL = 4  # vectors that a thread has at a time
PARTS = 1024  # thread blocks that share the search for a maximum
LARGEST_CODE = 6.0
LARGEST_SCALE = 448.0
HIDDEN = -3.0e38  # the score of a key that may not be seen


def to_e4m3(x):
    """The E4M3 value nearest to x, a number in 0 … 448; a tie goes to the even one. An expression, for any target."""
    bits = T.reinterpret("uint32", x)
    odd = (bits >> T.uint32(20)) & T.uint32(1)
    normal = T.reinterpret("float32", (bits + T.uint32(0x7FFFF) + odd) & T.uint32(0xFFF00000))
    # Below 2^-6 the grid has the constant step 2^-9, which is the step of float32 at 2^14.
    steps = T.reinterpret("uint32", x + T.float32(16384)) & T.uint32(0xFF)
    subnormal = T.cast(steps, "float32") * T.float32(2**-9)
    return T.Select(x < T.float32(0.015625), subnormal, normal)


def to_e2m1(y):
    """The E2M1 value nearest to y, a number in ±6; a tie goes to the even one."""
    bits = T.reinterpret("uint32", y)
    magnitude = bits & T.uint32(0x7FFFFFFF)
    odd = (magnitude >> T.uint32(22)) & T.uint32(1)
    normal = (magnitude + T.uint32(0x1FFFFF) + odd) & T.uint32(0xFFC00000)
    steps = T.reinterpret("uint32", T.reinterpret("float32", magnitude) + T.float32(2**22)) & T.uint32(0xFF)
    subnormal = T.cast(steps, "float32") * T.float32(0.5)
    value = T.Select(magnitude < T.uint32(0x3F800000), T.reinterpret("uint32", subnormal), normal)
    return T.reinterpret("float32", value | (bits & T.uint32(0x80000000)))


def e4m3_value(byte):
    """What the byte of a scale, which is not negative, stands for."""
    digits = T.cast(byte, "uint32")
    normal = T.reinterpret("float32", (digits << T.uint32(20)) + T.uint32(120 << 23))
    return T.Select(digits < T.uint32(8), T.cast(digits, "float32") * T.float32(2**-9), normal)


def e2m1_value(word, place: int):
    """What the code at a place of a word stands for: from 1 on, its digits are those of a float32."""
    code = T.reinterpret("uint32", word) >> T.uint32(4 * place)
    digits = code & T.uint32(7)
    large = (digits << T.uint32(22)) + T.uint32(126 << 23)
    small = digits * T.uint32(126 << 23)  # 0 or 0.5
    value = T.Select(digits < T.uint32(2), small, large)
    return T.reinterpret("float32", value | ((code & T.uint32(8)) << T.uint32(28)))


def limited(x):
    return T.min(T.max(x, T.float32(-LARGEST_CODE)), T.float32(LARGEST_CODE))


@T.jit
def maximum_cuda(x: T.handle, p: T.handle):
    """Each thread block's share of max|source|."""
    vectors = T.int32()
    source = T.match_buffer(x, (vectors, VECTOR), "bfloat16")
    partial = T.match_buffer(p, (PARTS,), "float32")
    T.device_entry()
    part = T.cta_id([PARTS])
    thread = T.thread_id([THREADS])
    values = T.alloc_local((UNROLL, VECTOR), "bfloat16")
    first = T.alloc_local((1,), "int32")
    largest = T.alloc_local((1,), "float32")
    shared = T.alloc_shared((THREADS // 32,), "float32")
    largest[0] = T.float32(0)
    for step in T.serial(T.ceildiv(vectors, PARTS * THREADS * UNROLL)):
        first[0] = (step * PARTS + part) * (THREADS * UNROLL) + thread
        for u in T.unroll(UNROLL):
            for e in T.unroll(VECTOR):
                values[u, e] = T.bfloat16(0)
            if first[0] + u * THREADS < vectors:
                for e in T.vectorized(VECTOR):
                    values[u, e] = source[first[0] + u * THREADS, e]
        for u in T.unroll(UNROLL):
            for e in T.unroll(VECTOR):
                largest[0] = T.max(largest[0], T.abs(T.cast(values[u, e], "float32")))
    largest[0] = T.cuda.warp_max(largest[0])
    if thread % 32 == 0:
        shared[thread // 32] = largest[0]
    T.cuda.cta_sync()
    for k in T.unroll(THREADS // 32):
        largest[0] = T.max(largest[0], shared[k])
    if thread == 0:
        partial[part] = largest[0]


@T.jit
def encode_cuda(p: T.handle, s: T.handle):
    """The global scales of a tensor: what it is multiplied with, so that its largest element becomes 448 * 6, and one
    over that; both correctly rounded."""
    partial = T.match_buffer(p, (PARTS,), "float32")
    scales = T.match_buffer(s, (2,), "float32")
    T.device_entry()
    T.cta_id([1])
    thread = T.thread_id([PARTS])
    largest = T.alloc_local((1,), "float32")
    inverse = T.alloc_local((1,), "float32")
    encode = T.alloc_local((1,), "float32")
    error = T.alloc_local((1,), "float32")
    shared = T.alloc_shared((PARTS // 32,), "float32")
    largest[0] = T.cuda.warp_max(partial[thread])
    if thread % 32 == 0:
        shared[thread // 32] = largest[0]
    T.cuda.cta_sync()
    if thread == 0:
        for k in T.unroll(PARTS // 32):
            largest[0] = T.max(largest[0], shared[k])
        inverse[0] = T.float32(1) / largest[0]
        for _ in T.unroll(2):
            T.ptx.fma_f32(T.address_of(error[0]), -largest[0], inverse[0], T.float32(1))
            T.ptx.fma_f32(T.address_of(inverse[0]), inverse[0], error[0], inverse[0])
        encode[0] = T.float32(LARGEST_SCALE * LARGEST_CODE) * inverse[0]
        T.ptx.fma_f32(T.address_of(error[0]), -largest[0], encode[0], T.float32(LARGEST_SCALE * LARGEST_CODE))
        T.ptx.fma_f32(T.address_of(encode[0]), error[0], inverse[0], encode[0])
        inverse[0] = T.float32(1) / encode[0]
        for _ in T.unroll(2):
            T.ptx.fma_f32(T.address_of(error[0]), -encode[0], inverse[0], T.float32(1))
            T.ptx.fma_f32(T.address_of(inverse[0]), inverse[0], error[0], inverse[0])
        scales[0] = encode[0]
        scales[1] = inverse[0]


@T.jit
def quantise_cuda(x: T.handle, s: T.handle, o: T.handle):
    """Values become what their codes and scales stand for, rounded to bfloat16; two threads have a block."""
    vectors = T.int32()
    source = T.match_buffer(x, (vectors, VECTOR), "bfloat16")
    scales = T.match_buffer(s, (2,), "float32")
    out = T.match_buffer(o, (vectors, VECTOR), "bfloat16")
    T.device_entry()
    group = T.cta_id([T.ceildiv(vectors, THREADS * UNROLL)])
    thread = T.thread_id([THREADS])
    values = T.alloc_local((UNROLL, VECTOR), "bfloat16")
    first = T.alloc_local((1,), "int32")
    largest = T.alloc_local((1,), "float32")
    scale = T.alloc_local((1,), "float32")
    inverse = T.alloc_local((1,), "float32")
    error = T.alloc_local((1,), "float32")
    y = T.alloc_local((1,), "float32")
    first[0] = group * (THREADS * UNROLL) + thread
    for u in T.unroll(UNROLL):
        for e in T.unroll(VECTOR):
            values[u, e] = T.bfloat16(0)
        if first[0] + u * THREADS < vectors:
            for e in T.vectorized(VECTOR):
                values[u, e] = source[first[0] + u * THREADS, e]
    for u in T.unroll(UNROLL):
        largest[0] = T.float32(0)
        for e in T.unroll(VECTOR):
            largest[0] = T.max(largest[0], T.abs(T.cast(values[u, e], "float32")))
        largest[0] = T.cuda.warp_max(largest[0], 2)
        # A correctly rounded division by 6.
        scale[0] = largest[0] * T.float32(1 / LARGEST_CODE)
        T.ptx.fma_f32(T.address_of(error[0]), T.float32(-LARGEST_CODE), scale[0], largest[0])
        T.ptx.fma_f32(T.address_of(scale[0]), error[0], T.float32(1 / LARGEST_CODE), scale[0])
        scale[0] = T.min(scale[0] * scales[0], T.float32(LARGEST_SCALE))
        scale[0] = to_e4m3(scale[0])
        scale[0] = scale[0] * scales[1]
        inverse[0] = T.float32(1) / scale[0]
        for _ in T.unroll(2):
            T.ptx.fma_f32(T.address_of(error[0]), -scale[0], inverse[0], T.float32(1))
            T.ptx.fma_f32(T.address_of(inverse[0]), inverse[0], error[0], inverse[0])
        inverse[0] = T.if_then_else(scale[0] > T.float32(0), inverse[0], T.float32(0))
        for e in T.unroll(VECTOR):
            y[0] = limited(T.cast(values[u, e], "float32") * inverse[0])
            values[u, e] = T.cast(to_e2m1(y[0]) * scale[0], "bfloat16")
        if first[0] + u * THREADS < vectors:
            for e in T.vectorized(VECTOR):
                out[first[0] + u * THREADS, e] = values[u, e]


@T.jit
def dequantise_cuda(c: T.handle, s: T.handle, factor: T.float32, o: T.handle):
    """Codes come 8 in a word, two words for a scale."""
    words = T.int32()
    blocks = T.int32()
    codes = T.match_buffer(c, (words,), "int32")
    scales = T.match_buffer(s, (blocks,), "uint8")
    out = T.match_buffer(o, (words, VECTOR), "bfloat16")
    T.device_entry()
    group = T.cta_id([T.ceildiv(words, THREADS * UNROLL)])
    thread = T.thread_id([THREADS])
    word = T.alloc_local((UNROLL,), "int32")
    byte = T.alloc_local((UNROLL,), "uint8")
    scale = T.alloc_local((1,), "float32")
    values = T.alloc_local((VECTOR,), "bfloat16")
    first = T.alloc_local((1,), "int32")
    first[0] = group * (THREADS * UNROLL) + thread
    for u in T.unroll(UNROLL):
        if first[0] + u * THREADS < words:
            word[u] = codes[first[0] + u * THREADS]
            byte[u] = scales[(first[0] + u * THREADS) // 2]
    for u in T.unroll(UNROLL):
        if first[0] + u * THREADS < words:
            scale[0] = e4m3_value(byte[u]) * factor
            for e in T.unroll(VECTOR):
                values[e] = T.cast(e2m1_value(word[u], e) * scale[0], "bfloat16")
            for e in T.vectorized(VECTOR):
                out[first[0] + u * THREADS, e] = values[e]


@T.jit
def encode_cpu(x: T.handle, s: T.handle):
    vectors = T.int32()
    source = T.match_buffer(x, (vectors, VECTOR), "bfloat16")
    scales = T.match_buffer(s, (2,), "float32")
    largest = T.alloc_buffer((1,), "float32", scope="local")
    largest[0] = T.float32(0)
    for i, e in T.grid(vectors, VECTOR):
        largest[0] = T.max(largest[0], T.abs(T.cast(source[i, e], "float32")))
    scales[0] = T.float32(LARGEST_SCALE * LARGEST_CODE) / largest[0]
    scales[1] = T.float32(1) / scales[0]


@T.jit
def quantise_cpu(x: T.handle, s: T.handle, o: T.handle):
    blocks = T.int32()
    source = T.match_buffer(x, (blocks, BLOCK), "bfloat16")
    scales = T.match_buffer(s, (2,), "float32")
    out = T.match_buffer(o, (blocks, BLOCK), "bfloat16")
    largest = T.alloc_buffer((1,), "float32", scope="local")
    scale = T.alloc_buffer((1,), "float32", scope="local")
    inverse = T.alloc_buffer((1,), "float32", scope="local")
    y = T.alloc_buffer((1,), "float32", scope="local")
    for i in T.serial(blocks):
        largest[0] = T.float32(0)
        for e in T.serial(BLOCK):
            largest[0] = T.max(largest[0], T.abs(T.cast(source[i, e], "float32")))
        scale[0] = largest[0] / T.float32(LARGEST_CODE)
        scale[0] = T.min(scale[0] * scales[0], T.float32(LARGEST_SCALE))
        scale[0] = to_e4m3(scale[0])
        scale[0] = scale[0] * scales[1]
        inverse[0] = T.float32(0)
        if scale[0] > T.float32(0):
            inverse[0] = T.float32(1) / scale[0]
        for e in T.serial(BLOCK):
            y[0] = limited(T.cast(source[i, e], "float32") * inverse[0])
            out[i, e] = T.cast(to_e2m1(y[0]) * scale[0], "bfloat16")


@T.jit
def dequantise_cpu(c: T.handle, s: T.handle, factor: T.float32, o: T.handle):
    words = T.int32()
    blocks = T.int32()
    codes = T.match_buffer(c, (words,), "int32")
    scales = T.match_buffer(s, (blocks,), "uint8")
    out = T.match_buffer(o, (words, VECTOR), "bfloat16")
    for i in T.serial(words):
        for e in T.unroll(VECTOR):
            out[i, e] = T.cast(e2m1_value(codes[i], e) * (e4m3_value(scales[i // 2]) * factor), "bfloat16")


def turned(x, partner, cos, sin, sign):
    """One bfloat16 value of a turned vector, as an expression."""
    x, partner, cos, sin = (T.cast(value, "float32") for value in (x, partner, cos, sin))
    return T.cast(x * cos + T.float32(sign) * partner * sin, "bfloat16")


@T.jit
def requantise_cuda(
    x: T.handle,
    s: T.handle,
    o: T.handle,
    *,
    heads: T.constexpr,
    positions: T.constexpr,
    size: T.constexpr,
):
    """Like `quantise_cuda`, from [batch, head, position] to [batch, position, head], each with some vectors."""
    vectors = T.int32()
    items = T.int32()
    source = T.match_buffer(x, (vectors, VECTOR), "bfloat16")
    scales = T.match_buffer(s, (2,), "float32")
    out = T.match_buffer(o, (items, positions, heads, size * VECTOR), "bfloat16")
    T.device_entry()
    group = T.cta_id([T.ceildiv(vectors, THREADS * UNROLL)])
    thread = T.thread_id([THREADS])
    values = T.alloc_local((UNROLL, VECTOR), "bfloat16")
    first = T.alloc_local((1,), "int32")
    row = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    largest = T.alloc_local((1,), "float32")
    scale = T.alloc_local((1,), "float32")
    inverse = T.alloc_local((1,), "float32")
    error = T.alloc_local((1,), "float32")
    y = T.alloc_local((1,), "float32")
    first[0] = group * (THREADS * UNROLL) + thread
    for u in T.unroll(UNROLL):
        for e in T.unroll(VECTOR):
            values[u, e] = T.bfloat16(0)
        if first[0] + u * THREADS < vectors:
            for e in T.vectorized(VECTOR):
                values[u, e] = source[first[0] + u * THREADS, e]
    for u in T.unroll(UNROLL):
        largest[0] = T.float32(0)
        for e in T.unroll(VECTOR):
            largest[0] = T.max(largest[0], T.abs(T.cast(values[u, e], "float32")))
        largest[0] = T.cuda.warp_max(largest[0], 2)
        scale[0] = largest[0] * T.float32(1 / LARGEST_CODE)
        T.ptx.fma_f32(T.address_of(error[0]), T.float32(-LARGEST_CODE), scale[0], largest[0])
        T.ptx.fma_f32(T.address_of(scale[0]), error[0], T.float32(1 / LARGEST_CODE), scale[0])
        scale[0] = T.min(scale[0] * scales[0], T.float32(LARGEST_SCALE))
        scale[0] = to_e4m3(scale[0])
        scale[0] = scale[0] * scales[1]
        inverse[0] = T.float32(1) / scale[0]
        for _ in T.unroll(2):
            T.ptx.fma_f32(T.address_of(error[0]), -scale[0], inverse[0], T.float32(1))
            T.ptx.fma_f32(T.address_of(inverse[0]), inverse[0], error[0], inverse[0])
        inverse[0] = T.if_then_else(scale[0] > T.float32(0), inverse[0], T.float32(0))
        for e in T.unroll(VECTOR):
            y[0] = limited(T.cast(values[u, e], "float32") * inverse[0])
            values[u, e] = T.cast(to_e2m1(y[0]) * scale[0], "bfloat16")
        row[0] = (first[0] + u * THREADS) // size
        lane[0] = (first[0] + u * THREADS) % size
        if first[0] + u * THREADS < vectors:
            for e in T.vectorized(VECTOR):
                out[
                    row[0] // (heads * positions),
                    row[0] % positions,
                    row[0] // positions % heads,
                    lane[0] * VECTOR + e,
                ] = values[u, e]


@T.jit
def rotary_cuda(
    p: T.handle,
    c: T.handle,
    s: T.handle,
    q: T.handle,
    k: T.handle,
    v: T.handle,
    *,
    queries: T.constexpr,
    keys: T.constexpr,
    positions: T.constexpr,
    half: T.constexpr,
    lanes: T.constexpr,
    passes: T.constexpr,
):
    """A thread block has a token, a thread of it some heads' 8 values and their 8 partners."""
    tokens = T.int32()
    items = T.int32()
    product = T.match_buffer(p, (tokens, queries + 2 * keys, 2 * half), "bfloat16")
    cos = T.match_buffer(c, (tokens, 2 * half), "bfloat16")
    sin = T.match_buffer(s, (tokens, 2 * half), "bfloat16")
    query = T.match_buffer(q, (items, queries, positions, 2 * half), "bfloat16")
    key = T.match_buffer(k, (items, keys, positions, 2 * half), "bfloat16")
    value = T.match_buffer(v, (items, keys, positions, 2 * half), "bfloat16")
    T.device_entry()
    token = T.cta_id([tokens])
    thread = T.thread_id([THREADS])
    a = T.alloc_local((passes, VECTOR), "bfloat16")
    b = T.alloc_local((passes, VECTOR), "bfloat16")
    c_first = T.alloc_local((VECTOR,), "bfloat16")
    c_second = T.alloc_local((VECTOR,), "bfloat16")
    s_first = T.alloc_local((VECTOR,), "bfloat16")
    s_second = T.alloc_local((VECTOR,), "bfloat16")
    first = T.alloc_local((VECTOR,), "bfloat16")
    second = T.alloc_local((VECTOR,), "bfloat16")
    item = T.alloc_local((1,), "int32")
    position = T.alloc_local((1,), "int32")
    head = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    item[0] = token // positions
    position[0] = token % positions
    lane[0] = thread % lanes
    for e in T.vectorized(VECTOR):
        c_first[e] = cos[token, lane[0] * VECTOR + e]
    for e in T.vectorized(VECTOR):
        c_second[e] = cos[token, half + lane[0] * VECTOR + e]
    for e in T.vectorized(VECTOR):
        s_first[e] = sin[token, lane[0] * VECTOR + e]
    for e in T.vectorized(VECTOR):
        s_second[e] = sin[token, half + lane[0] * VECTOR + e]
    for i in T.unroll(passes):
        head[0] = i * (THREADS // lanes) + thread // lanes
        if head[0] < queries + 2 * keys:
            for e in T.vectorized(VECTOR):
                a[i, e] = product[token, head[0], lane[0] * VECTOR + e]
            for e in T.vectorized(VECTOR):
                b[i, e] = product[token, head[0], half + lane[0] * VECTOR + e]
    for i in T.unroll(passes):
        head[0] = i * (THREADS // lanes) + thread // lanes
        if head[0] < queries + keys:
            for e in T.unroll(VECTOR):
                first[e] = turned(a[i, e], b[i, e], c_first[e], s_first[e], -1.0)
                second[e] = turned(b[i, e], a[i, e], c_second[e], s_second[e], 1.0)
            if head[0] < queries:
                for e in T.vectorized(VECTOR):
                    query[item[0], head[0], position[0], lane[0] * VECTOR + e] = first[e]
                for e in T.vectorized(VECTOR):
                    query[item[0], head[0], position[0], half + lane[0] * VECTOR + e] = second[e]
            else:
                for e in T.vectorized(VECTOR):
                    key[item[0], head[0] - queries, position[0], lane[0] * VECTOR + e] = first[e]
                for e in T.vectorized(VECTOR):
                    key[item[0], head[0] - queries, position[0], half + lane[0] * VECTOR + e] = second[e]
        elif head[0] < queries + 2 * keys:
            for e in T.vectorized(VECTOR):
                value[item[0], head[0] - (queries + keys), position[0], lane[0] * VECTOR + e] = a[i, e]
            for e in T.vectorized(VECTOR):
                value[item[0], head[0] - (queries + keys), position[0], half + lane[0] * VECTOR + e] = b[i, e]


@T.jit
def softmax_cuda(x: T.handle, *, keys: T.constexpr, lanes: T.constexpr, factor: T.constexpr):
    """In place. A row is a query's; as many rows as there are keys belong to a head, and row i sees keys 0 to i."""
    rows = T.int32()
    scores = T.match_buffer(x, (rows, keys), "bfloat16")
    T.device_entry()
    group = T.cta_id([T.ceildiv(rows, THREADS // lanes * UNROLL)])
    thread = T.thread_id([THREADS])
    values = T.alloc_local((UNROLL, VECTOR), "bfloat16")
    weight = T.alloc_local((VECTOR,), "float32")
    first = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    largest = T.alloc_local((1,), "float32")
    total = T.alloc_local((1,), "float32")
    first[0] = group * (THREADS // lanes * UNROLL) + thread // lanes
    lane[0] = thread % lanes
    for u in T.unroll(UNROLL):
        for e in T.unroll(VECTOR):
            values[u, e] = T.bfloat16(0)
        if first[0] + u * (THREADS // lanes) < rows:
            for e in T.vectorized(VECTOR):
                values[u, e] = scores[first[0] + u * (THREADS // lanes), lane[0] * VECTOR + e]
    for u in T.unroll(UNROLL):
        largest[0] = T.float32(HIDDEN)
        for e in T.unroll(VECTOR):
            weight[e] = T.cast(values[u, e], "float32") * T.float32(factor)
            if lane[0] * VECTOR + e > (first[0] + u * (THREADS // lanes)) % keys:
                weight[e] = T.float32(HIDDEN)
            largest[0] = T.max(largest[0], weight[e])
        largest[0] = T.cuda.warp_max(largest[0], lanes)
        total[0] = T.float32(0)
        for e in T.unroll(VECTOR):
            weight[e] = T.exp(weight[e] - largest[0])
            total[0] = total[0] + weight[e]
        total[0] = T.cuda.warp_sum(total[0], lanes)
        total[0] = T.float32(1) / total[0]
        for e in T.unroll(VECTOR):
            values[u, e] = T.cast(weight[e] * total[0], "bfloat16")
        if first[0] + u * (THREADS // lanes) < rows:
            for e in T.vectorized(VECTOR):
                scores[first[0] + u * (THREADS // lanes), lane[0] * VECTOR + e] = values[u, e]


@T.jit
def requantise_cpu(
    x: T.handle,
    s: T.handle,
    o: T.handle,
    *,
    heads: T.constexpr,
    positions: T.constexpr,
    size: T.constexpr,
):
    items = T.int32()
    source = T.match_buffer(x, (items, heads, positions, size * VECTOR), "bfloat16")
    scales = T.match_buffer(s, (2,), "float32")
    out = T.match_buffer(o, (items, positions, heads, size * VECTOR), "bfloat16")
    largest = T.alloc_buffer((1,), "float32", scope="local")
    scale = T.alloc_buffer((1,), "float32", scope="local")
    inverse = T.alloc_buffer((1,), "float32", scope="local")
    y = T.alloc_buffer((1,), "float32", scope="local")
    for i, h, p, b in T.grid(items, heads, positions, size * VECTOR // BLOCK):
        largest[0] = T.float32(0)
        for e in T.serial(BLOCK):
            largest[0] = T.max(largest[0], T.abs(T.cast(source[i, h, p, b * BLOCK + e], "float32")))
        scale[0] = largest[0] / T.float32(LARGEST_CODE)
        scale[0] = T.min(scale[0] * scales[0], T.float32(LARGEST_SCALE))
        scale[0] = to_e4m3(scale[0])
        scale[0] = scale[0] * scales[1]
        inverse[0] = T.float32(0)
        if scale[0] > T.float32(0):
            inverse[0] = T.float32(1) / scale[0]
        for e in T.serial(BLOCK):
            y[0] = limited(T.cast(source[i, h, p, b * BLOCK + e], "float32") * inverse[0])
            out[i, p, h, b * BLOCK + e] = T.cast(to_e2m1(y[0]) * scale[0], "bfloat16")


@T.jit
def rotary_cpu(
    p: T.handle,
    c: T.handle,
    s: T.handle,
    q: T.handle,
    k: T.handle,
    v: T.handle,
    *,
    queries: T.constexpr,
    keys: T.constexpr,
    positions: T.constexpr,
    half: T.constexpr,
):
    items = T.int32()
    product = T.match_buffer(p, (items, positions, queries + 2 * keys, 2, half), "bfloat16")
    cos = T.match_buffer(c, (items, positions, 2, half), "bfloat16")
    sin = T.match_buffer(s, (items, positions, 2, half), "bfloat16")
    query = T.match_buffer(q, (items, queries, positions, 2, half), "bfloat16")
    key = T.match_buffer(k, (items, keys, positions, 2, half), "bfloat16")
    value = T.match_buffer(v, (items, keys, positions, 2, half), "bfloat16")
    for i, t, e in T.grid(items, positions, half):
        for h in T.serial(queries):
            query[i, h, t, 0, e] = turned(
                product[i, t, h, 0, e], product[i, t, h, 1, e], cos[i, t, 0, e], sin[i, t, 0, e], -1.0
            )
            query[i, h, t, 1, e] = turned(
                product[i, t, h, 1, e], product[i, t, h, 0, e], cos[i, t, 1, e], sin[i, t, 1, e], 1.0
            )
        for h in T.serial(keys):
            key[i, h, t, 0, e] = turned(
                *(product[i, t, queries + h, 0, e], product[i, t, queries + h, 1, e]),
                *(cos[i, t, 0, e], sin[i, t, 0, e], -1.0),
            )
            key[i, h, t, 1, e] = turned(
                *(product[i, t, queries + h, 1, e], product[i, t, queries + h, 0, e]),
                *(cos[i, t, 1, e], sin[i, t, 1, e], 1.0),
            )
            value[i, h, t, 0, e] = product[i, t, queries + keys + h, 0, e]
            value[i, h, t, 1, e] = product[i, t, queries + keys + h, 1, e]


@T.jit
def softmax_cpu(x: T.handle, *, keys: T.constexpr, factor: T.constexpr):
    rows = T.int32()
    scores = T.match_buffer(x, (rows, keys), "bfloat16")
    weight = T.alloc_buffer((keys,), "float32", scope="local")
    largest = T.alloc_buffer((1,), "float32", scope="local")
    total = T.alloc_buffer((1,), "float32", scope="local")
    for row in T.serial(rows):
        largest[0] = T.float32(HIDDEN)
        for k in T.serial(row % keys + 1):
            weight[k] = T.cast(scores[row, k], "float32") * T.float32(factor)
            largest[0] = T.max(largest[0], weight[k])
        total[0] = T.float32(0)
        for k in T.serial(row % keys + 1):
            weight[k] = T.exp(weight[k] - largest[0])
            total[0] = total[0] + weight[k]
        for k in T.serial(keys):
            scores[row, k] = T.bfloat16(0)
        for k in T.serial(row % keys + 1):
            scores[row, k] = T.cast(weight[k] / total[0], "bfloat16")


def compile_for(
    arch: str, sequence: int = 128, queries: int = 64, keys: int = 8, head_size: int = 128
) -> list[tvm.runtime.Executable]:
    """Maximum (not for a CPU), global scale, activation, weight, rotation, softmax and the second activation, for
    `arch` (`llvm`, `sm_90a`, ...); needs no GPU."""
    half, factor = head_size // 2, head_size**-0.5
    heads = {"queries": queries, "keys": keys, "positions": sequence, "half": half}
    again = {"heads": queries, "positions": sequence, "size": head_size // VECTOR}
    if arch == "llvm":
        kernels = [kernel.specialize() for kernel in (encode_cpu, quantise_cpu, dequantise_cpu)]
        kernels += [rotary_cpu.specialize(**heads), softmax_cpu.specialize(keys=sequence, factor=factor)]
        kernels.append(requantise_cpu.specialize(**again))
        return [tvm.compile(tvm.IRModule({"main": kernel}), target="llvm") for kernel in kernels]
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    kernels = [kernel.specialize() for kernel in (maximum_cuda, encode_cuda, quantise_cuda, dequantise_cuda)]
    lanes = half // VECTOR
    passes = -(-(queries + 2 * keys) // (THREADS // lanes))
    kernels.append(rotary_cuda.specialize(**heads, lanes=lanes, passes=passes))
    kernels.append(softmax_cuda.specialize(keys=sequence, lanes=sequence // VECTOR, factor=factor))
    kernels.append(requantise_cuda.specialize(**again))
    return [tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx") for kernel in kernels]


@cache
def kernels_for(device: torch.device, sequence: int, queries: int, keys: int, head_size: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return [executable["main"] for executable in compile_for(arch, sequence, queries, keys, head_size)]


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a bᵀ of matrices, or of as many of either, rounded to bfloat16."""
    if a.is_cuda:
        return torch.matmul(a, b.transpose(-1, -2))
    return torch.matmul(a.float(), b.float().transpose(-1, -2)).to(a.dtype)


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
    *maximum, encode, quantise, dequantise, rotate, softmax, requantise = kernels_for(
        cos.device, sequence, queries, keys, head_size
    )
    numbers = torch.empty(PARTS + 4, dtype=torch.float32, device=cos.device)
    partial, scales = numbers[:PARTS], numbers[PARTS : PARTS + 2]
    unit = VECTOR if cos.is_cuda else BLOCK

    def find_scales(x: torch.Tensor) -> None:
        if maximum:
            maximum[0](x.view(-1, VECTOR), partial)
            encode(partial, scales)
        else:
            encode(x.view(-1, VECTOR), scales)

    weight = hidden_states.new_empty((queries + 2 * keys) * head_size, hidden)
    targets = [*weight.split((len(q_weight), len(k_weight), len(v_weight)))]
    targets.append(hidden_states.new_empty(len(o_weight), 2 * o_weight.shape[1]))
    codes = (q_weight, k_weight, v_weight, o_weight)
    block_scales = (q_scale, k_scale, v_scale, o_scale)
    for target, code, scale, factor in zip(
        targets, codes, block_scales, (q_global, k_global, v_global, o_global), strict=True
    ):
        words = code.view(torch.uint8).view(-1).view(torch.int32)
        dequantise(words, scale.view(torch.uint8).view(-1), factor, target.view(-1, VECTOR))

    tokens = torch.empty_like(hidden_states)
    find_scales(hidden_states)
    quantise(hidden_states.view(-1, unit), scales, tokens.view(-1, unit))
    projected = product(tokens.view(-1, hidden), weight)
    query = tokens.new_empty(batch, queries, sequence, head_size)
    key, value = (tokens.new_empty(batch, keys, sequence, head_size) for _ in range(2))
    if cos.is_cuda:
        rotate(
            *(projected.view(-1, queries + 2 * keys, head_size), cos.view(-1, head_size), sin.view(-1, head_size)),
            *(query, key, value),
        )
    else:
        halves = (2, half)
        rotate(
            projected.view(batch, sequence, -1, *halves),
            *(x.view(batch, sequence, *halves) for x in (cos, sin)),
            *(x.view(batch, -1, sequence, *halves) for x in (query, key, value)),
        )
    key, value = key.view(batch * keys, sequence, head_size), value.view(batch * keys, sequence, head_size)
    scores = product(query.view(batch * keys, -1, head_size), key)
    softmax(scores.view(-1, sequence))
    attended = product(scores, value.transpose(1, 2))
    find_scales(attended)
    tokens = tokens.new_empty(batch, sequence, queries, head_size)
    shape = (-1, VECTOR) if cos.is_cuda else (batch, queries, sequence, head_size)
    requantise(attended.view(shape), scales, tokens)
    return product(tokens.view(batch * sequence, -1), targets[3]).view(hidden_states.shape)
