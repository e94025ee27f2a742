"""The instrument's words are complete, distinct and consistent."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from metakernelbench.annotation.rubric import Rubric, Taxonomy, rubric, taxonomy


def test_the_rubric_has_the_eleven_categories_of_the_study() -> None:
    assert rubric().ids == (
        "workload_fact",
        "verified_reformulation",
        "hardware_mapping",
        "work_partition",
        "bottleneck_evidence",
        "numerics_guidance",
        "verification_recipe",
        "failure_diagnosis",
        "ambition_capping",
        "unsupported_closure",
        "agenda_handoff",
    )


def test_examples_and_definitions_are_each_said_once() -> None:
    texts = [
        text
        for category in rubric().category
        for text in (category.definition, category.criterion, category.positive, category.negative)
    ]
    assert len(set(texts)) == len(texts)


def test_breaking_a_rule_comes_first_and_a_lost_hair_just_before_truncation() -> None:
    steps = taxonomy().steps
    assert steps[0] == "rule_violation"
    assert steps[-2:] == ("tolerance_edge", "search_truncation")
    assert taxonomy().cause_of("rule_violation") == taxonomy().cause_of("tolerance_edge") == "rule_or_precision"


def test_only_following_counts_as_taken_up() -> None:
    assert taxonomy().used == {"followed_fully", "followed_partially"}


def test_a_rubric_with_a_category_twice_is_refused() -> None:
    data = rubric().model_dump()
    data["category"] = (*data["category"][:-1], data["category"][0])
    with pytest.raises(ValidationError, match="category named twice: workload_fact"):
        Rubric.model_validate(data)


def test_a_rubric_that_lacks_a_category_is_refused() -> None:
    data = rubric().model_dump()
    data["category"] = data["category"][:-1]
    with pytest.raises(ValidationError, match="category"):
        Rubric.model_validate(data)


def test_a_cause_without_a_step_is_refused() -> None:
    data = taxonomy().model_dump()
    data["step"] = tuple(step for step in data["step"] if step["cause"] != "toolchain_friction")
    with pytest.raises(ValidationError, match="do not cover each other: toolchain_friction"):
        Taxonomy.model_validate(data)
