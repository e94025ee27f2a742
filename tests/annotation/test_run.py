"""Annotating a study: what is asked, in which order, blind, once; resuming, faults, several annotators."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from metakernelbench.analysis.annotations import subjects_of
from metakernelbench.annotation.annotator import Annotator
from metakernelbench.annotation.results import Results, results_of
from metakernelbench.annotation.run import Outcome
from metakernelbench.annotation.scripted import Reply, ScriptedAnnotator, serving
from metakernelbench.annotation.stages import ask_stages, stages_of
from metakernelbench.annotation.subjects import Subjects
from metakernelbench.errors import InfrastructureFault, UserError
from metakernelbench.store.store import Store
from tests.annotation.study import NAME, SOURCES, copied, replies, scratch, small_study

SKILLS = len(SOURCES) * 2
"""Texts: each gold skill stands in two attempts, each short one in six."""


def run(
    store: Store,
    given: Sequence[Reply],
    models: Sequence[str] = ("scripted/judge",),
    passes: int = 1,
) -> tuple[Outcome, ScriptedAnnotator]:
    async def go() -> tuple[Outcome, ScriptedAnnotator]:
        async with serving(tuple(given)) as server:
            asked_by = [Annotator(model=m, api_base=server.api_base, first_pause_s=0.01) for m in models]
            kept = store.annotations
            outcome = await ask_stages(stages_of(subjects(store), kept, asked_by, passes), kept)
            return outcome, server

    return asyncio.run(go())


def subjects(store: Store) -> Subjects:
    return subjects_of(store, NAME)[0]


def results(store: Store) -> Results:
    return results_of(subjects(store), store.annotations)


@cache
def _annotated() -> Path:
    folder = scratch()
    with small_study(folder) as store:
        run(store, replies())
    return folder


def annotated_study(folder: Path) -> Store:
    """The small study with a model's answers to all questions."""
    return copied(_annotated(), folder)


def questions(server: ScriptedAnnotator) -> list[str]:
    return [body["response_format"]["json_schema"]["name"].removesuffix("_labels") for body in server.requests]


def test_a_study_is_annotated_from_skills_to_causes(tmp_path: Path) -> None:
    with small_study(tmp_path) as store:
        outcome, server = run(store, replies())
        assert outcome.failed == {}
        # Six skills that two models share, six short ones; twelve treatments with a labelled skill; four harmed.
        assert questions(server).count("skill") == SKILLS
        assert questions(server).count("uptake") == 12
        assert questions(server).count("cause") == 4
        assert questions(server)[:SKILLS] == ["skill"] * SKILLS
        found = results(store)
        assert len(found.skills) == SKILLS
        assert {label.uptake for one in found.uptakes.values() for label in one.labels.uptake} == {"followed_fully"}
        assert {one.labels.cause for one in found.causes.values() if one.labels} == {"unverified_adoption"}
        assert sorted(found.causes) == [
            f"{problem}/tirx/{model}/0/from-cute" for problem in ("p28", "p49") for model in ("a/one", "b/two")
        ]


def test_a_second_run_asks_nothing(tmp_path: Path) -> None:
    with annotated_study(tmp_path) as store:
        outcome, server = run(store, [Reply(http_error=500)])
        assert server.requests == []
        assert (outcome.answered, outcome.kept) == (0, SKILLS + 12 + 4)


def test_equal_skills_of_both_arms_are_asked_about_once_and_in_an_order_that_tells_nothing(tmp_path: Path) -> None:
    with small_study(tmp_path) as store:
        _, server = run(store, replies())
        asked = [b["messages"][1]["content"] for b in server.requests[:SKILLS]]
        assert len({a.split("begin note]\n")[1].split("\n[")[0] for a in asked}) == SKILLS
        for body in server.requests[:SKILLS]:
            whole = json.dumps(body["messages"])
            for word in ("solo", "conditioned", "from-cute", "a/one", "b/two", "harm", "runtime", "passed by"):
                assert word not in whole


def test_what_a_run_has_answered_before_a_fault_is_kept(tmp_path: Path) -> None:
    with small_study(tmp_path) as store:
        with pytest.raises(InfrastructureFault, match="5 questions in a row had no answer"):
            run(store, [Reply(question="skill", labels=(), times=3), Reply(http_error=503)])
        assert len(results(store).skills) == 3
        outcome, server = run(store, replies())
        assert outcome.kept == 3
        assert questions(server).count("skill") == SKILLS - 3


def test_a_provider_that_refuses_ends_the_run_at_once(tmp_path: Path) -> None:
    with small_study(tmp_path) as store, pytest.raises(UserError, match="refuses"):
        run(store, [Reply(http_error=401)])


def test_an_answer_that_stays_malformed_fails_alone(tmp_path: Path) -> None:
    bad = Reply(question="uptake", contains="p36", raw="no")
    with small_study(tmp_path) as store:
        outcome, _ = run(store, [bad, *replies()])
        assert len(outcome.failed) == 2
        assert all("malformed" in reason for reason in outcome.failed.values())
        assert len(results(store).uptakes) == 10


def test_models_and_passes_are_votes(tmp_path: Path) -> None:
    with small_study(tmp_path) as store:
        outcome, server = run(store, replies(), models=("scripted/one", "scripted/two"), passes=2)
        assert outcome.answered == 4 * (SKILLS + 12 + 4) == len(server.requests)
        found = results(store)
        assert {one.votes for one in found.skills.values()} == {4}
        raters = {(a.annotator, a.pass_number) for a in found.answers}
        assert raters == {(f"scripted/{name}", number) for name in ("one", "two") for number in (1, 2)}


def test_what_the_records_decide_is_asked_of_nobody(tmp_path: Path) -> None:
    with small_study(tmp_path) as store:
        about = subjects(store)
        key = "p28/tirx/a/one/0/from-cute"
        planned = next(a for a in about.plan.attempts if a.key == key)
        store.save_attempt(NAME, planned, about.records[key].model_copy(update={"kernel": None, "final": None}))
        _, server = run(store, replies())
        assert questions(server).count("cause") == 3
        decided = results(store).causes[key]
        assert decided.labels is not None
        assert (decided.labels.cause, decided.labels.decided_by, decided.votes) == ("budget_or_artifact", "records", 0)


def test_an_attempt_that_ran_again_is_asked_about_again(tmp_path: Path) -> None:
    with annotated_study(tmp_path) as store:
        about = subjects(store)
        key = "p03/tirx/a/one/0/from-cute"
        planned = next(a for a in about.plan.attempts if a.key == key)
        again = about.records[key].model_copy(update={"kernel": "# another kernel"})
        store.save_attempt(NAME, planned, again)
        assert key not in results(store).uptakes
        _, server = run(store, replies())
        assert questions(server) == ["uptake"]
