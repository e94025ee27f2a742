"""Block-scaled FP8: E4M3 elements with one float32 scale for each block of a matrix.

A matrix [rows, columns], each divisible by the block, becomes

    codes   [rows, columns]                                float8_e4m3fn
    scales  [rows / block rows, columns / block columns]   float32

and element = code · scale. The quantiser works in float32, one operation at a time in the order written; each division
is one of two tensors, because torch on CUDA turns tensor / number into a product with the rounded reciprocal.
"""

from typing import NamedTuple

import torch

from metakernelbench.problems.formats.fp8 import E4M3_MAX

type Block = tuple[int, int]

ACTIVATION_BLOCK: Block = (1, 128)
WEIGHT_BLOCK: Block = (128, 128)

SMALLEST_SCALE = 1e-12
"""The scale of a block of zeros."""


class BlockScaledFp8(NamedTuple):
    """A quantised matrix; the shapes of its parts tell the block."""

    codes: torch.Tensor
    scales: torch.Tensor


def _blocks(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[m, n] → [rows, m / rows, columns, n / columns]."""
    return x.reshape(rows, x.shape[0] // rows, columns, x.shape[1] // columns)


def quantize(x: torch.Tensor, block: Block) -> BlockScaledFp8:
    """Quantise a matrix; always in float32."""
    x = x.to(torch.float32)
    blocks = _blocks(x, x.shape[0] // block[0], x.shape[1] // block[1])
    scales = blocks.abs().amax(dim=(1, 3), keepdim=True) / x.new_full((), E4M3_MAX)
    scales = scales.clamp(min=SMALLEST_SCALE)
    codes = (blocks / scales).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return BlockScaledFp8(codes.reshape(x.shape), scales.squeeze((1, 3)))


def dequantize(quantized: BlockScaledFp8, dtype: torch.dtype) -> torch.Tensor:
    """The matrix that `quantized` stands for, computed in `dtype`."""
    codes, scales = quantized
    blocks = _blocks(codes.to(dtype), *scales.shape)
    return (blocks * scales[:, None, :, None]).reshape(codes.shape)


def matmul(a: BlockScaledFp8, b: BlockScaledFp8, dtype: torch.dtype) -> torch.Tensor:
    """a bᵀ of the dequantised operands, [m, k] and [n, k], computed in `dtype`."""
    return dequantize(a, dtype) @ dequantize(b, dtype).T


def random_weight(out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """standard normal / sqrt(in_features), times a gain in [0.5, 2) that is constant on each weight block.

    Everything is drawn and multiplied in `dtype`. The gains make the block scales differ: a misplaced one shows.
    """
    weight = torch.randn(out_features, in_features, dtype=dtype, device=device) / in_features**0.5
    rows, columns = out_features // WEIGHT_BLOCK[0], in_features // WEIGHT_BLOCK[1]
    gains = 0.5 + 1.5 * torch.rand(rows, columns, dtype=dtype, device=device)
    return (_blocks(weight, rows, columns) * gains[:, None, :, None]).reshape(weight.shape)
