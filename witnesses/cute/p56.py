"""p56, latent attention's keys and values in FP8, in CuTe DSL. The two products stay with eager PyTorch, in bfloat16.

Two kernels replace hidden states and weights by what their FP8 codes and scales stand for, rounded to bfloat16, which
is far finer than E4M3. Another does the same with the first product's latents after normalising them: a warp has a
token, 16 threads with 8 values (16 bytes) each have a block. The rotary part is a view of the product.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

BLOCK = 128
VECTOR = 8  # bfloat16 values in 16 bytes
LANES = BLOCK // VECTOR
THREADS = 256
ROWS = THREADS // LANES  # rows of 128 that a thread block has at a time
PASSES = BLOCK // ROWS  # until a thread block has seen a weight block
UNROLL = 4  # rows of 128 that a thread has a share of
LARGEST = 448.0
SMALLEST_SCALE = 1e-12
ROTARY = 64
HEAD_FEATURES = 256


@cute.jit
def largest_magnitude(x: cute.Tensor) -> cutlass.Float32:
    values = x.load().to(cutlass.Float32)
    largest = cutlass.Float32(0.0)
    for e in cutlass.range_constexpr(cute.size(x)):
        largest = cute.arch.fmax(largest, cute.arch.fmax(values[e], -values[e]))
    return largest


@cute.jit
def quantised(values: cute.TensorSSA, largest: cutlass.Float32):
    """What the codes of 8 values stand for, in bfloat16, given the largest magnitude of their block."""
    scale = cute.arch.fmax(largest / LARGEST, cutlass.Float32(SMALLEST_SCALE))
    codes = cute.make_rmem_tensor(VECTOR, cutlass.Float8E4M3FN)
    # The reciprocal may move a value that lies half way between two codes; the conversion saturates at 448.
    codes.store((values * (1.0 / scale)).to(cutlass.Float8E4M3FN))
    return (codes.load().to(cutlass.Float32) * scale).to(cutlass.BFloat16)


@cute.jit
def quantise(x: cute.Tensor, largest: cutlass.Float32):
    """Replace 8 values by what their codes stand for."""
    x.store(quantised(x.load().to(cutlass.Float32), largest))


@cute.kernel
def activation_kernel(source: cute.Tensor, target: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    group, _, _ = cute.arch.block_idx()
    first, lane = group * (ROWS * UNROLL) + thread // LANES, thread % LANES
    x = cute.make_rmem_tensor((VECTOR, UNROLL), cutlass.BFloat16)
    x.fill(0.0)
    for u in cutlass.range_constexpr(UNROLL):
        if first + u * ROWS < source.shape[0]:
            cute.autovec_copy(cute.local_tile(source[first + u * ROWS, None], (VECTOR,), (lane,)), x[None, u])
    for u in cutlass.range_constexpr(UNROLL):
        quantise(x[None, u], cute.arch.warp_reduction_max(largest_magnitude(x[None, u]), threads_in_group=LANES))
    for u in cutlass.range_constexpr(UNROLL):
        if first + u * ROWS < source.shape[0]:
            cute.autovec_copy(x[None, u], cute.local_tile(target[first + u * ROWS, None], (VECTOR,), (lane,)))


@cute.kernel
def weight_kernel(source: cute.Tensor, target: cute.Tensor):
    """A thread block holds a block of 128 × 128 values in registers."""
    thread, _, _ = cute.arch.thread_idx()
    column, row, _ = cute.arch.block_idx()
    lane, first = column * LANES + thread % LANES, row * BLOCK + thread // LANES
    x = cute.make_rmem_tensor((VECTOR, PASSES), cutlass.BFloat16)
    for p in cutlass.range_constexpr(PASSES):
        cute.autovec_copy(cute.local_tile(source[first + p * ROWS, None], (VECTOR,), (lane,)), x[None, p])
    largest = cute.arch.warp_reduction_max(largest_magnitude(x))
    warps = cutlass.const_expr(THREADS // cute.arch.WARP_SIZE)
    partial = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(warps), 16)
    if thread % cute.arch.WARP_SIZE == 0:
        partial[thread // cute.arch.WARP_SIZE] = largest
    cute.arch.sync_threads()
    for w in cutlass.range_constexpr(warps):
        largest = cute.arch.fmax(largest, partial[w])
    for p in cutlass.range_constexpr(PASSES):
        quantise(x[None, p], largest)
        cute.autovec_copy(x[None, p], cute.local_tile(target[first + p * ROWS, None], (VECTOR,), (lane,)))


@cute.kernel
def latent_kernel(compressed: cute.Tensor, weight: cute.Tensor, eps: cutlass.Float32, latents: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    group, _, _ = cute.arch.block_idx()
    token, lane = group * (THREADS // cute.arch.WARP_SIZE) + thread // cute.arch.WARP_SIZE, thread % cute.arch.WARP_SIZE
    width = cutlass.const_expr(weight.shape[0])
    chunks = cutlass.const_expr(width // (cute.arch.WARP_SIZE * VECTOR))
    x = cute.make_rmem_tensor((VECTOR, chunks), cutlass.BFloat16)
    w = cute.make_rmem_tensor((VECTOR, chunks), cutlass.BFloat16)
    x.fill(0.0)
    for c in cutlass.range_constexpr(chunks):
        place = c * cute.arch.WARP_SIZE + lane
        cute.autovec_copy(cute.local_tile(weight, (VECTOR,), (place,)), w[None, c])
        if token < latents.shape[0]:
            cute.autovec_copy(cute.local_tile(compressed[token, None], (VECTOR,), (place,)), x[None, c])
    z = x.load().to(cutlass.Float32)
    total = cute.arch.warp_reduction_sum((z * z).reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0))
    normal = cute.make_rmem_tensor((VECTOR, chunks), cutlass.Float32)
    normal.store(z * cute.math.rsqrt(total / width + eps) * w.load().to(cutlass.Float32))
    for c in cutlass.range_constexpr(chunks):
        largest = cute.arch.warp_reduction_max(largest_magnitude(normal[None, c]), threads_in_group=LANES)
        x[None, c].store(quantised(normal[None, c].load(), largest))
        if token < latents.shape[0]:
            place = c * cute.arch.WARP_SIZE + lane
            cute.autovec_copy(x[None, c], cute.local_tile(latents[token, None], (VECTOR,), (place,)))


@cute.jit
def quantise_all(
    blocks: cute.Tensor,
    new_blocks: cute.Tensor,
    a_weight: cute.Tensor,
    new_a_weight: cute.Tensor,
    b_weight: cute.Tensor,
    new_b_weight: cute.Tensor,
    stream,
):
    activation_kernel(blocks, new_blocks).launch(
        grid=(cute.ceil_div(blocks.shape[0], ROWS * UNROLL), 1, 1), block=(THREADS, 1, 1), stream=stream
    )
    weight_kernel(a_weight, new_a_weight).launch(
        grid=(a_weight.shape[1] // BLOCK, a_weight.shape[0] // BLOCK, 1), block=(THREADS, 1, 1), stream=stream
    )
    weight_kernel(b_weight, new_b_weight).launch(
        grid=(b_weight.shape[1] // BLOCK, b_weight.shape[0] // BLOCK, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.jit
def normalise(compressed: cute.Tensor, weight: cute.Tensor, eps: cutlass.Float32, latents: cute.Tensor, stream):
    latent_kernel(compressed, weight, eps, latents).launch(
        grid=(cute.ceil_div(latents.shape[0], THREADS // cute.arch.WARP_SIZE), 1, 1),
        block=(THREADS, 1, 1),
        stream=stream,
    )


def compile_for(arch: str, hidden: int = 7168, latent: int = 512, padded: int = 640):
    """The two functions for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert latent % (cute.arch.WARP_SIZE * VECTOR) == 0
    blocks, rows, tokens = (cute.sym_int() for _ in range(3))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {arch}"

    def fake(*shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(cutlass.BFloat16, shape, stride_order=order, assumed_align=16)

    shapes = [(blocks, BLOCK), (padded, hidden), (rows, latent)]
    operands = [fake(*shape) for shape in shapes for _ in "st"]
    first = cute.compile(quantise_all, *operands, stream, options=options)
    norm = (fake(tokens, padded), fake(latent), cutlass.Float32(0.0), fake(tokens, latent))
    return first, cute.compile(normalise, *norm, stream, options=options)


@cache
def kernels_for(device: torch.device, hidden: int, latent: int, padded: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", hidden, latent, padded)


def solve(
    hidden_states: torch.Tensor,
    kv_a_proj_weight: torch.Tensor,
    kv_a_layernorm_weight: torch.Tensor,
    kv_b_proj_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, sequence, hidden = hidden_states.shape
    padded, latent = len(kv_a_proj_weight), len(kv_a_layernorm_weight)
    quantise_operands, normalise_latents = kernels_for(hidden_states.device, hidden, latent, padded)
    tokens = torch.empty_like(hidden_states)
    a_weight, b_weight = torch.empty_like(kv_a_proj_weight), torch.empty_like(kv_b_proj_weight)
    quantise_operands(
        *(hidden_states.view(-1, BLOCK), tokens.view(-1, BLOCK)),
        *(kv_a_proj_weight, a_weight, kv_b_proj_weight, b_weight),
    )
    compressed = torch.mm(tokens.view(-1, hidden), a_weight.t())
    latents = compressed.new_empty(len(compressed), latent)
    normalise_latents(compressed, kv_a_layernorm_weight, eps, latents)
    kv = torch.mm(latents, b_weight.t()).view(batch, sequence, -1, HEAD_FEATURES)
    return kv, compressed.view(batch, sequence, -1)[..., latent : latent + ROTARY]
