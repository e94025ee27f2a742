"""Redrawing unstable rows: stable ones stay, flagged ones are replaced, a hopeless draw is refused."""

import pytest
import torch

from metakernelbench.problems.formats.stable_rows import ROUNDS, draw_stable_rows, gap_below


def test_rows_that_are_not_flagged_are_kept_and_flagged_ones_replaced():
    batches = iter([torch.tensor([[1.0], [-1.0], [2.0]]), torch.tensor([[3.0]])])
    rows = draw_stable_rows(3, lambda count: next(batches)[:count], lambda values: values[:, 0] < 0)
    assert rows.flatten().tolist() == [1.0, 3.0, 2.0]


def test_a_law_that_never_gives_a_stable_row_is_refused_after_the_last_round():
    drawn = []

    def draw(count: int) -> torch.Tensor:
        drawn.append(count)
        return -torch.ones(count, 1)

    with pytest.raises(RuntimeError, match="2 of 2 rows are still unstable"):
        draw_stable_rows(2, draw, lambda values: values[:, 0] < 0)
    assert drawn == [2] * (ROUNDS + 1)


def test_the_gap_is_the_one_below_the_given_rank():
    scores = torch.tensor([[1.0, 7.0, 4.0, 2.0]])
    assert [float(gap_below(scores, rank)) for rank in (1, 2, 3)] == [3.0, 2.0, 1.0]
