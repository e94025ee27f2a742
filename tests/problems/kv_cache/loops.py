"""What the tests of cache updates share: rotation and norms of one vector, in plain Python numbers."""

from __future__ import annotations

import math

import torch


def rotated(x: list[float], row: list[float]) -> list[float]:
    """The first dimensions of x turned by a table row of cosines, then sines; the rest as it is."""
    half = len(row) // 2
    cos, sin = row[:half], row[half:]
    first = [x[i] * cos[i] - x[i + half] * sin[i] for i in range(half)]
    second = [x[i + half] * cos[i] + x[i] * sin[i] for i in range(half)]
    return first + second + x[2 * half :]


def normalised(x: list[float], eps: float) -> list[float]:
    """x over its root mean square."""
    rms = math.sqrt(sum(v * v for v in x) / len(x) + eps)
    return [v / rms for v in x]


def interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The other rotary embedding: neighbouring dimensions turn together."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)


def shifted_slots(slots: torch.Tensor) -> torch.Tensor:
    """Every valid slot one further (the highest becomes 0)."""
    return torch.where(slots < 0, slots, (slots + 1) % (int(slots.max()) + 1))


def padding_written_to_slot_zero(slots: torch.Tensor) -> torch.Tensor:
    """One padding token writes to slot 0, as an unmasked store to -1 would to some slot."""
    return torch.cat([slots[:-1], torch.zeros_like(slots[-1:])])
