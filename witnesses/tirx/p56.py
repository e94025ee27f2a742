"""p56, latent attention's keys and values in FP8, in TIRx. The two products stay with eager PyTorch.

CUDA: two kernels replace hidden states and weights by what their FP8 codes and scales stand for, rounded to bfloat16,
which is far finer than E4M3. Another does the same with the first product's latents after normalising them: a warp has
a token, 16 threads with 8 values (16 bytes) each have a block. The rotary part is a view of the product. CPU: the same
for blocks of any height, in plain loops, with operands in float32.
"""

from functools import cache

import torch
import tvm
from tvm.script import tirx as T  # noqa: N812

BLOCK = 128
VECTOR = 8
LANES = BLOCK // VECTOR
THREADS = 256
ROWS = THREADS // LANES  # rows of 128 that a thread block has at a time
PASSES = BLOCK // ROWS  # until a thread block has seen a weight block
UNROLL = 4  # rows of 128 that a thread has a share of
SMALLEST_SCALE = 1e-12
ROTARY = 64
HEAD_FEATURES = 256


def e4m3(y):
    """The E4M3 value nearest to y, as a float32; y beyond ±448 saturates. An expression, for any target."""
    bits = T.reinterpret("uint32", T.min(T.max(y, T.float32(-448)), T.float32(448)))
    magnitude = bits & T.uint32(0x7FFFFFFF)
    odd = (magnitude >> T.uint32(20)) & T.uint32(1)
    normal = T.reinterpret("float32", (magnitude + T.uint32(0x7FFFF) + odd) & T.uint32(0xFFF00000))
    # Below 2^-6 the grid has the constant step 2^-9, which is the step of float32 at 2^14.
    steps = T.reinterpret("uint32", T.reinterpret("float32", magnitude) + T.float32(16384)) & T.uint32(0xFF)
    subnormal = T.cast(steps, "float32") * T.float32(2**-9)
    rounded = T.if_then_else(magnitude < T.uint32(0x3C800000), subnormal, normal)
    return T.if_then_else(bits >= T.uint32(0x80000000), -rounded, rounded)


def scale_of(largest):
    return T.max(largest / T.float32(448), T.float32(SMALLEST_SCALE))


def normalised(z, square, eps, weight):
    """An element of a latent, given the mean of the latent's squares."""
    return T.cast(z, "float32") * T.rsqrt(square + eps) * T.cast(weight, "float32")


@T.jit
def activation_cuda(x: T.handle, y: T.handle):
    blocks = T.int32()
    source = T.match_buffer(x, (blocks, BLOCK), "bfloat16")
    target = T.match_buffer(y, (blocks, BLOCK), "bfloat16")
    T.device_entry()
    group = T.cta_id([T.ceildiv(blocks, ROWS * UNROLL)])
    thread = T.thread_id([THREADS])
    values = T.alloc_local((UNROLL, VECTOR), "bfloat16")
    first = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    largest = T.alloc_local((1,), "float32")
    scale = T.alloc_local((2,), "float32")
    first[0] = group * (ROWS * UNROLL) + thread // LANES
    lane[0] = thread % LANES
    for u in T.unroll(UNROLL):
        for e in T.unroll(VECTOR):
            values[u, e] = T.bfloat16(0)
        if first[0] + u * ROWS < blocks:
            for e in T.vectorized(VECTOR):
                values[u, e] = source[first[0] + u * ROWS, lane[0] * VECTOR + e]
    for u in T.unroll(UNROLL):
        largest[0] = T.float32(0)
        for e in T.unroll(VECTOR):
            largest[0] = T.max(largest[0], T.abs(T.cast(values[u, e], "float32")))
        largest[0] = T.cuda.warp_max(largest[0], LANES)
        scale[0] = scale_of(largest[0])
        scale[1] = T.float32(1) / scale[0]
        for e in T.unroll(VECTOR):
            values[u, e] = T.cast(e4m3(T.cast(values[u, e], "float32") * scale[1]) * scale[0], "bfloat16")
        if first[0] + u * ROWS < blocks:
            for e in T.vectorized(VECTOR):
                target[first[0] + u * ROWS, lane[0] * VECTOR + e] = values[u, e]


