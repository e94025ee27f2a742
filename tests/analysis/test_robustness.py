"""What repeated gradings say of the band, and what the outcome is with a rule counted or not."""

from __future__ import annotations

import dataclasses

import pytest

from metakernelbench.analysis.frames import frames_of
from metakernelbench.analysis.noise import noise
from metakernelbench.analysis.robustness import rules
from metakernelbench.attempts.record import Submission
from metakernelbench.grading.verdict import Finding, Stage
from tests.analysis.support import FAIL, study_of, verdict

KEY = "p03/tirx/m/0/from-cute"


def test_the_band_that_noise_supports_is_what_repeated_gradings_stay_within():
    plan, records = study_of({"p03": (1.0, 1.0, 1.0, 1.0)})
    for attempt, ratio in zip(plan.attempts, (1.01, 0.99, 1.02, 0.96), strict=True):
        made = records[attempt.key]
        again = verdict("p03", attempt.dsl, ratio)
        sent = [
            Submission(number=1, requested_at_s=1, source=made.kernel, verdict=again, answer="passed"),
            Submission(number=2, requested_at_s=2, source="another kernel", verdict=again, answer="passed"),
            Submission(number=3, requested_at_s=3, source=made.kernel, verdict=verdict("p03", "x", None), answer="no"),
        ]
        records[attempt.key] = made.model_copy(update={"submissions": tuple(sent)})
    [row] = noise(frames_of(plan, records)).frame.to_dicts()
    assert row["pairs"] == 4
    assert row["supported"] == pytest.approx(0.0384, abs=5e-5)


def test_without_repeated_gradings_the_supported_band_is_not_known():
    plan, records = study_of({"p03": (1.0, 1.0, 1.0, 1.0)})
    [row] = noise(frames_of(plan, records)).frame.to_dicts()
    assert (row["pairs"], row["supported"]) == (0, None)


def broken(code: str, *, timed: bool):
    timing = verdict("p03", "tirx", 2.0).timing if timed else None
    finding = Finding(code=code, message="a rule was broken")
    return dataclasses.replace(verdict("p03", "tirx", None), ended_at=Stage.RULES, findings=(finding,), timing=timing)


def test_a_rule_can_be_counted_as_broken_or_not():
    plan, records = study_of({"p03": (4.0, 4.0, FAIL, 4.0)})
    records[KEY] = records[KEY].model_copy(update={"final": broken("inline-source", timed=True)})
    held, freed = rules(frames_of(plan, records)).frame.to_dicts()
    assert (held["rules"], held["freed"], held["harm"], held["help"]) == ("all rules hold", 0, 0.5, 0)
    assert (freed["rules"], freed["freed"], freed["harm"], freed["help"]) == ("without inline-source", 1, 0, 0.5)
    assert freed["lift"] == pytest.approx(2**0.5 - 1)


def test_a_violation_without_a_time_stays_a_failure():
    plan, records = study_of({"p03": (4.0, 4.0, FAIL, 4.0)})
    records[KEY] = records[KEY].model_copy(update={"final": broken("inline-source", timed=False)})
    assert frames_of(plan, records).violations == []
    assert rules(frames_of(plan, records)).frame["rules"].to_list() == ["all rules hold"]
