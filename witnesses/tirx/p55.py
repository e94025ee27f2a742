"""p55, embeddings with projected vision features, in TIRx. The product stays with eager PyTorch.

The features' largest magnitude gives their global scale; then features and weight are replaced by what their NVFP4
codes and scales stand for, rounded to bfloat16, and a last kernel takes every row from the product or from the table.
CUDA: a thread has 8 values; in the last kernel a thread block has a position, and its warps count the masked positions
before it. The divisions are refined until they are correctly rounded. CPU: plain loops.
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


@T.jit
def assemble_cuda(
    i: T.handle,
    m: T.handle,
    t: T.handle,
    p: T.handle,
    b: T.handle,
    o: T.handle,
    *,
    sequence: T.constexpr,
    hidden: T.constexpr,
    passes: T.constexpr,
    share: T.constexpr,
):
    batch = T.int32()
    vocabulary = T.int32()
    vision_tokens = T.int32()
    ids = T.match_buffer(i, (batch, sequence), "int64")
    mask = T.match_buffer(m, (batch, sequence), "uint8")
    table = T.match_buffer(t, (vocabulary, hidden), "bfloat16")
    projected = T.match_buffer(p, (batch, vision_tokens, hidden), "bfloat16")
    bias = T.match_buffer(b, (hidden,), "bfloat16")
    out = T.match_buffer(o, (batch, sequence, hidden), "bfloat16")
    T.device_entry()
    position, item = T.cta_id([sequence, batch])
    thread = T.thread_id([THREADS])
    x = T.alloc_local((passes, VECTOR), "bfloat16")
    bias_part = T.alloc_local((VECTOR,), "bfloat16")
    before = T.alloc_local((1,), "float32")
    rank = T.alloc_local((1,), "int32")
    row = T.alloc_local((1,), "int32")
    rank[0] = vision_tokens
    if mask[item, position] != T.uint8(0):  # alike for the thread block
        before[0] = T.float32(0)
        for e in T.unroll(share):
            if thread % 32 * share + e < position:
                before[0] = before[0] + T.cast(mask[item, thread % 32 * share + e], "float32")
        before[0] = T.cuda.warp_sum(before[0])
        rank[0] = T.cast(before[0], "int32")
    if rank[0] < vision_tokens:
        for k in T.unroll(passes):
            if k * THREADS + thread < hidden // VECTOR:
                for e in T.vectorized(VECTOR):
                    x[k, e] = projected[item, rank[0], (k * THREADS + thread) * VECTOR + e]
        for k in T.unroll(passes):
            if k * THREADS + thread < hidden // VECTOR:
                for e in T.vectorized(VECTOR):
                    bias_part[e] = bias[(k * THREADS + thread) * VECTOR + e]
                for e in T.unroll(VECTOR):
                    x[k, e] = T.cast(T.cast(x[k, e], "float32") + T.cast(bias_part[e], "float32"), "bfloat16")
    else:
        row[0] = T.cast(ids[item, position], "int32")
        for k in T.unroll(passes):
            if k * THREADS + thread < hidden // VECTOR:
                for e in T.vectorized(VECTOR):
                    x[k, e] = table[row[0], (k * THREADS + thread) * VECTOR + e]
    for k in T.unroll(passes):
        if k * THREADS + thread < hidden // VECTOR:
            for e in T.vectorized(VECTOR):
                out[item, position, (k * THREADS + thread) * VECTOR + e] = x[k, e]


@T.jit
def assemble_cpu(
    i: T.handle,
    m: T.handle,
    t: T.handle,
    p: T.handle,
    b: T.handle,
    o: T.handle,
    *,
    sequence: T.constexpr,
    hidden: T.constexpr,
):
    batch = T.int32()
    vocabulary = T.int32()
    vision_tokens = T.int32()
    ids = T.match_buffer(i, (batch, sequence), "int64")
    mask = T.match_buffer(m, (batch, sequence), "uint8")
    table = T.match_buffer(t, (vocabulary, hidden), "bfloat16")
    projected = T.match_buffer(p, (batch, vision_tokens, hidden), "bfloat16")
    bias = T.match_buffer(b, (hidden,), "bfloat16")
    out = T.match_buffer(o, (batch, sequence, hidden), "bfloat16")
    rank = T.alloc_buffer((1,), "int32", scope="local")
    row = T.alloc_buffer((1,), "int32", scope="local")
    for item in T.serial(batch):
        rank[0] = 0
        for position in T.serial(sequence):
            if mask[item, position] != T.uint8(0) and rank[0] < vision_tokens:
                for e in T.serial(hidden):
                    out[item, position, e] = T.cast(
                        T.cast(projected[item, rank[0], e], "float32") + T.cast(bias[e], "float32"), "bfloat16"
                    )
                rank[0] = rank[0] + 1
            else:
                row[0] = T.cast(ids[item, position], "int32")
                for e in T.serial(hidden):
                    out[item, position, e] = table[row[0], e]


def compile_for(arch: str, sequence: int = 1024, hidden: int = 8192) -> list[tvm.runtime.Executable]:
    """Maximum (not for a CPU), global scale, features, weight and rows, for `arch` (`llvm`, `sm_90a`, ...); needs no
    GPU."""
    sizes = {"sequence": sequence, "hidden": hidden}
    if arch == "llvm":
        kernels = [encode_cpu.specialize(), quantise_cpu.specialize(), dequantise_cpu.specialize()]
        kernels.append(assemble_cpu.specialize(**sizes))
        return [tvm.compile(tvm.IRModule({"main": kernel}), target="llvm") for kernel in kernels]
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    kernels = [kernel.specialize() for kernel in (maximum_cuda, encode_cuda, quantise_cuda, dequantise_cuda)]
    passes = -(-hidden // (VECTOR * THREADS))
    assert sequence % 32 == 0
    kernels.append(assemble_cuda.specialize(**sizes, passes=passes, share=sequence // 32))
    return [tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx") for kernel in kernels]


@cache
def kernels_for(device: torch.device, sequence: int, hidden: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return [executable["main"] for executable in compile_for(arch, sequence, hidden)]


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
    *maximum, encode, quantise, dequantise, assemble = kernels_for(input_ids.device, sequence, hidden)
    features, weight = torch.empty_like(vision_features), vision_features.new_empty(hidden, width)
    scales = torch.empty(2, dtype=torch.float32, device=features.device)
    codes = vision_proj_weight.view(torch.uint8).view(-1).view(torch.int32)
    if features.is_cuda:
        partial = torch.empty(PARTS, dtype=torch.float32, device=features.device)
        maximum[0](vision_features.view(-1, VECTOR), partial)
        encode(partial, scales)
        quantise(vision_features.view(-1, VECTOR), scales, features.view(-1, VECTOR))
        dequantise(codes, vision_proj_scale.view(torch.uint8).view(-1), vision_proj_global, weight.view(-1, VECTOR))
        projected = torch.mm(features.view(-1, width), weight.t())
    else:
        encode(vision_features.view(-1, VECTOR), scales)
        quantise(vision_features.view(-1, BLOCK), scales, features.view(-1, BLOCK))
        dequantise(codes, vision_proj_scale.view(torch.uint8).view(-1), vision_proj_global, weight.view(-1, VECTOR))
        projected = torch.mm(features.view(-1, width).float(), weight.float().t()).to(features.dtype)
    out = features.new_empty(batch, sequence, hidden)
    mask = vision_token_mask.view(torch.uint8)
    assemble(input_ids, mask, embed_weight, projected.view(batch, -1, hidden), vision_proj_bias, out)
    return out
