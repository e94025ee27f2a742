"""Sorts (token, expert) pairs into one slot table for all experts, so that each projection is one batched product.

A loop over experts gathers the tokens of one expert at a time. The loop-free eager form gives every expert as many
slots as the busiest one needs; the unused slots hold zeros and are never read back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Slots(NamedTuple):
    """Where each pair lives in a table of (expert, slot) rows."""

    rows: torch.Tensor
    """[pairs]: row `expert * capacity + slot` of each pair; pairs of one expert keep their order."""
    experts: int
    capacity: int
    """Pairs of the busiest expert."""

    def fill(self, values: torch.Tensor) -> torch.Tensor:
        """[experts, capacity, width]: `values` [pairs, width] in their slots, zeros elsewhere."""
        table = values.new_zeros(self.experts * self.capacity, values.shape[-1])
        table[self.rows] = values
        return table.view(self.experts, self.capacity, -1)

    def read(self, table: torch.Tensor) -> torch.Tensor:
        """[pairs, width]: what the slots of the pairs hold."""
        return table.flatten(0, 1)[self.rows]


def slots_of(experts: torch.Tensor, count: int) -> Slots:
    """Slots for pairs whose experts are `experts` [pairs], out of `count` experts."""
    load = torch.bincount(experts, minlength=count)
    capacity = max(int(load.max()), 1)
    order = torch.argsort(experts, stable=True)
    in_order = experts[order]
    first = load.cumsum(0) - load
    rank = torch.arange(len(experts), device=experts.device) - first[in_order]
    rows = torch.empty_like(experts)
    rows[order] = in_order * capacity + rank
    return Slots(rows, count, capacity)
