"""A store keeps annotators' answers, finds them by what was asked and by what it was about, and mixes no versions."""

from __future__ import annotations

from typing import Any

import pytest

from metakernelbench.annotation.labels import SkillLabels
from metakernelbench.errors import StoreError
from metakernelbench.store.annotations import Answer
from metakernelbench.store.store import Store


def answer(**changes: Any) -> Answer:
    values: dict[str, Any] = {
        "question": "skill",
        "subject": "s1",
        "request": "r1",
        "annotator": "vendor/a",
        "pass_number": 1,
        "words_version": 1,
        "prompt_version": "1",
        "temperature": 0.0,
        "labels": '{"statements": []}',
        "tries": 2,
        "input_tokens": 1200,
        "output_tokens": 80,
        "cost_usd": 0.01,
        "answered_at": "2026-01-01T00:00:00+00:00",
    }
    return Answer(**(values | changes))


def test_an_answer_is_found_by_its_request_and_by_its_subject(store: Store) -> None:
    other = answer(request="r2", subject="s2", temperature=None, cost_usd=None, input_tokens=None)
    store.annotations.save([answer(), other])
    assert store.annotations.answered(["r1", "r2", "r3"]) == {"r1": answer(), "r2": other}
    assert store.annotations.of("skill", ["s1", "s3"], 1) == {"s1": [answer()]}


def test_a_later_answer_to_the_same_request_replaces_the_first(store: Store) -> None:
    store.annotations.save([answer()])
    store.annotations.save([answer(labels="later")])
    assert store.annotations.answered(["r1"])["r1"].labels == "later"


@pytest.mark.parametrize("labels", ["{", '{"statements": 3}'])
def test_labels_that_cannot_be_read_are_named(labels: str) -> None:
    with pytest.raises(StoreError, match="the labels that vendor/a gave of s1 cannot be read: ") as caught:
        answer(labels=labels).read(SkillLabels.model_validate_json)
    assert "\n" not in caught.value.message
    assert answer().read(SkillLabels.model_validate_json) == SkillLabels()


def test_of_one_annotators_pass_the_newest_answer_counts_whatever_was_asked(store: Store) -> None:
    store.annotations.save([answer(), answer(request="r2", prompt_version="2", labels="newer")])
    assert [a.labels for a in store.annotations.of("skill", ["s1"], 1)["s1"]] == ["newer"]


def test_annotators_and_passes_are_apart_and_in_order(store: Store) -> None:
    more = [answer(request=f"{name}{number}", annotator=name, pass_number=number) for name in "ba" for number in (2, 1)]
    store.annotations.save(more)
    found = store.annotations.of("skill", ["s1"], 1)["s1"]
    assert [(a.annotator, a.pass_number) for a in found] == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]


def test_other_questions_and_other_versions_of_the_words_are_not_mixed_in(store: Store) -> None:
    store.annotations.save([answer(question="uptake"), answer(request="r2", words_version=2)])
    assert store.annotations.of("skill", ["s1"], 1) == {}


def test_very_many_are_found_at_once(store: Store) -> None:
    store.annotations.save(answer(request=f"r{n}", subject=f"s{n}") for n in range(1200))
    assert len(store.annotations.answered(f"r{n}" for n in range(1200))) == 1200
