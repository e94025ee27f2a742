"""Agreement beyond chance, held to hand-computed numbers and to another library."""

from __future__ import annotations

import numpy as np
import pytest

from metakernelbench.annotation.agreement import agreement, agreements, alpha, cohen, fleiss
from metakernelbench.annotation.labels import CategoryUptake, CauseLabel, SkillLabels, UptakeLabels
from metakernelbench.store.annotations import Answer
from tests.annotation.test_consensus import ROWS, SUM, vote

NAN = float("nan")
PAIR = np.array([[1.0, 1, 0, 0], [1, 0, 0, 0]])


def test_statistics_of_two_raters_by_hand() -> None:
    assert cohen(PAIR) == pytest.approx(1 / 2)
    assert alpha(PAIR) == pytest.approx(1 - 7 * 2 / (2 * 3 * 5))
    assert fleiss(np.array([[1.0, 0], [1, 0], [1, 1]])) == pytest.approx(1 / 4)


def test_alpha_of_krippendorffs_own_example() -> None:
    """Nominal data with missing values from K. Krippendorff, Computing Krippendorff's Alpha-Reliability (2011), part C:
    0.743."""
    observers = [
        [1, 2, 3, 3, 2, 1, 4, 1, 2, NAN, NAN, NAN],
        [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, NAN, 3],
        [NAN, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, NAN],
        [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, NAN],
    ]
    assert alpha(np.array(observers)) == pytest.approx(0.743, abs=5e-4)


def test_cohen_is_the_mean_over_pairs_and_fleiss_needs_every_rater() -> None:
    three = np.vstack([PAIR, [1.0, 1, 0, NAN]])
    assert cohen(three) == pytest.approx((1 / 2 + 1 + 2 / 5) / 3)
    assert fleiss(three) == pytest.approx(fleiss(three[:, :3]) or NAN)


def test_labels_that_do_not_vary_have_no_agreement_beyond_chance() -> None:
    same = np.ones((2, 10))
    found = agreement("c", same)
    assert (found.cohen.value, found.fleiss.value, found.alpha.value, found.identical) == (None, None, None, 1.0)


def test_an_interval_needs_six_units_and_covers_the_value() -> None:
    rng = np.random.default_rng(0)
    truth = (rng.random(80) < 0.4).astype(float)
    noisy = np.where(rng.random((3, 80)) < 0.15, 1 - truth, truth)
    found = agreement("c", noisy)
    for one in (found.cohen, found.fleiss, found.alpha):
        assert one.value is not None
        assert one.low is not None
        assert one.high is not None
        assert 0.2 < one.low < one.value < one.high < 1
    few = agreement("c", noisy[:, :5])
    assert few.alpha.low is None
    assert agreement("c", noisy) == found


def test_units_that_one_rater_saw_are_not_counted() -> None:
    found = agreement("c", np.array([[1.0, 0, NAN], [1, 1, 0]]))
    assert (found.units, found.raters, found.identical) == (2, 2, 0.5)


def answer(question: str, subject: str, rater: str, labels: SkillLabels | UptakeLabels | CauseLabel) -> Answer:
    return Answer(
        question=question,
        subject=subject,
        request=f"{question}{subject}{rater}",
        annotator=rater,
        pass_number=1,
        words_version=1,
        prompt_version="1",
        temperature=0.0,
        labels=labels.model_dump_json(),
        answered_at="2026-01-01T00:00:00+00:00",
    )


def test_every_category_uptake_propagation_and_cause_is_compared() -> None:
    both, one = vote(("numerics_guidance", SUM), ("work_partition", ROWS)), vote(("numerics_guidance", SUM))
    taken = UptakeLabels(uptake=(CategoryUptake(category="work_partition", uptake="ignored"),))
    cause = CauseLabel(cause="none", decided_by="annotator")
    answers = [
        answer("skill", "1", "a", both), answer("skill", "1", "b", both),
        answer("skill", "2", "a", both), answer("skill", "2", "b", one),
        answer("uptake", "3", "a", taken), answer("uptake", "3", "b", taken),
        answer("cause", "4", "a", cause),
    ]  # fmt: skip
    found = {one.name: one for one in agreements(answers)}
    assert found["numerics_guidance"].identical == 1.0
    assert found["work_partition"].identical == 0.5
    assert found["workload_fact"].identical == 1.0
    assert (found["uptake"].units, found["propagation"].units) == (1, 1)
    assert "cause" not in found
