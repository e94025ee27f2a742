"""p30, pointwise part of a ConvNeXt V2 block, in CuTe DSL. The two products stay with eager PyTorch, in float32.

1. GELU in place over the first product, with the sums of the squares of each channel over a part of an image's plane. A
   thread has 4 channels (16 bytes) and walks over pixels, several loads at a time.
2. Since the response is one factor for each channel of an image, and the normalisation is linear in h, it goes into the
   weights of the second product: every image gets its own, and grn_bias becomes part of the bias.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from torch.nn.functional import linear

VECTOR = 4  # float32 values in 16 bytes
THREADS = 256
ROWS = 4  # pixels whose loads a thread has under way
PARTS = 28  # thread blocks for an image's plane
SHARES = 4  # thread blocks for an image's weights
SPLIT = 128  # threads of these


@cute.kernel
def activate_kernel(hidden: cute.Tensor, pixels: cutlass.Int32, squares: cute.Tensor):
    """Thread block: one part of an image's plane; as many pixels at a time as fill the block."""
    thread, _, _ = cute.arch.thread_idx()
    part, image, _ = cute.arch.block_idx()
    inner = cutlass.const_expr(hidden.shape[1])
    lanes = cutlass.const_expr(inner // VECTOR)
    slots = cutlass.const_expr(THREADS // lanes)
    lane, slot = thread % lanes, thread // lanes
    share = (pixels + PARTS - 1) // PARTS
    start = part * share
    stop = cutlass.min(start + share, pixels)
    x = cute.make_rmem_tensor((VECTOR, ROWS), cutlass.Float32)
    total = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    total.fill(0.0)
    for step in cutlass.range((share + slots * ROWS - 1) // (slots * ROWS)):
        first = start + step * slots * ROWS + slot
        x.fill(0.0)
        for r in cutlass.range_constexpr(ROWS):
            if first + r * slots < stop:
                row = hidden[image * pixels + first + r * slots, None]
                cute.autovec_copy(cute.local_tile(row, (VECTOR,), (lane,)), x[None, r])
        values = x.load()
        x.store(0.5 * values * (1.0 + cute.math.erf(values * 0.7071067811865476)))
        for r in cutlass.range_constexpr(ROWS):
            for e in cutlass.range_constexpr(VECTOR):
                total[e] += x[e, r] * x[e, r]
            if first + r * slots < stop:
                row = hidden[image * pixels + first + r * slots, None]
                cute.autovec_copy(x[None, r], cute.local_tile(row, (VECTOR,), (lane,)))
    layout = cute.make_layout((slots, inner), stride=(inner, 1))
    shared = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.Float32, layout, 16)
    cute.autovec_copy(total, cute.local_tile(shared[slot, None], (VECTOR,), (lane,)))
    cute.arch.sync_threads()
    if slot == 0:
        for s in cutlass.range_constexpr(1, slots):
            for e in cutlass.range_constexpr(VECTOR):
                total[e] += shared[s, lane * VECTOR + e]
        cute.autovec_copy(total, cute.local_tile(squares[image * PARTS + part, None], (VECTOR,), (lane,)))


@cute.kernel
def fold_kernel(
    squares: cute.Tensor,
    grn_weight: cute.Tensor,
    grn_bias: cute.Tensor,
    weight: cute.Tensor,
    bias: cute.Tensor,
    eps: cutlass.Float32,
    scaled: cute.Tensor,
    folded: cute.Tensor,
):
    """Thread block: a share of the rows of one image's weights; a thread has up to 4 columns of them."""
    thread, _, _ = cute.arch.thread_idx()
    share, image, _ = cute.arch.block_idx()
    channels, inner = cutlass.const_expr(weight.shape[0]), cutlass.const_expr(weight.shape[1])
    rows = cutlass.const_expr(channels // SHARES)
    warps = cutlass.const_expr(SPLIT // cute.arch.WARP_SIZE)
    shared = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(warps), 16)
    parts = cute.make_rmem_tensor((VECTOR, PARTS), cutlass.Float32)
    x = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    factor = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
    warp, lane = thread // cute.arch.WARP_SIZE, thread % cute.arch.WARP_SIZE
    parts.fill(0.0)
    if thread * VECTOR < inner:
        for part in cutlass.range_constexpr(PARTS):
            tile = cute.local_tile(squares[image * PARTS + part, None], (VECTOR,), (thread,))
            cute.autovec_copy(tile, parts[None, part])
    factor.fill(0.0)
    for part in cutlass.range_constexpr(PARTS):
        factor.store(factor.load() + parts[None, part].load())
    factor.store(cute.math.sqrt(factor.load()))
    total = cute.arch.warp_reduction_sum(factor.load().reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0))
    if lane == 0:
        shared[warp] = total
    cute.arch.sync_threads()
    total = cutlass.Float32(0.0)
    for w in cutlass.range_constexpr(warps):
        total += shared[w]
    total = total * (1.0 / inner) + eps
    if thread * VECTOR < inner:
        cute.autovec_copy(cute.local_tile(grn_weight, (VECTOR,), (thread,)), x)
        factor.store(1.0 + x.load() * (factor.load() / total))
        for r in cutlass.range_constexpr(rows):
            cute.autovec_copy(cute.local_tile(weight[share * rows + r, None], (VECTOR,), (thread,)), x)
            x.store(x.load() * factor.load())
            row = scaled[image * channels + share * rows + r, None]
            cute.autovec_copy(x, cute.local_tile(row, (VECTOR,), (thread,)))
    if image == 0:  # the bias is the same for all images: a warp takes every fourth row of the share
        for step in cutlass.range((rows + warps - 1) // warps):
            r = step * warps + warp
            total = cutlass.Float32(0.0)
            if r < rows:
                for c in cutlass.range_constexpr(inner // cute.arch.WARP_SIZE):
                    column = c * cute.arch.WARP_SIZE + lane
                    total += weight[share * rows + r, column] * grn_bias[column]
            total = cute.arch.warp_reduction_sum(total)
            if lane == 0 and r < rows:
                folded[share * rows + r] = total + bias[share * rows + r]


@cute.jit
def activate(hidden: cute.Tensor, images: cutlass.Int32, pixels: cutlass.Int32, squares: cute.Tensor, stream):
    activate_kernel(hidden, pixels, squares).launch(grid=(PARTS, images, 1), block=(THREADS, 1, 1), stream=stream)


@cute.jit
def fold(
    squares: cute.Tensor,
    grn_weight: cute.Tensor,
    grn_bias: cute.Tensor,
    weight: cute.Tensor,
    bias: cute.Tensor,
    eps: cutlass.Float32,
    images: cutlass.Int32,
    scaled: cute.Tensor,
    folded: cute.Tensor,
    stream,
):
    fold_kernel(squares, grn_weight, grn_bias, weight, bias, eps, scaled, folded).launch(
        grid=(SHARES, images, 1), block=(SPLIT, 1, 1), stream=stream
    )


def compile_for(arch: str, channels: int = 128, inner: int = 512):
    """The two kernels for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    assert THREADS * VECTOR % inner == 0, "whole pixels must fill a thread block"
    assert inner % 32 == 0, "a warp sums whole rows"
    assert inner <= SPLIT * VECTOR, "a thread block has all channels"
    assert channels % SHARES == 0, "shares are even"

    def fake(*shape: int):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(cutlass.Float32, shape, stride_order=order, assumed_align=16)

    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {arch}"
    count = cutlass.Int32(1)
    activating = cute.compile(
        activate, fake(cute.sym_int(), inner), count, count, fake(cute.sym_int(), inner), stream, options=options
    )
    folding = cute.compile(
        fold,
        fake(cute.sym_int(), inner),
        fake(inner),
        fake(inner),
        fake(channels, inner),
        fake(channels),
        cutlass.Float32(0.0),
        count,
        fake(cute.sym_int(), inner),
        fake(channels),
        stream,
        options=options,
    )
    return activating, folding


@cache
def kernels_for(device: torch.device, channels: int, inner: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", channels, inner)


def solve(
    x: torch.Tensor,
    pwconv1_weight: torch.Tensor,
    pwconv1_bias: torch.Tensor,
    grn_weight: torch.Tensor,
    grn_bias: torch.Tensor,
    pwconv2_weight: torch.Tensor,
    pwconv2_bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    images, (channels, inner) = x.shape[0], pwconv2_weight.shape
    activating, folding = kernels_for(x.device, channels, inner)
    hidden = linear(x, pwconv1_weight, pwconv1_bias).view(-1, inner)
    pixels = hidden.shape[0] // images
    squares = x.new_empty(images * PARTS, inner)
    activating(hidden, images, pixels, squares)
    scaled, bias = x.new_empty(images * channels, inner), torch.empty_like(pwconv2_bias)
    grn_weight, grn_bias = grn_weight.view(inner), grn_bias.view(inner)
    folding(squares, grn_weight, grn_bias, pwconv2_weight, pwconv2_bias, eps, images, scaled, bias)
    hidden, scaled = hidden.view(images, pixels, inner), scaled.view(images, channels, inner)
    return torch.baddbmm(bias, hidden, scaled.mT).view(x.shape)
