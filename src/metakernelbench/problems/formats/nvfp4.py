"""NVFP4: 4-bit E2M1 elements, one E4M3 scale for each 16 of them, and one float32 scale for the whole tensor.

A tensor [..., columns] with columns divisible by 16 becomes

    codes          [..., columns / 2]   float4_e2m1fn_x2  element 2j in the low half of byte j, element 2j+1 in the high
    block_scales   [..., columns / 16]  float8_e4m3fn     row-major, of 16 consecutive elements of a row
    global_scale   a number             float32           of the whole tensor, all leading dimensions included

and element = E2M1(code) · (block scale · global scale).

Exact ties between two codes are common with bfloat16 inputs, so the order of roundings in `quantize` is part of the
format: every step is one float32 operation, in the order written. In particular each division is a division of two
tensors, because torch on CUDA turns tensor / number into a product with the rounded reciprocal.
"""

from typing import NamedTuple

import torch

from metakernelbench.problems.formats.fp8 import E4M3_MAX

BLOCK = 16
"""Elements that share a block scale."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What the codes 0 to 15 stand for."""

E2M1_MAX = 6.0
FLOAT32_MAX = torch.finfo(torch.float32).max


class Nvfp4(NamedTuple):
    """A quantised tensor."""

    codes: torch.Tensor
    block_scales: torch.Tensor
    global_scale: torch.Tensor | float
    """A tensor without dimensions, or its exact value as a Python number."""


def e2m1_codes(y: torch.Tensor) -> torch.Tensor:
    """The codes (uint8) of the values nearest to `y`, a tie going to the even code. `y` is within ±6; NaN becomes 0."""
    magnitude = y.abs()
    code = (magnitude > 0.25).to(torch.uint8)
    code += magnitude >= 0.75
    code += magnitude > 1.25
    code += magnitude >= 1.75
    code += magnitude > 2.5
    code += magnitude >= 3.5
    code += magnitude > 5.0
    return code + 8 * (y < 0).to(torch.uint8)


def e2m1_values(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the codes (uint8, 0 to 15) stand for."""
    return torch.tensor(E2M1_VALUES, dtype=dtype, device=codes.device)[codes.int()]


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte: [..., columns] uint8 → [..., columns / 2] float4_e2m1fn_x2."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).view(torch.float4_e2m1fn_x2)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack`."""
    pairs = packed.view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)


def _blocks(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(*x.shape[:-1], -1, BLOCK)


def quantize(x: torch.Tensor) -> Nvfp4:
    """Quantise `x` with one global scale and blocks along its last dimension; always in float32."""
    x = x.to(torch.float32)
    encode_scale = x.new_full((), E4M3_MAX * E2M1_MAX) / x.abs().amax()
    encode_scale = encode_scale.clamp(max=FLOAT32_MAX)
    encode_scale = torch.where(encode_scale == 0, 1.0, encode_scale)
    one = torch.ones_like(encode_scale)
    global_scale = one / encode_scale

    blocks = _blocks(x)
    block_scales = blocks.abs().amax(dim=-1) / x.new_full((), E2M1_MAX)
    block_scales = (block_scales * encode_scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    block_encode_scales = (one / (block_scales.to(torch.float32) * global_scale)).clamp(max=FLOAT32_MAX)

    y = (blocks * block_encode_scales.unsqueeze(-1)).clamp(-E2M1_MAX, E2M1_MAX)
    return Nvfp4(pack(e2m1_codes(y).flatten(-2)), block_scales, global_scale)


def dequantize(quantized: Nvfp4, dtype: torch.dtype) -> torch.Tensor:
    """The tensor that `quantized` stands for, computed in `dtype`: the two scales are multiplied first."""
    scales = quantized.block_scales.to(dtype) * quantized.global_scale
    blocks = _blocks(e2m1_values(unpack(quantized.codes), dtype))
    return (blocks * scales.unsqueeze(-1)).flatten(-2)


def matmul(a: Nvfp4, b: Nvfp4, dtype: torch.dtype) -> torch.Tensor:
    """a bᵀ of the dequantised operands, [..., m, k] and [..., n, k], computed in `dtype`."""
    return torch.matmul(dequantize(a, dtype), dequantize(b, dtype).transpose(-1, -2))


def random_weight(
    out_features: int, in_features: int, std: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Codes and block scales, with a leading dimension of 1, and the global scale of std · standard normal."""
    weight = quantize(std * torch.randn(1, out_features, in_features, device=device))
    return weight.codes, weight.block_scales, float(weight.global_scale)
