"""Draws rows whose discrete results cannot hang on rounding: rows too close to a decision are drawn again.

A router picks experts by comparing scores. Where two scores lie closer together than rounding errors do, two correct
implementations may pick differently. A problem therefore says which rows of a draw are too close, and only those rows
are replaced, by fresh rows of the same law.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

ROUNDS = 16
"""Rounds of replacement before giving up; the benchmark's problems need two to five."""


def draw_stable_rows(
    rows: int,
    draw: Callable[[int], torch.Tensor],
    unstable: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """`rows` rows of `draw(count)`, none of which `unstable(rows)` (a Boolean per row) still flags."""
    values = draw(rows)
    flagged = unstable(values)
    for _ in range(ROUNDS):
        count = int(flagged.sum())
        if count == 0:
            return values
        values[flagged] = draw(count)
        flagged = unstable(values)
    raise RuntimeError(f"{int(flagged.sum())} of {rows} rows are still unstable after {ROUNDS} rounds of redrawing")


def gap_below(scores: torch.Tensor, rank: int) -> torch.Tensor:
    """Per row, the gap between the `rank`-th largest score and the next one."""
    best = scores.topk(rank + 1, dim=-1).values
    return best[..., rank - 1] - best[..., rank]
