"""p30, pointwise part of a ConvNeXt V2 block, in TIRx. The two products stay with eager PyTorch, in float32.

1. GELU in place over the first product, with the sums of the squares of each channel over a part of an image's plane.
2. Since the response is one factor for each channel of an image, and the normalisation is linear in h, it goes into the
   weights of the second product: every image gets its own, and grn_bias becomes part of the bias.

CUDA: a thread has 4 channels (16 bytes) and walks over pixels, several loads at a time. CPU: plain loops.
"""

from functools import cache

import torch
import tvm
from torch.nn.functional import linear
from tvm.script import tirx as T  # noqa: N812

VECTOR = 4
THREADS = 256
ROWS = 4  # pixels whose loads a thread has under way
PARTS = 28  # thread blocks for an image's plane
SHARES = 4  # thread blocks for an image's weights
SPLIT = 128  # threads of these


def gelu(x):
    return T.float32(0.5) * x * (T.float32(1) + T.erf(x * T.float32(0.7071067811865476)))


@T.jit
def activate_cuda(h: T.handle, q: T.handle, *, inner: T.constexpr, lanes: T.constexpr, slots: T.constexpr):
    """Thread block: one part of an image's plane; `slots` pixels at a time, `lanes` threads for each."""
    images = T.int32()
    pixels = T.int32()
    hidden = T.match_buffer(h, (images, pixels, inner), "float32")
    squares = T.match_buffer(q, (images, PARTS, inner), "float32")
    T.device_entry()
    part, image = T.cta_id([PARTS, images])
    thread = T.thread_id([THREADS])
    x = T.alloc_local((ROWS, VECTOR), "float32")
    total = T.alloc_local((VECTOR,), "float32")
    shared = T.alloc_shared((slots, inner), "float32")
    lane = thread % lanes
    slot = thread // lanes
    share = (pixels + PARTS - 1) // PARTS
    stop = T.min(part * share + share, pixels)
    for e in T.unroll(VECTOR):
        total[e] = T.float32(0)
    for step in T.serial((share + slots * ROWS - 1) // (slots * ROWS)):
        for r in T.unroll(ROWS):
            for e in T.unroll(VECTOR):
                x[r, e] = T.float32(0)
            if part * share + (step * ROWS + r) * slots + slot < stop:
                for e in T.vectorized(VECTOR):
                    x[r, e] = hidden[image, part * share + (step * ROWS + r) * slots + slot, lane * VECTOR + e]
        for r in T.unroll(ROWS):
            for e in T.unroll(VECTOR):
                x[r, e] = gelu(x[r, e])
                total[e] = total[e] + x[r, e] * x[r, e]
        for r in T.unroll(ROWS):
            if part * share + (step * ROWS + r) * slots + slot < stop:
                for e in T.vectorized(VECTOR):
                    hidden[image, part * share + (step * ROWS + r) * slots + slot, lane * VECTOR + e] = x[r, e]
    for e in T.vectorized(VECTOR):
        shared[slot, lane * VECTOR + e] = total[e]
    T.cuda.cta_sync()
    if slot == 0:
        for s in T.unroll(1, slots):
            for e in T.unroll(VECTOR):
                total[e] = total[e] + shared[s, lane * VECTOR + e]
        for e in T.vectorized(VECTOR):
            squares[image, part, lane * VECTOR + e] = total[e]


@T.jit
def fold_cuda(
    q: T.handle,
    gw: T.handle,
    gb: T.handle,
    w: T.handle,
    b: T.handle,
    eps: T.float32,
    sw: T.handle,
    fb: T.handle,
    *,
    channels: T.constexpr,
    inner: T.constexpr,
    rows: T.constexpr,
):
    """Thread block: `rows` rows of one image's weights; a thread has up to 4 columns of them."""
    images = T.int32()
    squares = T.match_buffer(q, (images, PARTS, inner), "float32")
    grn_weight = T.match_buffer(gw, (inner,), "float32")
    grn_bias = T.match_buffer(gb, (inner,), "float32")
    weight = T.match_buffer(w, (channels, inner), "float32")
    bias = T.match_buffer(b, (channels,), "float32")
    scaled = T.match_buffer(sw, (images, channels, inner), "float32")
    folded = T.match_buffer(fb, (channels,), "float32")
    T.device_entry()
    share, image = T.cta_id([SHARES, images])
    thread = T.thread_id([SPLIT])
    x = T.alloc_local((VECTOR,), "float32")
    factor = T.alloc_local((VECTOR,), "float32")
    total = T.alloc_local((1,), "float32")
    shared = T.alloc_shared((SPLIT // 32,), "float32")
    for e in T.unroll(VECTOR):
        factor[e] = T.float32(0)
    if thread * VECTOR < inner:
        for part in T.unroll(PARTS):
            for e in T.vectorized(VECTOR):
                x[e] = squares[image, part, thread * VECTOR + e]
            for e in T.unroll(VECTOR):
                factor[e] = factor[e] + x[e]
    total[0] = T.float32(0)
    for e in T.unroll(VECTOR):
        factor[e] = T.sqrt(factor[e])
        total[0] = total[0] + factor[e]
    total[0] = T.cuda.warp_sum(total[0])
    if thread % 32 == 0:
        shared[thread // 32] = total[0]
    T.cuda.cta_sync()
    total[0] = T.float32(0)
    for k in T.unroll(SPLIT // 32):
        total[0] = total[0] + shared[k]
    total[0] = total[0] * T.float32(1 / inner) + eps
    if thread * VECTOR < inner:
        for e in T.vectorized(VECTOR):
            x[e] = grn_weight[thread * VECTOR + e]
        for e in T.unroll(VECTOR):
            factor[e] = T.float32(1) + x[e] * (factor[e] / total[0])
        for r in T.unroll(rows):
            for e in T.vectorized(VECTOR):
                x[e] = weight[share * rows + r, thread * VECTOR + e]
            for e in T.unroll(VECTOR):
                x[e] = x[e] * factor[e]
            for e in T.vectorized(VECTOR):
                scaled[image, share * rows + r, thread * VECTOR + e] = x[e]
    if image == 0:  # the bias is the same for all images: a warp takes every fourth row of the share
        for r in T.serial((rows + SPLIT // 32 - 1) // (SPLIT // 32)):
            total[0] = T.float32(0)
            if r * (SPLIT // 32) + thread // 32 < rows:
                for c in T.serial(inner // 32):
                    total[0] = (
                        total[0]
                        + weight[share * rows + r * (SPLIT // 32) + thread // 32, c * 32 + thread % 32]
                        * grn_bias[c * 32 + thread % 32]
                    )
            total[0] = T.cuda.warp_sum(total[0])
            if thread % 32 == 0 and r * (SPLIT // 32) + thread // 32 < rows:
                folded[share * rows + r * (SPLIT // 32) + thread // 32] = (
                    total[0] + bias[share * rows + r * (SPLIT // 32) + thread // 32]
                )


@T.jit
def activate_cpu(h: T.handle, q: T.handle, *, inner: T.constexpr):
    images = T.int32()
    pixels = T.int32()
    hidden = T.match_buffer(h, (images, pixels, inner), "float32")
    squares = T.match_buffer(q, (images, 1, inner), "float32")
    for image in T.serial(images):
        for c in T.serial(inner):
            squares[image, 0, c] = T.float32(0)
        for pixel, c in T.grid(pixels, inner):
            hidden[image, pixel, c] = gelu(hidden[image, pixel, c])
            squares[image, 0, c] = squares[image, 0, c] + hidden[image, pixel, c] * hidden[image, pixel, c]


@T.jit
def fold_cpu(
    q: T.handle,
    gw: T.handle,
    gb: T.handle,
    w: T.handle,
    b: T.handle,
    eps: T.float32,
    sw: T.handle,
    fb: T.handle,
    *,
    channels: T.constexpr,
    inner: T.constexpr,
):
    images = T.int32()
    squares = T.match_buffer(q, (images, 1, inner), "float32")
    grn_weight = T.match_buffer(gw, (inner,), "float32")
    grn_bias = T.match_buffer(gb, (inner,), "float32")
    weight = T.match_buffer(w, (channels, inner), "float32")
    bias = T.match_buffer(b, (channels,), "float32")
    scaled = T.match_buffer(sw, (images, channels, inner), "float32")
    folded = T.match_buffer(fb, (channels,), "float32")
    total = T.alloc_buffer((1,), "float32", scope="local")
    for image in T.serial(images):
        total[0] = T.float32(0)
        for c in T.serial(inner):
            total[0] = total[0] + T.sqrt(squares[image, 0, c])
        total[0] = total[0] * T.float32(1 / inner) + eps
        for row, c in T.grid(channels, inner):
            scaled[image, row, c] = weight[row, c] * (
                T.float32(1) + grn_weight[c] * (T.sqrt(squares[image, 0, c]) / total[0])
            )
    for row in T.serial(channels):
        total[0] = bias[row]
        for c in T.serial(inner):
            total[0] = total[0] + weight[row, c] * grn_bias[c]
        folded[row] = total[0]


def compile_for(arch: str, channels: int = 128, inner: int = 512) -> tvm.runtime.Executable:
    """The two kernels for `arch` (`llvm`, `sm_90a`, `sm_100a`, ...); needs no GPU."""
    if arch == "llvm":
        kernels = {
            "activate": activate_cpu.specialize(inner=inner),
            "fold": fold_cpu.specialize(channels=channels, inner=inner),
        }
        return tvm.compile(tvm.IRModule(kernels), target="llvm")
    assert THREADS * VECTOR % inner == 0, "whole pixels must fill a thread block"
    assert inner % 32 == 0, "a warp sums whole rows"
    assert inner <= SPLIT * VECTOR, "a thread block has all channels"
    assert channels % SHARES == 0, "shares are even"
    kernels = {
        "activate": activate_cuda.specialize(inner=inner, lanes=inner // VECTOR, slots=THREADS * VECTOR // inner),
        "fold": fold_cuda.specialize(channels=channels, inner=inner, rows=channels // SHARES),
    }
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    return tvm.compile(tvm.IRModule(kernels), target=target, tir_pipeline="tirx")


@cache
def kernels_for(device: torch.device, channels: int, inner: int):
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        executable = compile_for(f"sm_{major}{minor}a", channels, inner)
        return executable["activate_cuda"], executable["fold_cuda"], PARTS
    executable = compile_for("llvm", channels, inner)
    return executable["activate_cpu"], executable["fold_cpu"], 1


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
    activate, fold, parts = kernels_for(x.device, channels, inner)
    hidden = linear(x, pwconv1_weight, pwconv1_bias).view(images, -1, inner)
    squares = x.new_empty(images, parts, inner)
    activate(hidden, squares)
    scaled, bias = x.new_empty(images, channels, inner), torch.empty_like(pwconv2_bias)
    fold(squares, grn_weight.view(inner), grn_bias.view(inner), pwconv2_weight, pwconv2_bias, eps, scaled, bias)
    return torch.baddbmm(bias, hidden, scaled.mT).view(x.shape)
