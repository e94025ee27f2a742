"""The simulator: what it says of a study is what the analysis finds in it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from harbor.models.trajectories.trajectory import Trajectory

from metakernelbench.analysis import outcome
from metakernelbench.analysis.comparisons import MEASURED, attempts_frame, comparisons_frame
from metakernelbench.analysis.frames import frames_from_store, frames_of
from metakernelbench.analysis.simulate import World, family_of, simulate, simulated_ratios, write_study
from metakernelbench.analysis.standing import standing, tier_pairs
from metakernelbench.errors import UserError
from metakernelbench.experiments.plan import State, plan_missing
from metakernelbench.grading.verdict import Stage
from metakernelbench.store.store import Store
from tests.experiments.support import fingerprint


def ratios_by_problem(world: World, seed: int) -> list[float]:
    plan, records = simulate(world, seed)
    comparisons = comparisons_frame(plan, attempts_frame(plan, records, family_of))
    return comparisons.sort("problem", "rho")["rho"].to_list()


def test_records_and_arrays_are_the_same_study():
    world = World(problems=9, models=2, dsls=("a", "b", "c"), replicates=2, skip=0.2)
    rho, problem = simulated_ratios(world, 3)
    assert ratios_by_problem(world, 3) == pytest.approx(rho[np.lexsort((rho, problem))].tolist())


def test_a_seed_gives_the_same_study_again():
    assert ratios_by_problem(World(problems=5, models=1), 1) == ratios_by_problem(World(problems=5, models=1), 1)
    assert ratios_by_problem(World(problems=5, models=1), 1) != ratios_by_problem(World(problems=5, models=1), 2)


def test_the_effect_is_recovered():
    rho, _ = simulated_ratios(World(problems=5_000, models=1, effect=0.3, noise=0.1, fail=0.0, skip=0.0), 1)
    assert np.log(rho).mean() == pytest.approx(0.3, abs=0.01)


def test_shares_of_skipped_and_unfinished_attempts_are_as_asked():
    plan, records = simulate(World(problems=74, models=6, skip=0.2, unfinished=0.1, fail=0.3, difficulty=0.0), 1)
    conditioned = [record for record in records.values() if record.arm == "conditioned"]
    assert np.mean([record.ended == "skipped" for record in conditioned]) == pytest.approx(0.2, abs=0.05)
    solo = [attempt for attempt in plan.attempts if attempt.arm == "solo"]
    assert np.mean([attempt.key not in records for attempt in solo]) == pytest.approx(0.1, abs=0.03)
    passed = [record.final.passed for record in records.values() if record.arm == "solo" and record.final]
    assert np.mean(passed) == pytest.approx(0.7, abs=0.05)


def test_a_study_written_to_a_store_is_read_back_as_it_was(tmp_path):
    world = World(problems=2, models=1, texts=True, fail=0.0, skip=0.0, rematched=1.0)
    plan, records = simulate(world, 7)
    told = []
    with Store.open(tmp_path, create=True) as store:
        write_study(world, 7, store, "made", saved=lambda done, of: told.append((done, of)))
        assert store.experiment("made").plan == plan
        assert dict(store.attempts("made")) == records
        study = frames_from_store(store, "made")
    assert told[-1] == (8, 8)
    assert set(study.comparisons["rho_from"]) == {MEASURED}
    assert study.comparisons["rho"].to_list() == pytest.approx(study.comparisons["rho_medians"].to_list(), rel=0.1)


@pytest.mark.parametrize("design", ["cross-dsl", "content", "placebo", "format"])
def test_a_written_study_is_one_that_has_been_run(tmp_path: Path, design: str) -> None:
    with Store.open(tmp_path, create=True) as store:
        write_study(
            World(problems=4, models=1, designs=(design,), texts=True), 7, store, "made", fingerprint=fingerprint
        )
        experiment = store.experiment("made")
        states = {item.state for item in plan_missing(experiment.spec, experiment.plan, store, fingerprint).items}
    assert states <= {State.KEPT, State.SKIPPED}


def test_texts_have_the_shape_and_the_size_of_real_ones():
    _, records = simulate(World(problems=3, models=1, texts=True, skip=0.0), 3)
    for record in records.values():
        Trajectory.model_validate(record.trajectory)
        compile(record.kernel, "kernel.py", "exec")
        assert record.kernel == record.submissions[-1].source
        assert 5_000 < len(record.kernel) < 30_000
        assert 100_000 < len(json.dumps(record.trajectory)) < 500_000
        asked = [submission.requested_at_s for submission in record.submissions]
        assert asked == sorted(asked)
    treated = [record for record in records.values() if record.source]
    assert all(records[record.source].skill in record.instruction for record in treated)


def test_some_failures_are_broken_rules_that_were_measured_all_the_same():
    _, records = simulate(World(violate=1.0, fail=0.5, models=1, problems=20), 1)
    refused = [record.final for record in records.values() if record.final and not record.final.passed]
    assert refused and all(verdict.timing and verdict.ended_at is Stage.RULES for verdict in refused)


def test_more_problems_than_the_catalogue_has_are_refused():
    with pytest.raises(UserError, match="the catalogue has 74"):
        simulate(World(problems=75), 1)


def test_other_designs_have_an_effect_only_where_the_skill_is_of_the_same_problem():
    world = World(problems=74, models=3, designs=("cross-dsl", "retry", "placebo"), effect=1.0, noise=0.1, fail=0.0)
    study = frames_of(*simulate(world, 1))
    lifts = {row["design"]: row["lift"] for row in outcome.questions(study.comparisons).frame.to_dicts()}
    assert lifts["cross-dsl"] > 1
    assert lifts["retry"] == pytest.approx(0, abs=0.05)
    assert lifts["placebo"] == pytest.approx(0, abs=0.05)


def test_what_chance_gives_explains_standing_where_there_is_no_effect():
    study = frames_of(*simulate(World(), 2))
    for row in standing(study.main).frame.filter(pl.col("model") == "all").to_dicts():
        assert row["lift_low"] < row["chance"] < row["lift_high"]
    assert all(row["chance"] is not None for row in tier_pairs(study.main).frame.to_dicts())
