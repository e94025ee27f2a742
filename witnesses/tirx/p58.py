"""p58, attention with NVFP4 operands, in TIRx. The two products stay with eager PyTorch, on CUDA in bfloat16.

An E2M1 code times its E4M3 block scale has at most six significant bits, so it is exact in bfloat16. After the search
for the largest magnitudes, kernels turn queries and keys into such products, and values into what they stand for, in
blocks of 16 positions. The query heads of a KV head are further rows of its products. The softmax kernel applies the
global scales, writes the probabilities and, in the place of the scores, their quantised form; the largest probability
is 1, since the first position sees only itself. CUDA: a thread has 8 values, or 16 positions of 8 channels, and the
divisions are refined until they are correctly rounded. CPU: plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

BLOCK = 16
VECTOR = 8  # bfloat16 values in 16 bytes
THREADS = 256
UNROLL = 4  # vectors that a thread has at a time
PARTS = 1024  # thread blocks that share the search for a maximum
LARGEST_CODE = 6.0
LARGEST_SCALE = 448.0
PROBABILITY_DECODE = 1 / (LARGEST_SCALE * LARGEST_CODE)
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
    """Values become their codes times the scale of their block; two threads have a block."""
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
    decode = T.alloc_local((1,), "float32")
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
        decode[0] = scale[0] * scales[1]
        inverse[0] = T.float32(1) / decode[0]
        for _ in T.unroll(2):
            T.ptx.fma_f32(T.address_of(error[0]), -decode[0], inverse[0], T.float32(1))
            T.ptx.fma_f32(T.address_of(inverse[0]), inverse[0], error[0], inverse[0])
        inverse[0] = T.if_then_else(scale[0] > T.float32(0), inverse[0], T.float32(0))
        for e in T.unroll(VECTOR):
            y[0] = limited(T.cast(values[u, e], "float32") * inverse[0])
            values[u, e] = T.cast(to_e2m1(y[0]) * scale[0], "bfloat16")
        if first[0] + u * THREADS < vectors:
            for e in T.vectorized(VECTOR):
                out[first[0] + u * THREADS, e] = values[u, e]


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
    decode = T.alloc_buffer((1,), "float32", scope="local")
    inverse = T.alloc_buffer((1,), "float32", scope="local")
    y = T.alloc_buffer((1,), "float32", scope="local")
    for i in T.serial(blocks):
        largest[0] = T.float32(0)
        for e in T.serial(BLOCK):
            largest[0] = T.max(largest[0], T.abs(T.cast(source[i, e], "float32")))
        scale[0] = largest[0] / T.float32(LARGEST_CODE)
        scale[0] = T.min(scale[0] * scales[0], T.float32(LARGEST_SCALE))
        scale[0] = to_e4m3(scale[0])
        decode[0] = scale[0] * scales[1]
        inverse[0] = T.float32(0)
        if decode[0] > T.float32(0):
            inverse[0] = T.float32(1) / decode[0]
        for e in T.serial(BLOCK):
            y[0] = limited(T.cast(source[i, e], "float32") * inverse[0])
            out[i, e] = T.cast(to_e2m1(y[0]) * scale[0], "bfloat16")


@T.jit
def value_cuda(x: T.handle, s: T.handle, o: T.handle, *, size: T.constexpr, lanes: T.constexpr):
    """Rows are positions. The global scale of the probabilities is applied here as well."""
    rows = T.int32()
    source = T.match_buffer(x, (rows, size), "bfloat16")
    scales = T.match_buffer(s, (2,), "float32")
    out = T.match_buffer(o, (rows, size), "bfloat16")
    T.device_entry()
    group = T.cta_id([T.ceildiv(rows // BLOCK * lanes, THREADS)])
    thread = T.thread_id([THREADS])
    values = T.alloc_local((BLOCK, VECTOR), "bfloat16")
    first = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    largest = T.alloc_local((1,), "float32")
    scale = T.alloc_local((VECTOR,), "float32")
    inverse = T.alloc_local((VECTOR,), "float32")
    error = T.alloc_local((1,), "float32")
    y = T.alloc_local((1,), "float32")
    first[0] = (group * THREADS + thread) // lanes * BLOCK
    lane[0] = (group * THREADS + thread) % lanes
    if first[0] < rows:
        for r in T.unroll(BLOCK):
            for e in T.vectorized(VECTOR):
                values[r, e] = source[first[0] + r, lane[0] * VECTOR + e]
        for e in T.unroll(VECTOR):
            largest[0] = T.float32(0)
            for r in T.unroll(BLOCK):
                largest[0] = T.max(largest[0], T.abs(T.cast(values[r, e], "float32")))
            scale[e] = largest[0] * T.float32(1 / LARGEST_CODE)
            T.ptx.fma_f32(T.address_of(error[0]), T.float32(-LARGEST_CODE), scale[e], largest[0])
            T.ptx.fma_f32(T.address_of(scale[e]), error[0], T.float32(1 / LARGEST_CODE), scale[e])
            scale[e] = T.min(scale[e] * scales[0], T.float32(LARGEST_SCALE))
            scale[e] = to_e4m3(scale[e])
            scale[e] = scale[e] * scales[1]
            inverse[e] = T.float32(1) / scale[e]
            for _ in T.unroll(2):
                T.ptx.fma_f32(T.address_of(error[0]), -scale[e], inverse[e], T.float32(1))
                T.ptx.fma_f32(T.address_of(inverse[e]), inverse[e], error[0], inverse[e])
            inverse[e] = T.if_then_else(scale[e] > T.float32(0), inverse[e], T.float32(0))
            scale[e] = scale[e] * T.float32(PROBABILITY_DECODE)
        for r in T.unroll(BLOCK):
            for e in T.unroll(VECTOR):
                y[0] = limited(T.cast(values[r, e], "float32") * inverse[e])
                values[r, e] = T.cast(to_e2m1(y[0]) * scale[e], "bfloat16")
            for e in T.vectorized(VECTOR):
                out[first[0] + r, lane[0] * VECTOR + e] = values[r, e]


@T.jit
def softmax_cuda(
    x: T.handle, q: T.handle, k: T.handle, o: T.handle, *, keys: T.constexpr, lanes: T.constexpr, factor: T.constexpr
):
    """A row is a query's; as many rows as there are keys belong to a head, and row i sees keys 0 to i."""
    rows = T.int32()
    scores = T.match_buffer(x, (rows, keys), "bfloat16")
    q_scales = T.match_buffer(q, (2,), "float32")
    k_scales = T.match_buffer(k, (2,), "float32")
    out = T.match_buffer(o, (rows, keys), "bfloat16")
    T.device_entry()
    group = T.cta_id([T.ceildiv(rows, THREADS // lanes * UNROLL)])
    thread = T.thread_id([THREADS])
    values = T.alloc_local((UNROLL, VECTOR), "bfloat16")
    weight = T.alloc_local((VECTOR,), "float32")
    first = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    position = T.alloc_local((1,), "int32")
    whole = T.alloc_local((1,), "float32")
    largest = T.alloc_local((1,), "float32")
    total = T.alloc_local((1,), "float32")
    scale = T.alloc_local((1,), "float32")
    decode = T.alloc_local((1,), "float32")
    inverse = T.alloc_local((1,), "float32")
    error = T.alloc_local((1,), "float32")
    y = T.alloc_local((1,), "float32")
    first[0] = group * (THREADS // lanes * UNROLL) + thread // lanes
    lane[0] = thread % lanes
    for u in T.unroll(UNROLL):
        for e in T.unroll(VECTOR):
            values[u, e] = T.bfloat16(0)
        position[0] = (first[0] + u * (THREADS // lanes)) % keys
        if first[0] + u * (THREADS // lanes) < rows and lane[0] * VECTOR <= position[0]:
            for e in T.vectorized(VECTOR):
                values[u, e] = scores[first[0] + u * (THREADS // lanes), lane[0] * VECTOR + e]
    whole[0] = q_scales[1] * k_scales[1] * T.float32(factor)
    for u in T.unroll(UNROLL):
        position[0] = (first[0] + u * (THREADS // lanes)) % keys
        largest[0] = T.float32(HIDDEN)
        for e in T.unroll(VECTOR):
            weight[e] = T.cast(values[u, e], "float32") * whole[0]
            if lane[0] * VECTOR + e > position[0]:
                weight[e] = T.float32(HIDDEN)
            largest[0] = T.max(largest[0], weight[e])
        largest[0] = T.cuda.warp_max(largest[0], lanes)
        total[0] = T.float32(0)
        for e in T.unroll(VECTOR):
            weight[e] = T.exp(weight[e] - largest[0])
            total[0] = total[0] + weight[e]
        total[0] = T.cuda.warp_sum(total[0], lanes)
        # The first position's probability has to be 1, so the reciprocal is refined.
        inverse[0] = T.float32(1) / total[0]
        for _ in T.unroll(2):
            T.ptx.fma_f32(T.address_of(error[0]), -total[0], inverse[0], T.float32(1))
            T.ptx.fma_f32(T.address_of(inverse[0]), inverse[0], error[0], inverse[0])
        largest[0] = T.float32(0)
        for e in T.unroll(VECTOR):
            values[u, e] = T.cast(weight[e] * inverse[0], "bfloat16")
        for e in T.unroll(VECTOR):
            largest[0] = T.max(largest[0], T.cast(values[u, e], "float32"))
        if first[0] + u * (THREADS // lanes) < rows:
            for e in T.vectorized(VECTOR):
                out[first[0] + u * (THREADS // lanes), lane[0] * VECTOR + e] = values[u, e]
        largest[0] = T.cuda.warp_max(largest[0], 2)
        scale[0] = largest[0] * T.float32(1 / LARGEST_CODE)
        T.ptx.fma_f32(T.address_of(error[0]), T.float32(-LARGEST_CODE), scale[0], largest[0])
        T.ptx.fma_f32(T.address_of(scale[0]), error[0], T.float32(1 / LARGEST_CODE), scale[0])
        scale[0] = T.min(scale[0] * T.float32(LARGEST_SCALE * LARGEST_CODE), T.float32(LARGEST_SCALE))
        scale[0] = to_e4m3(scale[0])
        decode[0] = scale[0] * T.float32(PROBABILITY_DECODE)
        inverse[0] = T.float32(1) / decode[0]
        for _ in T.unroll(2):
            T.ptx.fma_f32(T.address_of(error[0]), -decode[0], inverse[0], T.float32(1))
            T.ptx.fma_f32(T.address_of(inverse[0]), inverse[0], error[0], inverse[0])
        inverse[0] = T.if_then_else(decode[0] > T.float32(0), inverse[0], T.float32(0))
        for e in T.unroll(VECTOR):
            y[0] = limited(T.cast(values[u, e], "float32") * inverse[0])
            values[u, e] = T.cast(to_e2m1(y[0]) * scale[0], "bfloat16")
        if first[0] + u * (THREADS // lanes) < rows:
            for e in T.vectorized(VECTOR):
                scores[first[0] + u * (THREADS // lanes), lane[0] * VECTOR + e] = values[u, e]


@T.jit
def value_cpu(x: T.handle, s: T.handle, o: T.handle, *, size: T.constexpr):
    rows = T.int32()
    source = T.match_buffer(x, (rows, size), "bfloat16")
    scales = T.match_buffer(s, (2,), "float32")
    out = T.match_buffer(o, (rows, size), "bfloat16")
    largest = T.alloc_buffer((1,), "float32", scope="local")
    scale = T.alloc_buffer((1,), "float32", scope="local")
    inverse = T.alloc_buffer((1,), "float32", scope="local")
    y = T.alloc_buffer((1,), "float32", scope="local")
    for i, e in T.grid(rows // BLOCK, size):
        largest[0] = T.float32(0)
        for r in T.serial(BLOCK):
            largest[0] = T.max(largest[0], T.abs(T.cast(source[i * BLOCK + r, e], "float32")))
        scale[0] = largest[0] / T.float32(LARGEST_CODE)
        scale[0] = T.min(scale[0] * scales[0], T.float32(LARGEST_SCALE))
        scale[0] = to_e4m3(scale[0])
        scale[0] = scale[0] * scales[1]
        inverse[0] = T.float32(0)
        if scale[0] > T.float32(0):
            inverse[0] = T.float32(1) / scale[0]
        scale[0] = scale[0] * T.float32(PROBABILITY_DECODE)
        for r in T.serial(BLOCK):
            y[0] = limited(T.cast(source[i * BLOCK + r, e], "float32") * inverse[0])
            out[i * BLOCK + r, e] = T.cast(to_e2m1(y[0]) * scale[0], "bfloat16")


@T.jit
def softmax_cpu(x: T.handle, q: T.handle, k: T.handle, o: T.handle, *, keys: T.constexpr, factor: T.constexpr):
    """Leaves the probabilities for `quantise_cpu`."""
    rows = T.int32()
    scores = T.match_buffer(x, (rows, keys), "bfloat16")
    q_scales = T.match_buffer(q, (2,), "float32")
    k_scales = T.match_buffer(k, (2,), "float32")
    out = T.match_buffer(o, (rows, keys), "bfloat16")
    weight = T.alloc_buffer((keys,), "float32", scope="local")
    largest = T.alloc_buffer((1,), "float32", scope="local")
    total = T.alloc_buffer((1,), "float32", scope="local")
    for row in T.serial(rows):
        largest[0] = T.float32(HIDDEN)
        for i in T.serial(row % keys + 1):
            weight[i] = T.cast(scores[row, i], "float32") * (q_scales[1] * k_scales[1] * T.float32(factor))
            largest[0] = T.max(largest[0], weight[i])
        total[0] = T.float32(0)
        for i in T.serial(row % keys + 1):
            weight[i] = T.exp(weight[i] - largest[0])
            total[0] = total[0] + weight[i]
        for i in T.serial(keys):
            out[row, i] = T.bfloat16(0)
        for i in T.serial(row % keys + 1):
            out[row, i] = T.cast(weight[i] / total[0], "bfloat16")


def compile_for(arch: str, sequence: int = 256, head_size: int = 128) -> list[tvm.runtime.Executable]:
    """Maximum (not for a CPU), global scale, queries and keys, values, softmax, for `arch` (`llvm`, `sm_90a`, ...);
    needs no GPU."""
    factor = head_size**-0.5
    if arch == "llvm":
        kernels = [encode_cpu.specialize(), quantise_cpu.specialize(), value_cpu.specialize(size=head_size)]
        kernels.append(softmax_cpu.specialize(keys=sequence, factor=factor))
        return [tvm.compile(tvm.IRModule({"main": kernel}), target="llvm") for kernel in kernels]
    assert sequence % BLOCK == 0 and sequence <= 32 * VECTOR
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    kernels = [kernel.specialize() for kernel in (maximum_cuda, encode_cuda, quantise_cuda)]
    kernels.append(value_cuda.specialize(size=head_size, lanes=head_size // VECTOR))
    kernels.append(softmax_cuda.specialize(keys=sequence, lanes=sequence // VECTOR, factor=factor))
    return [tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx") for kernel in kernels]


@cache
def kernels_for(device: torch.device, sequence: int, head_size: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return [executable["main"] for executable in compile_for(arch, sequence, head_size)]


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b of as many matrices, rounded to bfloat16."""
    return torch.bmm(a, b) if a.is_cuda else torch.bmm(a.float(), b.float()).to(a.dtype)


def solve(
    query_states: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor, attention_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    (batch, heads, sequence, head_size), device = query_states.shape, query_states.device
    kv = batch * key_states.shape[1]
    *maximum, encode, quantise, quantise_values, softmax = kernels_for(device, sequence, head_size)
    query, key, value = (torch.empty_like(x) for x in (query_states, key_states, value_states))
    numbers = torch.empty(3, 4, dtype=torch.float32, device=device)  # 16 bytes for each
    q_scales, k_scales, v_scales = numbers[0, :2], numbers[1, :2], numbers[2, :2]
    unit = VECTOR if maximum else BLOCK
    partial = torch.empty(PARTS, dtype=torch.float32, device=device) if maximum else None
    for x, scales in ((query_states, q_scales), (key_states, k_scales), (value_states, v_scales)):
        if maximum:
            maximum[0](x.view(-1, VECTOR), partial)
            encode(partial, scales)
        else:
            encode(x.view(-1, VECTOR), scales)
    quantise(query_states.view(-1, unit), q_scales, query.view(-1, unit))
    quantise(key_states.view(-1, unit), k_scales, key.view(-1, unit))
    quantise_values(value_states.view(-1, head_size), v_scales, value.view(-1, head_size))
    key, value = key.view(kv, sequence, head_size), value.view(kv, sequence, head_size)
    scores = product(query.view(kv, -1, head_size), key.transpose(1, 2))
    probabilities = query.new_empty(batch, heads, sequence, sequence)
    softmax(scores.view(-1, sequence), q_scales, k_scales, probabilities.view(-1, sequence))
    if not maximum:
        ones = torch.tensor([LARGEST_SCALE * LARGEST_CODE, PROBABILITY_DECODE])
        quantise(probabilities.view(-1, BLOCK), ones, scores.view(-1, BLOCK))
    return product(scores, value).view(query.shape), probabilities
