"""The gold set is whole and varied, and measures what an annotator finds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from pydantic import ValidationError

from metakernelbench.annotation.gold_measure import MAJORITY, Scores, all_questions, measure
from metakernelbench.annotation.gold_set import GoldSet, GoldSkill, gold_set
from metakernelbench.annotation.labels import CauseLabel, Labels, SkillLabels
from metakernelbench.annotation.questions import Asked
from metakernelbench.annotation.rubric import rubric, taxonomy
from metakernelbench.problems import catalog
from metakernelbench.store.annotations import Answer
from metakernelbench.store.store import Store


def test_it_is_as_large_as_it_has_to_be_and_covers_both_languages() -> None:
    gold = gold_set()
    assert len(gold.skill) >= 40
    assert len(gold.attempt) >= 24
    for items in (gold.skill, gold.attempt):
        languages = Counter(item.dsl for item in items)
        assert min(languages["cute"], languages["tirx"]) >= len(items) // 3


def test_skills_are_about_problems_of_every_family_of_the_catalogue() -> None:
    families = Counter(catalog.family_of(skill.problem) for skill in gold_set().skill)
    assert len(families) == 6
    assert min(families.values()) >= 4


def test_every_category_is_present_in_some_skills_and_absent_from_most_kinds_of_them() -> None:
    found = Counter(category for skill in gold_set().skill for category in skill.labels.categories)
    assert set(found) == set(rubric().ids)
    assert min(found.values()) >= 7
    assert max(found.values()) < len(gold_set().skill) * 0.8
    assert sum(not skill.label for skill in gold_set().skill) >= 3


def test_every_uptake_and_every_cause_occurs() -> None:
    uptakes = Counter(label.uptake for attempt in gold_set().attempt for label in attempt.uptake)
    assert set(uptakes) == set(taxonomy().uptake_ids)
    causes = Counter(attempt.cause for attempt in gold_set().attempt)
    assert set(causes) == {*taxonomy().cause_ids, "none", None}
    assert sum(attempt.propagated for attempt in gold_set().attempt) >= 5


def test_where_the_records_decide_they_decide_what_the_gold_set_says() -> None:
    decided = 0
    for attempt in gold_set().attempt:
        if attempt.cause is not None:
            about = gold_set().about_cause(attempt)
            if isinstance(about, CauseLabel):
                decided += 1
                assert about.cause == attempt.cause
    assert decided == 4


def test_a_quote_that_does_not_stand_in_its_skill_is_refused() -> None:
    skill = gold_set().skill[0].model_dump()
    skill["label"][0]["quote"] = "Rows are dependent"
    with pytest.raises(ValidationError, match="does not stand in the text"):
        GoldSkill.model_validate(skill)


def test_an_attempt_labelled_for_other_categories_than_its_skill_holds_is_refused() -> None:
    gold = gold_set().model_dump()
    gold["attempt"][0]["uptake"] = gold["attempt"][0]["uptake"][1:]
    with pytest.raises(ValidationError, match="uptake is labelled for other categories"):
        GoldSet.model_validate(gold)


def answer(asked: Asked, labels: Labels, model: str) -> Answer:
    return Answer(
        question=asked.question,
        subject=asked.subject,
        request=asked.request(model=model),
        annotator=model,
        pass_number=1,
        words_version=asked.words_version,
        prompt_version="1",
        temperature=0.0,
        labels=labels.model_dump_json(),
        answered_at="2026-01-01T00:00:00+00:00",
    )


def test_an_annotator_that_finds_everything_but_one_category_is_measured_so(tmp_path: Path) -> None:
    gold = gold_set()
    with Store.open(tmp_path, create=True) as store:
        for skill in gold.skill:
            kept = tuple(s for s in skill.labels.statements if s.category != "numerics_guidance")
            store.annotations.save(
                [
                    answer(skill.asked, SkillLabels(statements=kept), "careful"),
                    answer(skill.asked, SkillLabels(), "blind"),
                ]
            )
        found = {(one.annotator, one.label): one for one in measure(gold, store.annotations, ["careful", "blind"], 1)}
    fact = found["careful", "workload_fact"]
    assert (fact.precision, fact.recall, fact.f1, fact.kappa) == (1.0, 1.0, 1.0, 1.0)
    numerics = found["careful", "numerics_guidance"]
    assert (numerics.precision, numerics.recall, numerics.f1, numerics.kappa) == (None, 0.0, 0.0, 0.0)
    assert found["blind", "workload_fact"].recall == 0.0
    assert found[MAJORITY, "workload_fact"].found == 0  # one of two is no majority
    assert ("careful", "ignored") not in found  # attempts were not answered


def test_scores_by_hand() -> None:
    score = Scores(annotator="a", label="l", n=10, found=4, gold=5, both=3)
    assert (score.precision, score.recall) == (0.75, 0.6)
    assert score.f1 == pytest.approx(2 * 0.75 * 0.6 / (0.75 + 0.6))
    assert score.kappa == pytest.approx((0.7 - 0.5) / 0.5)


def test_all_questions_can_be_asked_and_none_shows_its_labels() -> None:
    gold = gold_set()
    questions = all_questions(gold)
    assert len(questions) == len({asked.subject for asked in questions}) == len(gold.skill) + len(gold.attempt) + 13
    whole = "".join(text for asked in questions for text in asked.data.values())
    for skill in gold.skill:
        for label in skill.label:
            assert label.why not in whole
    for attempt in gold.attempt:
        assert attempt.propagated_why not in whole
