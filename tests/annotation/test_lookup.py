"""From a skill's digest to its statements, and to the skill without some of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from metakernelbench.annotation.labels import SkillLabels
from metakernelbench.annotation.lookup import ablated_skill, skill_labels
from metakernelbench.annotation.rubric import rubric
from metakernelbench.attempts.settings import AttemptSettings
from metakernelbench.errors import UnknownName, UserError
from metakernelbench.experiments.designs import PlannedAttempt
from metakernelbench.store.annotations import Answer
from metakernelbench.store.artifacts import digest_of
from metakernelbench.store.store import Store
from tests.annotation.test_statements import SKILL, labelled
from tests.experiments.support import record_of

SOLO = PlannedAttempt(problem="p28", dsl="tirx", model="vendor/model")


def store_with(folder: Path, *votes: SkillLabels) -> Store:
    store = Store.open(folder, create=True)
    store.save_attempt("small", SOLO, record_of(SOLO, AttemptSettings(), None).model_copy(update={"skill": SKILL}))
    store.annotations.save(
        Answer(
            question="skill",
            subject=digest_of(SKILL),
            request=str(number),
            annotator=f"vendor/judge-{number}",
            pass_number=1,
            words_version=rubric().version,
            prompt_version="1",
            temperature=0.0,
            labels=vote.model_dump_json(),
            answered_at="2026-01-01T00:00:00+00:00",
        )
        for number, vote in enumerate(votes)
    )
    return store


def labels(category: str, *quotes: str) -> SkillLabels:
    return SkillLabels(statements=tuple(labelled(SKILL, category, *quotes)))


def test_a_skill_is_found_by_the_digest_that_its_attempt_names(tmp_path: Path) -> None:
    with store_with(tmp_path, labels("work_partition", "One worker takes several")) as store:
        standing = store.standing("small", SOLO.key)
        assert standing is not None
        assert standing.skill is not None
        found = skill_labels(store, standing.skill)
        assert found is not None
        assert [(s.category, s.quote) for s in found.statements] == [
            ("work_partition", "One worker takes several rows.")
        ]
        assert "One worker" not in ablated_skill(store, standing.skill, "work_partition")
        assert ablated_skill(store, standing.skill, "workload_fact") == SKILL


def test_the_majority_decides_what_is_removed(tmp_path: Path) -> None:
    votes = [
        labels("numerics_guidance", "The sum stays in float32"),
        labels("numerics_guidance", "until the last product", "Rounding happens once"),
        labels("work_partition", "One worker takes"),
    ]
    with store_with(tmp_path, *votes) as store:
        found = skill_labels(store, digest_of(SKILL))
        assert found is not None
        assert [s.quote for s in found.statements] == ["The sum stays in float32, e.g. until the last product."]


def test_an_unannotated_skill_is_not_one_without_the_category(tmp_path: Path) -> None:
    with store_with(tmp_path) as store:
        assert skill_labels(store, digest_of(SKILL)) is None
        with pytest.raises(UserError, match="is not annotated"):
            ablated_skill(store, digest_of(SKILL), "workload_fact")
        with pytest.raises(UnknownName, match="unknown category `workload`"):
            ablated_skill(store, digest_of(SKILL), "workload")
