"""Two studies side by side: paired by variant, differences that are what they say, and what cannot be compared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from metakernelbench.analysis.compare import comparison, lift_pairs, solo_pairs, two_models, two_studies, unlike
from metakernelbench.analysis.frames import Frames, frames_of
from metakernelbench.analysis.metrics import mean_metric
from metakernelbench.analysis.resampling import estimate
from metakernelbench.analysis.simulate import World, simulate
from metakernelbench.errors import UserError
from tests.analysis.support import FAIL, study_of

SLOW = {"p03": (4.0, 6.0, 4.0, 4.0), "p21": (FAIL, 3.0, 6.0, 5.0), "p28": (2.0, FAIL, FAIL, FAIL)}
FAST = {"p03": (2.0, 3.0, 4.0, 4.0), "p21": (6.0, FAIL, 6.0, 5.0), "p28": (2.0, FAIL, FAIL, FAIL)}


@pytest.fixture(scope="module")
def studies() -> tuple[Frames, Frames]:
    return frames_of(*study_of(SLOW), name="slow"), frames_of(*study_of(FAST), name="fast")


def rows(table) -> dict[str, dict]:
    return {row["scope"]: row for row in table.frame.to_dicts()}


def test_variants_are_paired_and_scored_as_comparisons_are(studies):
    pairs = {(row["problem"], row["dsl"]): row["rho"] for row in solo_pairs(two_studies(*studies)).to_dicts()}
    assert pairs == {
        ("p03", "cute"): 2, ("p03", "tirx"): 2, ("p21", "cute"): 4, ("p21", "tirx"): 0.25,
        ("p28", "cute"): 1, ("p28", "tirx"): 1,
    }  # fmt: skip


def test_the_differences_are_right_less_left(studies):
    solo, lift, variants = comparison(two_studies(*studies))
    found = rows(solo)["all"]
    assert (found["passed_left"], found["passed_right"], found["passed_gap"]) == pytest.approx((4 / 6, 4 / 6, 0))
    assert (found["both"], found["only_left"], found["only_right"]) == (3, 1, 1)
    assert found["faster"] == pytest.approx(4 ** (1 / 3))
    ratios = {"left": (1.5, 0.5, 1, 1, 4, 0.25), "right": (0.75, 4, 1, 0.5, 1.2, 0.25)}
    means = {side: np.exp(np.log(values).mean()) for side, values in ratios.items()}
    found = rows(lift)["all"]
    assert found["log_gap"] == pytest.approx(means["right"] / means["left"] - 1)
    assert (found["log_left"], found["log_right"]) == pytest.approx((means["left"] - 1, means["right"] - 1))
    assert variants.frame.height == 6


def test_swapping_the_sides_turns_every_difference_round(studies):
    forth, back = (rows(comparison(two_studies(*pair))[0])["all"] for pair in (studies, studies[::-1]))
    assert forth["passed_gap"] == -back["passed_gap"]
    assert forth["fast_gap"] == -back["fast_gap"]
    assert forth["faster"] == pytest.approx(1 / back["faster"])


def test_a_study_does_not_differ_from_itself():
    study = frames_of(*simulate(World(problems=12, models=2), 1))
    for table in comparison(two_studies(study, study))[:2]:
        gaps = table.frame.select(pl.col("^.*_gap$"))
        assert all(value == 0 for row in gaps.iter_rows() for value in row)


def test_the_interval_of_a_difference_is_that_of_the_paired_rows():
    study = frames_of(*simulate(World(problems=20, models=2), 1))
    sides = two_models(study, "model-a", "model-b")
    pairs = solo_pairs(sides)
    gap = pairs["right"].is_not_null().cast(pl.Float64) - pairs["left"].is_not_null().cast(pl.Float64)
    expected = estimate(mean_metric("gap", ""), gap.to_numpy(), pairs["problem"].rank("dense").to_numpy())
    found = rows(comparison(sides)[0])["all"]
    assert (found["passed_gap_low"], found["passed_gap_high"]) == pytest.approx((expected.low, expected.high))


def test_studies_of_several_models_are_paired_within_the_models_they_share():
    left = frames_of(*simulate(World(problems=4, models=2), 1), name="left")
    right = frames_of(*simulate(World(problems=4, models=3), 2), name="right")
    sides = two_studies(left, right)
    assert set(solo_pairs(sides)["model"]) == {"model-a", "model-b"}
    assert set(lift_pairs(sides)["model"]) == {"model-a", "model-b"}
    assert "8 of right" in comparison(sides)[0].note


def test_unfinished_attempts_are_no_failures():
    left = frames_of(*simulate(World(problems=12, models=1, unfinished=0.5), 1), name="left")
    right = frames_of(*simulate(World(problems=12, models=1), 2), name="right")
    assert solo_pairs(two_studies(left, right)).height == left.attempts.filter(
        (pl.col("arm") == "solo") & (pl.col("state") != "unjudged")
    ).height  # fmt: skip


def test_what_cannot_be_paired_is_refused(studies):
    several = frames_of(*simulate(World(problems=4, models=2), 1))
    with pytest.raises(UserError, match="share no model"):
        two_studies(several, studies[0])
    with pytest.raises(UserError, match="no model `x`"):
        two_models(several, "model-a", "x")
    other = replace(studies[1], attempts=studies[1].attempts.with_columns(replicate=pl.lit(7, dtype=pl.Int64)))
    with pytest.raises(UserError, match="no variant is judged in both"):
        comparison(two_studies(studies[0], other))


def test_what_differs_beside_what_is_compared_is_said(studies):
    left, right = studies
    assert unlike(two_studies(left, right)) == ()
    elsewhere = replace(right, attempts=right.attempts.with_columns(device=pl.lit("cpu")), band=0.1)
    said = unlike(two_studies(left, replace(elsewhere, comparisons=right.asking("retry").comparisons)))
    assert [sentence.split(" (")[0] for sentence in said] == [
        "They were graded on different devices",
        "Their lifts answer different questions",
        "Their indifference bands differ",
    ]
