"""Ways to get an NVFP4 tensor wrong, and its value in float64."""

from __future__ import annotations

import torch

from metakernelbench.problems.formats import nvfp4
from metakernelbench.problems.formats.nvfp4 import Nvfp4


def values(quantized: Nvfp4) -> torch.Tensor:
    return nvfp4.dequantize(quantized, torch.float64)


def through_nvfp4(x: torch.Tensor) -> torch.Tensor:
    """x as it comes back from a quantiser, in float64."""
    return values(nvfp4.quantize(x))


def by_blocks_of_32(x: torch.Tensor) -> torch.Tensor:
    """x through a quantiser whose blocks are twice as long."""
    shape = (*x.shape[:-1], -1, 2, 16)
    pairs = x.double().reshape(shape)
    scale = (pairs.abs().amax(dim=(-1, -2), keepdim=True) / 6).clamp(min=1e-30)
    codes = nvfp4.e2m1_codes((pairs / scale).clamp(-6, 6))
    return (nvfp4.e2m1_values(codes, torch.float64) * scale).reshape(x.shape)


def swapped_nibbles(codes: torch.Tensor) -> torch.Tensor:
    pairs = codes.view(torch.uint8)
    return ((pairs >> 4) | (pairs << 4)).view(torch.float4_e2m1fn_x2)


def ones_for_scales(scales: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(scales.float()).to(scales.dtype)


def of_the_row_above(scales: torch.Tensor) -> torch.Tensor:
    return scales.view(torch.uint8).roll(1, -2).view(scales.dtype)


def one_step_off(codes: torch.Tensor, position: int = 0) -> torch.Tensor:
    """One element's code moved to the neighbouring one."""
    changed = nvfp4.unpack(codes).clone()
    changed.view(-1)[position] ^= 1
    return nvfp4.pack(changed)
