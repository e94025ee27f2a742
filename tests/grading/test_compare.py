"""The contract's comparison."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metakernelbench.grading import compare as module
from metakernelbench.grading.compare import compare
from metakernelbench.grading.verdict import Comparison

SPECIAL = [0.0, 1.0, -2.5, 1e-3, float("nan"), float("inf"), float("-inf")]
VALUES = st.lists(st.tuples(*[st.sampled_from(SPECIAL)] * 3), min_size=1, max_size=20)


def compared(rows: list[tuple[float, float, float]]) -> Comparison:
    actual, expected, anchor = torch.tensor(rows).T
    return compare("y", actual, expected, anchor.double())


@given(rows=VALUES, part=st.integers(1, 25))
def test_looking_at_a_part_at_a_time_changes_nothing(rows: list[tuple[float, float, float]], part: int) -> None:
    whole = compared(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PART", part)
        assert repr(compared(rows)) == repr(whole)  # NaN is not equal to itself


def test_an_error_counts_only_beyond_the_allowance() -> None:
    anchor = torch.tensor([1.0, -4.0]).double()
    expected = torch.tensor([1.01, -4.0])
    allowed = 3 * 0.01
    near, far = torch.tensor([1 - 0.9 * allowed, -4.0]), torch.tensor([1 - 1.1 * allowed, -4.0])
    assert compare("y", near, expected, anchor).passed
    told = compare("y", far, expected, anchor)
    assert not told.passed and told.mismatches == 1
    assert told.error == pytest.approx(1.1 * allowed, rel=1e-4)
    assert told.allowance == pytest.approx(allowed, rel=1e-4)


def test_what_is_not_finite_must_be_the_reference_s() -> None:
    nan, inf = float("nan"), float("inf")
    assert compared([(nan, nan, nan), (inf, inf, inf), (1.0, 1.0, 1.0)]).passed
    assert not compared([(1.0, nan, nan)]).passed
    assert not compared([(nan, 1.0, 1.0)]).passed
    assert not compared([(-inf, inf, inf)]).passed


def test_an_empty_output_passes() -> None:
    empty = torch.empty(0, 4)
    assert compare("y", empty, empty, empty.double()).passed
