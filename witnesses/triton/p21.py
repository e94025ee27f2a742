"""p21, FP8 append to paged caches, in Triton.

A program quantises some heads' vectors and writes bytes and scales in place. Bytes must be exact, so every step is one
float32 operation as the problem states it, with a correctly rounded reciprocal, and the rounding to E4M3 is done on the
bits.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def e4m3(y):
    """The E4M3 byte nearest to each float32 in ±448, a tie going to the even one."""
    bits = y.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # Normal values: round to three bits of significand, then move the exponent's bias from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the grid has the constant step 2^-9, which is the step of float32 at 2^14.
    shifted = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True)
    subnormal = shifted & 0xFF
    return (sign | tl.where(magnitude < 0x3C800000, subnormal, normal)).to(tl.uint8)


@triton.jit
def quantise(source, cache, scale_cache, vector, column, size, slot, heads, place_in_token, inside):
    """One row a head vector: `vector` numbers them in `source`, (slot, head) in the caches."""
    x = tl.load(source + vector[:, None] * size + column[None, :], mask=inside, other=0.0).to(tl.float32)
    valid = inside & (slot >= 0)[:, None]
    scale = tl.maximum(tl.max(tl.abs(x), axis=1) * (1.0 / 448.0), 1e-6)
    reciprocal = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    y = x * reciprocal[:, None]
    y = tl.minimum(tl.maximum(y, -448.0), 448.0)
    target = slot * heads + place_in_token
    tl.store(cache + target[:, None] * size + column[None, :], e4m3(y), mask=valid)
    tl.store(scale_cache + target, scale, mask=slot >= 0)


@triton.jit
def append(
    key,
    value,
    slots,
    key_cache,
    value_cache,
    k_scales,
    v_scales,
    vectors,
    heads,
    size,
    VECTORS: tl.constexpr,
    SIZE: tl.constexpr,
):
    vector = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    column = tl.arange(0, SIZE)
    inside = (vector < vectors)[:, None] & (column < size)[None, :]
    slot = tl.load(slots + vector // heads, mask=vector < vectors, other=-1)
    quantise(key, key_cache, k_scales, vector, column, size, slot, heads, vector % heads, inside)
    quantise(value, value_cache, v_scales, vector, column, size, slot, heads, vector % heads, inside)


def solve(
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    k_scale_cache: torch.Tensor,
    v_scale_cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, heads, size = key.shape
    per_program = 8 if key.is_cuda else 32
    append[(triton.cdiv(tokens * heads, per_program),)](
        key,
        value,
        slot_mapping,
        key_cache,
        value_cache,
        k_scale_cache,
        v_scale_cache,
        tokens * heads,
        heads,
        size,
        VECTORS=per_program,
        SIZE=triton.next_power_of_2(size),
    )
    return key_cache, value_cache, k_scale_cache, v_scale_cache
