"""p21, FP8 append to paged caches, in CuTe DSL.

Bytes must be exact: every step is one float32 operation as the problem states it, and the rounding to E4M3 is done on
the bits. A few threads share a head's vector, 8 values each; a thread block has one token's keys or values.
"""

from functools import cache

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

SMALLEST_SCALE = 1e-6
VECTOR = 8  # bfloat16 values in 16 bytes


@cute.jit
def e4m3(y: cutlass.Float32) -> cutlass.Uint8:
    """The E4M3 byte nearest to y, a float32 in ±448; a tie goes to the even one."""
    bits = y.bitcast(cutlass.Uint32)
    magnitude = bits & 0x7FFFFFFF
    # Normal values: round to three bits of significand, then move the exponent's bias from 127 to 7.
    code = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the grid has the constant step 2^-9, which is the step of float32 at 2^14.
    if magnitude < 0x3C800000:
        code = (magnitude.bitcast(cutlass.Float32) + 16384.0).bitcast(cutlass.Uint32) & 0xFF
    return (((bits >> 24) & 0x80) | code).to(cutlass.Uint8)


@cute.jit
def append_vector(source: cute.Tensor, target: cute.Tensor, scale_target: cute.Tensor, lanes: cutlass.Constexpr[int]):
    """Quantise one head's vector, of which this thread has 8 values; the first of its threads writes the scale."""
    thread, _, _ = cute.arch.thread_idx()
    head, lane = thread // lanes, thread % lanes
    x = cute.make_rmem_tensor(VECTOR, cutlass.BFloat16)
    codes = cute.make_rmem_tensor(VECTOR, cutlass.Uint8)
    cute.autovec_copy(cute.local_tile(source[head, None], (VECTOR,), (lane,)), x)
    values = x.load().to(cutlass.Float32)
    largest = cutlass.Float32(0.0)
    for e in cutlass.range_constexpr(VECTOR):
        largest = cute.arch.fmax(largest, cute.arch.fmax(values[e], -values[e]))
    largest = cute.arch.warp_reduction_max(largest, threads_in_group=lanes)
    scale = cute.arch.fmax(largest * cutlass.Float32(1 / 448), cutlass.Float32(SMALLEST_SCALE))
    inverse = cutlass.Float32(1.0) / scale
    for e in cutlass.range_constexpr(VECTOR):
        y = cute.arch.fmin(cute.arch.fmax(values[e] * inverse, cutlass.Float32(-448.0)), cutlass.Float32(448.0))
        codes[e] = e4m3(y)
    cute.autovec_copy(codes, cute.local_tile(target[head, None], (VECTOR,), (lane,)))
    if lane == 0:
        scale_target[head] = scale


@cute.kernel
def append_kernel(
    key: cute.Tensor,
    value: cute.Tensor,
    slots: cute.Tensor,
    key_cache: cute.Tensor,
    value_cache: cute.Tensor,
    k_scales: cute.Tensor,
    v_scales: cute.Tensor,
    lanes: cutlass.Constexpr[int],
):
    token, which, _ = cute.arch.block_idx()
    slot = slots[token].to(cutlass.Int32)
    page = cutlass.const_expr(key_cache.shape[1])
    if slot >= 0:
        place = (slot // page, slot % page)
        if which == 0:
            append_vector(key[token, None, None], key_cache[*place, None, None], k_scales[*place, None], lanes)
        else:
            append_vector(value[token, None, None], value_cache[*place, None, None], v_scales[*place, None], lanes)


@cute.jit
def append(
    key: cute.Tensor,
    value: cute.Tensor,
    slots: cute.Tensor,
    key_cache: cute.Tensor,
    value_cache: cute.Tensor,
    k_scales: cute.Tensor,
    v_scales: cute.Tensor,
    stream,
):
    lanes = cutlass.const_expr(key.shape[2] // VECTOR)
    append_kernel(key, value, slots, key_cache, value_cache, k_scales, v_scales, lanes).launch(
        grid=(key.shape[0], 2, 1), block=(lanes * key.shape[1], 1, 1), stream=stream
    )


def compile_for(arch: str, heads: int = 8, size: int = 128, page: int = 16):
    """The kernel for `arch` (`sm_90a`, `sm_100a`, ...); needs no GPU."""
    tokens, pages = cute.sym_int(), cute.sym_int()

    def fake(dtype, *shape: int):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    return cute.compile(
        append,
        fake(cutlass.BFloat16, tokens, heads, size),
        fake(cutlass.BFloat16, tokens, heads, size),
        fake(cutlass.Int64, tokens),
        fake(cutlass.Uint8, pages, page, heads, size),
        fake(cutlass.Uint8, pages, page, heads, size),
        fake(cutlass.Float32, pages, page, heads),
        fake(cutlass.Float32, pages, page, heads),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )


@cache
def kernel_for(device: torch.device, heads: int, size: int, page: int):
    major, minor = torch.cuda.get_device_capability(device)
    return compile_for(f"sm_{major}{minor}a", heads, size, page)


def solve(
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    k_scale_cache: torch.Tensor,
    v_scale_cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    kernel = kernel_for(key.device, key.shape[1], key.shape[2], key_cache.shape[1])
    kernel(key, value, slot_mapping, key_cache, value_cache, k_scale_cache, v_scale_cache)
    return key_cache, value_cache, k_scale_cache, v_scale_cache
