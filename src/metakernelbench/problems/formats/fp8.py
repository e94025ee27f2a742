"""FP8 E4M3 (the finite-only variant, `torch.float8_e4m3fn`) as bytes."""

import torch

E4M3_MAX = 448.0
"""The largest finite value."""


def to_e4m3_bytes(x: torch.Tensor) -> torch.Tensor:
    """x clamped to ±448 and rounded to the nearest E4M3 value, ties to the even significand, as uint8."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def from_e4m3_bytes(code: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of uint8 codes in `dtype`; exact in every dtype of at least 16 bits."""
    return code.view(torch.float8_e4m3fn).to(dtype)
