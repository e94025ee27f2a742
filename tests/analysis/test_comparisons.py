"""From records to rows: what is missing stays missing, and every row names its attempts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from metakernelbench.analysis import outcome, registry
from metakernelbench.analysis.comparisons import attempts_frame, comparisons_frame
from metakernelbench.analysis.frames import frames_of
from metakernelbench.experiments.designs import Plan, cross_dsl
from tests.analysis.support import FAIL, SKIPPED, frames, record, study_of, verdict

TIMES = {
    "p03": (4.0, 6.0, 4.0, 4.0),
    "p21": (FAIL, 3.0, 6.0, 5.0),
    "p28": (2.0, FAIL, FAIL, FAIL),
    "p61": (6.0, 8.0, SKIPPED, 8.0),
}


def test_every_comparison_names_its_three_attempts():
    plan, records = study_of(TIMES)
    attempts, comparisons = frames(plan, records)
    keys = set(attempts["key"])
    assert keys == set(records)
    for role in ("source", "baseline", "treatment"):
        assert set(comparisons[role]) <= keys
    assert comparisons.height == len(plan.comparisons)


def test_an_attempt_without_a_record_is_neither_pass_nor_failure():
    plan, records = study_of(TIMES)
    del records["p03/tirx/m/0/solo"]
    attempts, comparisons = frames(plan, records)
    solo = {row["dsl"]: row for row in outcome.solo(attempts).frame.to_dicts()}
    assert (solo["tirx"]["n"], solo["tirx"]["passed"], solo["tirx"]["unjudged"]) == (3, 2, 1)
    row = comparisons.filter(problem="p03", target_dsl="tirx").row(0, named=True)
    assert (row["change"], row["rho"]) == ("unjudged", None)
    lift = outcome.lift(comparisons, "direction").frame.to_dicts()[0]
    assert (lift["n"], lift["unjudged"]) == (7, 1)


def test_the_source_alone_being_unfinished_leaves_the_ratio():
    plan, records = study_of({"p03": TIMES["p03"]})
    del records["p03/cute/m/0/solo"]
    _, comparisons = frames(plan, records)
    rho = {row["direction"]: row["rho"] for row in comparisons.to_dicts()}
    assert rho == {"cute→tirx": 1.5, "tirx→cute": None}


def test_a_skipped_treatment_inherits_the_baseline():
    _, comparisons = frames(*study_of(TIMES))
    row = comparisons.filter(change="skipped").row(0, named=True)
    assert row["rho"] == 1
    assert (
        (row["treatment_ms"], row["treatment_speedup"]) == (row["baseline_ms"], row["baseline_speedup"]) == (8.0, 1.5)
    )


def test_no_kernel_is_a_failure():
    plan, records = study_of({"p03": TIMES["p03"]})
    key = "p03/cute/m/0/solo"
    records[key] = records[key].model_copy(update={"final": None, "kernel": None, "ended": "budget"})
    attempts, _ = frames(plan, records)
    row = attempts.filter(key=key).row(0, named=True)
    assert (row["state"], row["code"], row["speedup"]) == ("failed", "no-kernel", None)


def test_times_beside_a_rule_violation_do_not_count():
    plan, records = study_of({"p03": TIMES["p03"]})
    key = "p03/cute/m/0/solo"
    broken = dataclasses.replace(verdict("p03", "cute", None), timing=verdict("p03", "cute", 1.0).timing)
    records[key] = records[key].model_copy(update={"final": broken})
    attempts, _ = frames(plan, records)
    row = attempts.filter(key=key).row(0, named=True)
    assert (row["state"], row["ms"], row["tier"]) == ("failed", None, 0)


def test_a_pass_without_a_usable_time_is_refused():
    plan, records = study_of({"p03": TIMES["p03"]})
    key = "p03/cute/m/0/solo"
    good = verdict("p03", "cute", 1.0)
    timing = dataclasses.replace(good.timing, implementation_median_ms=0.0)
    records[key] = records[key].model_copy(update={"final": dataclasses.replace(good, timing=timing)})
    with pytest.raises(ValueError, match=key):
        frames(plan, records)


def test_the_order_of_plan_and_records_does_not_matter():
    plan, records = study_of(TIMES)
    turned = Plan(attempts=plan.attempts[::-1], comparisons=plan.comparisons[::-1])
    for one, other in zip(frames(plan, records), frames(turned, dict(reversed(records.items()))), strict=True):
        assert one.equals(other)


def test_a_study_without_any_record_has_rows_and_no_numbers():
    plan = cross_dsl(["p03", "p28"], ["cute", "tirx"], ["m"], 1)
    attempts, comparisons = frames(plan, {})
    assert set(attempts["state"]) == {"unjudged"}
    assert comparisons["rho"].null_count() == 4
    assert outcome.lift(comparisons, "family").frame["lift"].null_count() == 3
    assert outcome.solo(attempts).frame["n"].to_list() == [0, 0]


def test_an_empty_plan_gives_empty_frames():
    plan = Plan(attempts=(), comparisons=())
    attempts = attempts_frame(plan, {})
    assert attempts.height == comparisons_frame(plan, attempts).height == 0


def test_replicates_and_models_stay_apart():
    plan = cross_dsl(["p03"], ["cute", "tirx"], ["a", "b"], 2)
    records = {a.key: record(a, 2.0 + a.replicate) for a in plan.attempts}
    _, comparisons = frames(plan, records)
    assert comparisons.height == 8
    assert comparisons["rho"].to_list() == [1.0] * 8


@given(shuffled=st.randoms(use_true_random=False))
@settings(max_examples=5, deadline=None)
def test_the_order_of_plan_and_records_changes_no_table(shuffled):
    plan, records = study_of(TIMES)
    expected = {name: registry.table(frames_of(plan, records), name).frame for name in registry.TABLES}
    attempts, comparisons, items = list(plan.attempts), list(plan.comparisons), list(records.items())
    for each in (attempts, comparisons, items):
        shuffled.shuffle(each)
    mixed = frames_of(Plan(attempts=tuple(attempts), comparisons=tuple(comparisons)), dict(items))
    for name, frame in expected.items():
        assert_frame_equal(registry.table(mixed, name).frame, frame)


def test_a_skipped_comparison_moves_nothing_but_denominators():
    without = {problem: times for problem, times in TIMES.items() if problem != "p61"}
    skipped = {**without, "p61": (6.0, 8.0, SKIPPED, SKIPPED)}
    few, more = (
        outcome.lift(frames(*study_of(times))[1], "direction").frame.to_dicts()[0] for times in (without, skipped)
    )
    assert (few["n"], more["n"]) == (6, 8)
    for name in ("help", "harm"):
        assert more[name] * more["n"] == pytest.approx(few[name] * few["n"])
    assert np.log1p(more["lift"]) * more["n"] == pytest.approx(np.log1p(few["lift"]) * few["n"])
