"""FP8 products by other means than the references: block after block in float64, and ways to get them wrong."""

from __future__ import annotations

import torch

from metakernelbench.problems.formats import block_scaled_fp8 as fp8

type Quantized = tuple[torch.Tensor, torch.Tensor]
"""Exact codes as float64, and scales."""


def activation(x: torch.Tensor) -> Quantized:
    codes, scales = fp8.quantize(x, fp8.ACTIVATION_BLOCK)
    return codes.double(), scales.double()


def weight(x: torch.Tensor) -> Quantized:
    codes, scales = fp8.quantize(x, fp8.WEIGHT_BLOCK)
    return codes.double(), scales.double()


def product(a: Quantized, b: Quantized) -> torch.Tensor:
    """[m, n] in float64: exact products of 128 columns at a time, then both scales."""
    (a_codes, a_scales), (b_codes, b_scales) = a, b
    total = torch.zeros(a_codes.shape[0], b_codes.shape[0], dtype=torch.float64)
    for k in range(a_scales.shape[1]):
        part = slice(128 * k, 128 * k + 128)
        rows = b_scales[:, k].repeat_interleave(128)
        total += (a_codes[:, part] @ b_codes[:, part].T) * a_scales[:, k, None] * rows
    return total


def unscaled(quantized: Quantized) -> Quantized:
    """One scale for everything."""
    codes, scales = quantized
    return codes, scales.mean().expand_as(scales)


def neighbour_scales(quantized: Quantized) -> Quantized:
    """The scales of the block before."""
    codes, scales = quantized
    return codes, scales.roll(1, dims=1)
