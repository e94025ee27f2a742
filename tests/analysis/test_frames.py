"""A study's frames: the same from memory, from a store and from Parquet; head-to-head ratios; the main question."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from metakernelbench.analysis.comparisons import MEASURED, MEDIANS, VERDICTS
from metakernelbench.analysis.frames import Frames, frames_from_store, frames_of, read_parquet, write_parquet
from metakernelbench.analysis.simulate import World, simulate, write_study
from metakernelbench.errors import UserError
from metakernelbench.experiments.designs import retry
from metakernelbench.experiments.planned import merged
from metakernelbench.store.store import Store
from tests.analysis.support import FAIL, record, rematch, study_of

WORLD = World(problems=3, models=2, texts=True, skip=0.3, fail=0.2)


def assert_equal(one: Frames, other: Frames) -> None:
    assert (one.name, one.band) == (other.name, other.band)
    for name in ("attempts", "comparisons", "submissions"):
        order = ["key"] if name == "attempts" else ["treatment"] if name == "comparisons" else ["key", "number"]
        assert_frame_equal(getattr(one, name).sort(order), getattr(other, name).sort(order))


def test_a_store_a_parquet_export_and_memory_give_the_same_frames(tmp_path):
    plan, records = simulate(WORLD, 3)
    both_ran = [c for c in plan.comparisons if records[c.treatment].kernel]
    measured = [rematch(c, records, ratio=1.5) for c in both_ran]
    with Store.open(tmp_path / "store", create=True) as store:
        write_study(WORLD, 3, store, "made")
        for each in measured:
            store.rematches.save("made", each)
        found = frames_from_store(store, "made")
    assert_equal(found, frames_of(plan, records, name="made", rematches=measured))
    assert found.comparisons["measured_ratio"].count() == len(both_ran) > 0
    write_parquet(found, tmp_path / "export")
    assert_equal(read_parquet(tmp_path / "export"), found)


@pytest.mark.parametrize("spoilt", ["study.json", "attempts.parquet"])
def test_a_folder_that_holds_no_export_is_named(tmp_path, spoilt):
    write_parquet(frames_of(*study_of({"p03": (1.0, 1.0, 1.0, 1.0)})), tmp_path)
    (tmp_path / spoilt).write_text("nonsense")
    with pytest.raises(UserError, match="holds no exported study"):
        read_parquet(tmp_path)


@pytest.mark.parametrize(
    ("column", "said"),
    [(pl.lit("x").alias("model"), "has no column `family`"), (pl.lit("x").alias("ms"), "`ms` in .* is String, not")],
)
def test_an_export_with_other_columns_is_named(tmp_path, column, said):
    write_parquet(frames_of(*study_of({"p03": (1.0, 1.0, 1.0, 1.0)})), tmp_path)
    path = tmp_path / "attempts.parquet"
    left_out = ["family"] if "family" in said else []
    pl.read_parquet(path).with_columns(column).drop(left_out).write_parquet(path)
    with pytest.raises(UserError, match=f"holds no exported study: .*{said}"):
        read_parquet(tmp_path)


def test_a_ratio_comes_from_the_head_to_head_measurement_where_both_pass():
    plan, records = study_of({"p03": (4.0, 6.0, 4.0, 4.0), "p21": (FAIL, 3.0, 6.0, 5.0)})
    study = frames_of(plan, records, rematches=[rematch(c, records, ratio=9.0) for c in plan.comparisons])
    found = {(row["problem"], row["direction"]): row for row in study.comparisons.to_dicts()}
    clipped, rescue = found["p03", "cute→tirx"], found["p21", "tirx→cute"]
    assert (clipped["rho"], clipped["rho_from"], clipped["rho_medians"]) == (4.0, MEASURED, 1.5)
    assert (rescue["rho"], rescue["rho_from"]) == (4.0, VERDICTS)
    assert study.with_ratios("medians").comparisons["rho"].to_list() == study.comparisons["rho_medians"].to_list()


def test_a_measurement_of_kernels_that_are_gone_says_nothing():
    plan, records = study_of({"p03": (4.0, 6.0, 4.0, 4.0)})
    stale = [replace(rematch(c, records, ratio=9.0), treatment_sha256="another") for c in plan.comparisons]
    study = frames_of(plan, records, rematches=stale)
    assert set(study.comparisons["rho_from"]) == {MEDIANS}
    assert study.measured == 0


def test_the_main_question_is_the_skill_from_another_dsl_and_retries_are_apart():
    plan, records = study_of({"p03": (4.0, 6.0, 4.0, 4.0)})
    with_retry = merged([retry(["p03"], ["cute", "tirx"], ["m"], 1), plan])
    again = [attempt for attempt in with_retry.attempts if attempt.key not in records]
    study = frames_of(with_retry, records | {attempt.key: record(attempt, 4.0) for attempt in again})
    assert study.contrasts[0] == ("cross-dsl", "skill")
    assert [design for design, _ in study.contrasts] == ["cross-dsl", "retry"]
    assert set(study.main["direction"]) == {"cute→tirx", "tirx→cute"}
    retried = study.asking("retry").main
    assert sorted(retried["rho"]) == [1.0, 1.5]
    assert set(retried["source_state"]) == {"none"}


def test_a_study_of_one_model_holds_nothing_of_the_others():
    study = frames_of(*simulate(WORLD, 1)).of_model("model-a")
    for frame in (study.attempts, study.comparisons):
        assert set(frame["model"]) == {"model-a"}
    assert all("/model-a/" in key for key in study.submissions["key"])