@T.jit
def weight_cuda(x: T.handle, y: T.handle, *, columns: T.constexpr):
    rows = T.int32()
    source = T.match_buffer(x, (rows, columns), "bfloat16")
    target = T.match_buffer(y, (rows, columns), "bfloat16")
    T.device_entry()
    column, row = T.cta_id([columns // BLOCK, rows // BLOCK])
    thread = T.thread_id([THREADS])
    values = T.alloc_local((PASSES, VECTOR), "bfloat16")
    first = T.alloc_local((1,), "int32")
    lane = T.alloc_local((1,), "int32")
    largest = T.alloc_local((1,), "float32")
    scale = T.alloc_local((2,), "float32")
    partial = T.alloc_shared((THREADS // 32,), "float32")
    first[0] = row * BLOCK + thread // LANES
    lane[0] = column * LANES + thread % LANES
    largest[0] = T.float32(0)
    for p in T.unroll(PASSES):
        for e in T.vectorized(VECTOR):
            values[p, e] = source[first[0] + p * ROWS, lane[0] * VECTOR + e]
    for p in T.unroll(PASSES):
        for e in T.unroll(VECTOR):
            largest[0] = T.max(largest[0], T.abs(T.cast(values[p, e], "float32")))
    largest[0] = T.cuda.warp_max(largest[0])
    if thread % 32 == 0:
        partial[thread // 32] = largest[0]
    T.cuda.cta_sync()
    for k in T.unroll(THREADS // 32):
        largest[0] = T.max(largest[0], partial[k])
    scale[0] = scale_of(largest[0])
    scale[1] = T.float32(1) / scale[0]
    for p in T.unroll(PASSES):
        for e in T.unroll(VECTOR):
            values[p, e] = T.cast(e4m3(T.cast(values[p, e], "float32") * scale[1]) * scale[0], "bfloat16")
        for e in T.vectorized(VECTOR):
            target[first[0] + p * ROWS, lane[0] * VECTOR + e] = values[p, e]


@T.jit
def quantise_cpu(x: T.handle, y: T.handle, *, columns: T.constexpr, height: T.constexpr):
    rows = T.int32()
    source = T.match_buffer(x, (rows, columns), "bfloat16")
    target = T.match_buffer(y, (rows, columns), "float32")
    largest = T.alloc_buffer((1,), "float32", scope="local")
    for row, column in T.grid(rows // height, columns // BLOCK):
        largest[0] = T.float32(0)
        for r, c in T.grid(height, BLOCK):
            largest[0] = T.max(largest[0], T.abs(T.cast(source[row * height + r, column * BLOCK + c], "float32")))
        for r, c in T.grid(height, BLOCK):
            target[row * height + r, column * BLOCK + c] = e4m3(
                T.cast(source[row * height + r, column * BLOCK + c], "float32") / scale_of(largest[0])
            ) * scale_of(largest[0])


@T.jit
def latent_cuda(
    c: T.handle,
    w: T.handle,
    eps: T.float32,
    o: T.handle,
    *,
    latent: T.constexpr,
    padded: T.constexpr,
    chunks: T.constexpr,
):
    tokens = T.int32()
    compressed = T.match_buffer(c, (tokens, padded), "bfloat16")
    weight = T.match_buffer(w, (latent,), "bfloat16")
    latents = T.match_buffer(o, (tokens, latent), "bfloat16")
    T.device_entry()
    group = T.cta_id([T.ceildiv(tokens, THREADS // 32)])
    thread = T.thread_id([THREADS])
    x = T.alloc_local((chunks, VECTOR), "bfloat16")
    weights = T.alloc_local((VECTOR,), "bfloat16")
    normal = T.alloc_local((VECTOR,), "float32")
    token = T.alloc_local((1,), "int32")
    square = T.alloc_local((1,), "float32")
    largest = T.alloc_local((1,), "float32")
    scale = T.alloc_local((2,), "float32")
    token[0] = group * (THREADS // 32) + thread // 32
    square[0] = T.float32(0)
    for k in T.unroll(chunks):
        for e in T.unroll(VECTOR):
            x[k, e] = T.bfloat16(0)
        if token[0] < tokens:
            for e in T.vectorized(VECTOR):
                x[k, e] = compressed[token[0], (k * 32 + thread % 32) * VECTOR + e]
        for e in T.unroll(VECTOR):
            square[0] = square[0] + T.cast(x[k, e], "float32") * T.cast(x[k, e], "float32")
    square[0] = T.cuda.warp_sum(square[0])
    square[0] = square[0] * T.float32(1 / latent)
    for k in T.unroll(chunks):
        for e in T.vectorized(VECTOR):
            weights[e] = weight[(k * 32 + thread % 32) * VECTOR + e]
        largest[0] = T.float32(0)
        for e in T.unroll(VECTOR):
            normal[e] = normalised(x[k, e], square[0], eps, weights[e])
            largest[0] = T.max(largest[0], T.abs(normal[e]))
        largest[0] = T.cuda.warp_max(largest[0], LANES)
        scale[0] = scale_of(largest[0])
        scale[1] = T.float32(1) / scale[0]
        for e in T.unroll(VECTOR):
            x[k, e] = T.cast(e4m3(normal[e] * scale[1]) * scale[0], "bfloat16")
        if token[0] < tokens:
            for e in T.vectorized(VECTOR):
                latents[token[0], (k * 32 + thread % 32) * VECTOR + e] = x[k, e]


@T.jit
def latent_cpu(c: T.handle, w: T.handle, eps: T.float32, o: T.handle, *, latent: T.constexpr, padded: T.constexpr):
    tokens = T.int32()
    compressed = T.match_buffer(c, (tokens, padded), "bfloat16")
    weight = T.match_buffer(w, (latent,), "bfloat16")
    latents = T.match_buffer(o, (tokens, latent), "float32")
    normal = T.alloc_buffer((BLOCK,), "float32", scope="local")
    square = T.alloc_buffer((1,), "float32", scope="local")
    largest = T.alloc_buffer((1,), "float32", scope="local")
    for token in T.serial(tokens):
        square[0] = T.float32(0)
        for i in T.serial(latent):
            square[0] = square[0] + T.cast(compressed[token, i], "float32") * T.cast(compressed[token, i], "float32")
        square[0] = square[0] * T.float32(1 / latent)
        for block in T.serial(latent // BLOCK):
            largest[0] = T.float32(0)
            for i in T.serial(BLOCK):
                normal[i] = normalised(compressed[token, block * BLOCK + i], square[0], eps, weight[block * BLOCK + i])
                largest[0] = T.max(largest[0], T.abs(normal[i]))
            for i in T.serial(BLOCK):
                latents[token, block * BLOCK + i] = e4m3(normal[i] / scale_of(largest[0])) * scale_of(largest[0])


def compile_for(arch: str, hidden: int = 7168, latent: int = 512, padded: int = 640) -> list[tvm.runtime.Executable]:
    """For activations, for both weights, and for latents, for `arch` (`llvm`, `sm_90a`, ...); needs no GPU."""
    sizes = {"latent": latent, "padded": padded}
    if arch == "llvm":
        shapes = [(hidden, 1), (hidden, BLOCK), (latent, BLOCK)]
        kernels = [quantise_cpu.specialize(columns=columns, height=height) for columns, height in shapes]
        kernels.append(latent_cpu.specialize(**sizes))
        return [tvm.compile(tvm.IRModule({"main": kernel}), target="llvm") for kernel in kernels]
    assert latent % (32 * VECTOR) == 0
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    kernels = [activation_cuda.specialize()]
    kernels += [weight_cuda.specialize(columns=columns) for columns in (hidden, latent)]
    kernels.append(latent_cuda.specialize(**sizes, chunks=latent // (32 * VECTOR)))
    return [tvm.compile(tvm.IRModule({"main": kernel}), target=target, tir_pipeline="tirx") for kernel in kernels]


@cache
def kernels_for(device: torch.device, hidden: int, latent: int, padded: int):
    arch = "llvm"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}a"
    return [executable["main"] for executable in compile_for(arch, hidden, latent, padded)]


def solve(
    hidden_states: torch.Tensor,
    kv_a_proj_weight: torch.Tensor,
    kv_a_layernorm_weight: torch.Tensor,
    kv_b_proj_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    (batch, sequence, hidden), device = hidden_states.shape, hidden_states.device
    padded, latent = len(kv_a_proj_weight), len(kv_a_layernorm_weight)
    quantise_activations, quantise_a, quantise_b, normalise = kernels_for(device, hidden, latent, padded)
    dtype = torch.bfloat16 if hidden_states.is_cuda else torch.float32
    tokens = torch.empty(batch * sequence, hidden, dtype=dtype, device=device)
    width = BLOCK if hidden_states.is_cuda else hidden
    quantise_activations(hidden_states.view(-1, width), tokens.view(-1, width))
    a_weight = torch.empty_like(kv_a_proj_weight, dtype=dtype)
    b_weight = torch.empty_like(kv_b_proj_weight, dtype=dtype)
    quantise_a(kv_a_proj_weight, a_weight)
    quantise_b(kv_b_proj_weight, b_weight)
    compressed = torch.mm(tokens, a_weight.t()).to(torch.bfloat16)
    latents = torch.empty(batch * sequence, latent, dtype=dtype, device=device)
    normalise(compressed, kv_a_layernorm_weight, eps, latents)
    kv = torch.mm(latents, b_weight.t()).to(torch.bfloat16).view(batch, sequence, -1, HEAD_FEATURES)
    return kv, compressed.view(batch, sequence, -1)[..., latent : latent + ROTARY]
