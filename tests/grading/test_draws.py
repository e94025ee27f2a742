"""Draws: what can be said of outputs without the reference."""

from __future__ import annotations

import torch

from metakernelbench.grading.compare import as_tuple
from metakernelbench.grading.draws import Draws
from metakernelbench.problems import catalog

WITH_VECTORIZED = "p72"


def test_wrong_outputs_are_far_off_without_the_reference() -> None:
    problem = catalog.load(WITH_VECTORIZED)
    assert problem.vectorized is not None
    draw = Draws(problem, "smoke", "cpu").next()
    right = as_tuple(problem.vectorized(*draw.copies()))
    allowances = [1e-2] * len(right)
    assert not draw.far_off(right, allowances)
    assert draw.far_off([x + 1 for x in right], allowances)
    assert draw.far_off([torch.full_like(x, float("nan")) for x in right], allowances)
    assert draw._result is None, "the reference was not called"


def test_nothing_is_far_off_where_only_the_reference_can_tell() -> None:
    draw = Draws(catalog.load("p28"), "smoke", "cpu").next()
    wrong = [x + 1 for x in draw.expected]
    assert not draw.far_off(wrong, [1e-2])
    assert not draw.nearly(wrong, [1e-2])
