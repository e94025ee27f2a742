"""Draws: what can be said of outputs without the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from metakernelbench.grading import compare, draws
from metakernelbench.grading.compare import as_tuple
from metakernelbench.grading.draws import Draw, Draws
from metakernelbench.problems import catalog
from metakernelbench.problems.moe import p50_experts_backward as p50
from tests.grading.memory import Counting

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


LARGE = p50.Workload(tokens=24, width=64, experts=32, expert_width=16, top_k=2)
"""As at full size, nearly all of p50 is in its expert weights and their gradients."""


def size(tensors: tuple[torch.Tensor, ...]) -> int:
    return sum(x.nbytes for x in tensors)


def large_draw(patch: pytest.MonkeyPatch) -> Draw:
    """A draw of the problem with the largest inputs and outputs, taken for as large as it is on a GPU."""
    patch.setattr(draws, "_are_large", lambda _: True)
    patch.setattr(compare, "_PART", 64)
    problem = replace(catalog.load("p50"), workloads={"large": LARGE})
    return Draws(problem, "large", "cpu").next()


@pytest.mark.parametrize("known", [False, True])
def test_a_comparison_holds_no_reference_outputs_beside_the_anchor_s_inputs(
    monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    with Counting() as memory:
        draw = large_draw(monkeypatch)
        actual = as_tuple(draw.problem.reference(*draw.copies()))
        if known:
            draw.result()
        memory.most = memory.live
        assert all(c.passed for c in draw.compare(actual))
    inputs, outputs = size(draw.inputs), size(actual)
    assert memory.most < 1.05 * (inputs + outputs + 2 * (inputs + outputs))  # the second time in float64
    assert memory.live < 1.05 * (inputs + 2 * outputs)


def test_a_look_at_outputs_takes_hardly_any_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with Counting() as memory:
        draw = large_draw(monkeypatch)
        actual = [x.clone() for x in draw.expected]
        before = memory.most = memory.live
        assert draw.nearly(actual, [1e-9] * len(actual))
        assert memory.most - before < 0.05 * size(draw.expected)
        actual[-1].view(-1)[-1] += 1
        assert not draw.nearly(actual, [1e-9] * len(actual))
