"""Annotations joined with outcomes: a study whose numbers can be counted by hand, and a large one made by chance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from metakernelbench.analysis import annotation_tables as tables
from metakernelbench.analysis.annotation_files import pictures
from metakernelbench.analysis.annotations import annotated, cells, harmed_treatments, subjects_of, uptakes
from metakernelbench.analysis.figures.theme import svg
from metakernelbench.analysis.frames import frames_of
from metakernelbench.analysis.resampling import spearman
from metakernelbench.analysis.simulate import World, family_of, simulate
from metakernelbench.analysis.tables import Table
from metakernelbench.annotation.consensus import Consensus
from metakernelbench.annotation.labels import CategoryUptake, CauseLabel, SkillLabels, Statement, UptakeLabels
from metakernelbench.annotation.results import Results, results_of
from metakernelbench.annotation.rubric import rubric, taxonomy
from metakernelbench.annotation.subjects import Subjects
from tests.annotation.study import NAME, small_study
from tests.annotation.test_run import annotated_study


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Subjects, pl.DataFrame, Results]:
    with annotated_study(tmp_path_factory.mktemp("study")) as store:
        subjects, comparisons = subjects_of(store, NAME)
        return subjects, comparisons, results_of(subjects, store.annotations)


def by_name(found: tuple[Table, ...]) -> dict[str, Table]:
    return {table.name: table for table in found}


def row(table: Table, **values: Any) -> dict[str, Any]:
    found = table.frame.filter(*(pl.col(name) == value for name, value in values.items()))
    assert found.height == 1, found
    return found.row(0, named=True)


def test_prevalence_is_counted_in_harmed_and_in_helped_comparisons(small: Any) -> None:
    """Harmed: p28 (s02) and p49 (s26) by two models. Helped: p03 (s11), p36 (s03), p66 (s40), p72 (s37)."""
    subjects, comparisons, results = small
    found = by_name(tables.annotation_tables(subjects.plan, comparisons, results))["category_prevalence"]
    closure = row(found, category="Unsupported closure")
    assert (closure["harm_n"], closure["harm"]) == (4, 1.0)  # both s02 and s26
    assert (closure["help_n"], closure["help"]) == (8, 0.5)  # s40 and s37 of four
    assert closure["difference"] == pytest.approx(0.5)
    evidence = row(found, category="Bottleneck evidence")
    assert (evidence["harm"], evidence["help"]) == (0.0, 0.25)


def test_what_the_skills_hold_is_counted_by_text_with_its_evidence(small: Any) -> None:
    """Six gold skills and six short ones: s03's and s11's failure diagnoses are supported."""
    subjects, comparisons, results = small
    found = by_name(tables.annotation_tables(subjects.plan, comparisons, results))["skill_contents"]
    failure = row(found, category="Bounded failure diagnosis")
    assert (failure["n"], failure["held"], failure["statements"], failure["supported"]) == (12, 2, 2, 1.0)
    closure = row(found, category="Unsupported closure")
    assert (closure["held"], closure["supported"], closure["disputed"]) == (4, 0.0, 0)


def test_uptake_by_outcome_counts_pairs_of_treatment_and_category(small: Any) -> None:
    subjects, comparisons, results = small
    found = by_name(tables.annotation_tables(subjects.plan, comparisons, results))
    harm = row(found["uptake_by_outcome"], outcome="harm")
    assert (harm["n"], harm["problems"], harm["followed_fully"], harm["ignored"]) == (12, 2, 1.0, 0.0)
    assert (
        row(found["uptake_by_outcome"], outcome="all")["n"]
        == uptakes(annotated(subjects.plan, comparisons, results), results).height
    )
    assert row(found["propagation"], outcome="all")["propagated"] == 0.0


def test_causes_are_counted_by_model(small: Any) -> None:
    subjects, comparisons, results = small
    found = by_name(tables.annotation_tables(subjects.plan, comparisons, results))["causes_by_model"]
    assert [(r["model"], r["n"], r["unverified_adoption"], r["open"]) for r in found.frame.to_dicts()] == [
        ("all", 4, 4, 0),
        ("a/one", 2, 2, 0),
        ("b/two", 2, 2, 0),
    ]


def test_a_skill_that_nobody_annotated_is_left_out_and_not_called_empty(small: Any) -> None:
    subjects, comparisons, results = small
    rows = annotated(subjects.plan, comparisons, results)
    without = Results(subjects=subjects, skills={}, uptakes={}, causes={}, answers=())
    bare = annotated(subjects.plan, comparisons, without)
    assert bare.height == rows.height == 24
    assert bare["workload_fact"].null_count() == 24
    assert by_name(tables.annotation_tables(subjects.plan, comparisons, without)).keys() == {"skill_form"}
    assert rows["workload_fact"].null_count() == 0


def test_the_form_of_all_skills_is_counted_whoever_annotated(small: Any) -> None:
    subjects, comparisons, results = small
    found = by_name(tables.annotation_tables(subjects.plan, comparisons, results))["skill_form"]
    assert row(found, model="all")["n"] == 48
    assert row(found, model="all")["kept"] == 1.0


def test_where_structured_skills_are_asked_for_their_form_is_held_to_that(small: Any) -> None:
    subjects, _, _ = small
    assert not {"structured", "structure_kept"} & {c.name for c in tables.forms(subjects.plan, subjects.records).shown}
    keys = [key for key in subjects.records if key.endswith("/solo")]
    asked = {key: subjects.records[key].model_copy(update={"skill_form": "structured"}) for key in keys}
    found = tables.forms(subjects.plan, {**subjects.records, **asked})
    assert "structure_kept" in {column.name for column in found.shown}
    every = row(found, model="all")
    assert (every["structured"], every["structure_kept"]) == (0.5, 0.0)


def test_the_report_of_a_large_study_is_drawn_in_little_time_and_with_intervals() -> None:
    """2 models, 40 problems: labels by chance, but skills with `ambition_capping` harm, and uptake follows lift."""
    world = World(problems=40, models=2, effect=0.0, problem_effect=0.5, skip=0.0, fail=0.15)
    plan, records = simulate(world, seed=3)
    frames = frames_of(plan, records, family_of=family_of)
    comparisons = frames.comparisons
    harmed = harmed_treatments(plan, comparisons)
    records = {key: r.model_copy(update={"skill": f"Of {key}. Second."}) for key, r in records.items()}
    subjects = Subjects(plan=plan, records=records, harmed=harmed, max_submissions=10)
    results = by_chance(subjects, comparisons)
    found = by_name(tables.annotation_tables(plan, comparisons, results))
    capping = row(found["category_prevalence"], category="Ambition capping")
    assert capping["harm"] > capping["help"]
    assert capping["difference_low"] > 0
    assert capping["difference_low"] < capping["difference"] < capping["difference_high"]
    assert capping["harm_low"] < capping["harm"] < capping["harm_high"]
    lift = found["uptake_and_lift"].frame.row(0, named=True)
    assert lift["cells"] == 12
    assert lift["correlation"] > 0.5
    assert lift["p"] < 0.05
    each = cells(annotated(plan, comparisons, results))
    assert lift["correlation"] == spearman(each["uptake"].to_numpy(), each["lift"].to_numpy())
    shares = row(found["uptake_by_outcome"], outcome="all")
    assert sum(shares[word] for word in taxonomy().uptake_ids) == pytest.approx(1.0)
    drawn = pictures(list(found.values()), plan, comparisons, results, 0.05)
    assert [picture.name for picture in drawn] == [
        "category-prevalence", "uptake-shares", "cause-shares", "uptake-against-lift",
    ]  # fmt: skip
    for picture in drawn:
        assert svg(picture.chart).startswith("<svg")


def by_chance(subjects: Subjects, comparisons: pl.DataFrame) -> Results:
    """Labels by chance. A harmful skill caps ambition, and the more a comparison gained the more was followed."""
    rng = np.random.default_rng(5)
    skills, used = {}, {}
    for source, treatment, rho in comparisons.select("source", "treatment", "rho").iter_rows():
        held = [c for c in rubric().ids if rng.random() < 0.4]
        held += ["ambition_capping"] if rho is not None and rho < 0.8 and rng.random() < 0.8 else []
        text = subjects.records[source].skill or ""
        statements = tuple(
            Statement(category=c, quote=text, start=0, end=len(text), supported=False) for c in dict.fromkeys(held)
        )
        skills[subjects.skill_of[source]] = Consensus(labels=SkillLabels(statements=statements), votes=1)
        chance = 0.5 if rho is None else float(np.clip(0.5 + np.log(rho), 0, 1))
        words = ["followed_fully" if rng.random() < chance else "ignored" for _ in held]
        labels = tuple(CategoryUptake(category=c, uptake=w) for c, w in zip(held, words, strict=True))
        used[treatment] = Consensus(labels=UptakeLabels(uptake=labels), votes=1)
    causes = {
        key: Consensus[CauseLabel | None](labels=CauseLabel(cause=str(cause), decided_by="annotator"), votes=1)
        for key, cause in zip(subjects.harmed, rng.choice(taxonomy().cause_ids, len(subjects.harmed)), strict=True)
    }
    return Results(subjects=subjects, skills=skills, uptakes=used, causes=causes, answers=())


def test_a_study_without_comparisons_has_tables_that_say_nothing() -> None:
    plan, records = simulate(World(problems=1, models=1, dsls=("cute",)), seed=0)
    comparisons = frames_of(plan, records, family_of=family_of).comparisons
    subjects = Subjects(plan=plan, records=records, harmed=(), max_submissions=10)
    results = Results(
        subjects=subjects, skills={"x": Consensus(labels=SkillLabels(), votes=1)}, uptakes={}, causes={}, answers=()
    )
    found = by_name(tables.annotation_tables(plan, comparisons, results))
    assert row(found["category_prevalence"], category="Workload fact")["harm"] is None


def test_a_placebo_beside_the_main_question_changes_nothing(tmp_path: Path) -> None:
    with small_study(tmp_path) as store:
        subjects, comparisons = subjects_of(store, NAME)
    placebo = comparisons.with_columns(design=pl.lit("placebo"), arm=pl.lit("placebo"), rho=pl.lit(0.25))
    assert harmed_treatments(subjects.plan, pl.concat([placebo, comparisons])) == subjects.harmed
    assert len(harmed_treatments(subjects.plan, placebo)) == 24


def test_only_whole_skills_against_nothing_are_compared(tmp_path: Path) -> None:
    with small_study(tmp_path) as store:
        subjects, comparisons = subjects_of(store, NAME)
    ablated = comparisons.with_columns(pl.col("treatment").alias("baseline"))
    assert harmed_treatments(subjects.plan, comparisons)
    assert harmed_treatments(subjects.plan, ablated) == []
