"""p61, NVFP4 feed-forward block, in TIRx. The products stay with eager PyTorch, on CUDA in bfloat16.

Operands are replaced by what their NVFP4 codes and scales stand for, rounded to bfloat16; an activation's largest
magnitude is found before. One product serves gate and up projection; a kernel gates its one half by the other, and the
result is quantised. CUDA: a thread has 8 values, the gating kernel notes each thread block's largest
magnitude, and the divisions are refined until they are correctly rounded. CPU: plain loops.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

BLOCK = 16
VECTOR = 8  # bfloat16 values in 16 bytes, and codes in 4
THREADS = 256
UNROLL = 4  # vectors that a thread has at a time
GATED = 3  # the same in the gating kernel, each twice
PARTS = 1024  # thread blocks that share the search for a maximum
LARGEST_CODE = 6.0
LARGEST_SCALE = 448.0


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


def gated(gate, up):
    gate = T.cast(gate, "float32")
    return T.cast(gate / (T.float32(1) + T.exp(-gate)) * T.cast(up, "float32"), "bfloat16")


@T.jit
def gate_cuda(b: T.handle, o: T.handle, p: T.handle, *, width: T.constexpr, steps: T.constexpr):
    """A row of `both` holds the gate's part, then the other. Every PARTS-th row belongs to a thread block."""
    rows = T.int32()
    both = T.match_buffer(b, (rows, 2 * width), "bfloat16")
    out = T.match_buffer(o, (rows, width), "bfloat16")
    partial = T.match_buffer(p, (PARTS,), "float32")
    T.device_entry()
    part = T.cta_id([PARTS])
    thread = T.thread_id([THREADS])
    gate = T.alloc_local((GATED, VECTOR), "bfloat16")
    up = T.alloc_local((GATED, VECTOR), "bfloat16")
    row = T.alloc_local((1,), "int32")
    largest = T.alloc_local((1,), "float32")
    shared = T.alloc_shared((THREADS // 32,), "float32")
    largest[0] = T.float32(0)
    for turn in T.serial(T.ceildiv(rows, PARTS)):
        row[0] = turn * PARTS + part
        if row[0] < rows:
            for step in T.unroll(steps):
                for u in T.unroll(GATED):
                    if (step * GATED + u) * THREADS + thread < width // VECTOR:
                        for e in T.vectorized(VECTOR):
                            gate[u, e] = both[row[0], ((step * GATED + u) * THREADS + thread) * VECTOR + e]
                        for e in T.vectorized(VECTOR):
                            up[u, e] = both[row[0], width + ((step * GATED + u) * THREADS + thread) * VECTOR + e]
                for u in T.unroll(GATED):
                    if (step * GATED + u) * THREADS + thread < width // VECTOR:
                        for e in T.unroll(VECTOR):
                            gate[u, e] = gated(gate[u, e], up[u, e])
                        for e in T.unroll(VECTOR):
                            largest[0] = T.max(largest[0], T.abs(T.cast(gate[u, e], "float32")))
                        for e in T.vectorized(VECTOR):
                            out[row[0], ((step * GATED + u) * THREADS + thread) * VECTOR + e] = gate[u, e]
    largest[0] = T.cuda.warp_max(largest[0])
    if thread % 32 == 0:
        shared[thread // 32] = largest[0]
    T.cuda.cta_sync()
    for k in T.unroll(THREADS // 32):
        largest[0] = T.max(largest[0], shared[k])
    if thread == 0:
        partial[part] = largest[0]


@T.jit
def gate_cpu(b: T.handle, o: T.handle, *, width: T.constexpr):
    rows = T.int32()
    both = T.match_buffer(b, (rows, 2 * width), "bfloat16")
    out = T.match_buffer(o, (rows, width), "bfloat16")
    for row, column in T.grid(rows, width):
        out[row, column] = gated(both[row, column], both[row, width + column])


def compile_for(arch: str, intermediate: int = 12288) -> list[tvm.runtime.Executable]:
    """Maximum (not for a CPU), global scale, activation, weight, gating, for `arch` (`llvm`, `sm_90a`, ...); needs no
    GPU."""
    if arch == "llvm":
        kernels = [kernel.specialize() for kernel in (encode_cpu, quantise_cpu, dequantise_cpu)]
        kernels.append(gate_cpu.specialize(width=intermediate))
        return [tvm.compile(tvm.IRModule({"main": kernel}), target="llvm") for kernel in kernels]
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    kernels = [kernel.specialize() for kernel in (maximum_cuda, encode_cuda, quantise_cuda, dequantise_cuda)]
    kernels.append(gate_cuda.specialize(width=intermediate, steps=-(-intermediate // (VECTOR * THREADS * GATED))))
    return [tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx") for kernel in kernels]


@cache
def kernels_for(device: torch.device, intermediate: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return [executable["main"] for executable in compile_for(arch, intermediate)]


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a bᵀ, rounded to bfloat16."""
    return torch.mm(a, b.t()) if a.is_cuda else torch.mm(a.float(), b.float().t()).to(a.dtype)


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
    *maximum, encode, quantise, dequantise, gate = kernels_for(x.device, intermediate)
    numbers = torch.empty(PARTS + 4, dtype=torch.float32, device=x.device)
    partial, scales = numbers[:PARTS], numbers[PARTS : PARTS + 2]
    unit = VECTOR if x.is_cuda else BLOCK

    weights, down = x.new_empty(2, intermediate, width), x.new_empty(width, intermediate)
    for codes, block_scales, factor, target in (
        (gate_weight, gate_block_scales, gate_global_scale, weights[0]),
        (up_weight, up_block_scales, up_global_scale, weights[1]),
        (down_weight, down_block_scales, down_global_scale, down),
    ):
        words = codes.view(torch.uint8).view(-1).view(torch.int32)
        dequantise(words, block_scales.view(torch.uint8).view(-1), factor, target.view(-1, VECTOR))

    tokens = torch.empty_like(x)
    if x.is_cuda:
        maximum[0](x.view(-1, VECTOR), partial)
        encode(partial, scales)
    else:
        encode(x.view(-1, VECTOR), scales)
    quantise(x.view(-1, unit), scales, tokens.view(-1, unit))
    both = product(tokens.view(-1, width), weights.view(-1, width))
    hidden = both.new_empty(len(both), intermediate)
    if x.is_cuda:
        gate(both, hidden, partial)
        encode(partial, scales)
    else:
        gate(both, hidden)
        encode(hidden.view(-1, VECTOR), scales)
    new_hidden = torch.empty_like(hidden)
    quantise(hidden.view(-1, unit), scales, new_hidden.view(-1, unit))
    return product(new_hidden, down).view(x.shape)
