"""Rotary position embedding on halves: dimension i of a vector turns together with dimension i + half."""

import torch


def rotary_table(positions: int, width: int, base: float, device: torch.device) -> torch.Tensor:
    """[positions, width] bf16, made in fp32: row p holds the cosines, then the sines, of p / base ** (2i / width)."""
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    angles = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * (1 / base**exponents)
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(torch.bfloat16)


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The vectors along the last axis of x, turned. Works in the dtype of its arguments, which should agree: in bf16
    each product and each sum is rounded."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def expected_table_rows(positions: int, tokens: int) -> float:
    """How many different rows of a table `tokens` uniformly random positions look up, on average."""
    return positions * (1 - (1 - 1 / positions) ** tokens)
