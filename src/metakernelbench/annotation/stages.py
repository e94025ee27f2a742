"""Annotating an experiment from its beginning to its end: skills first, because what is asked of an attempt depends on
what its skill was found to contain; then uptake and causes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from metakernelbench.annotation.annotator import Annotator
from metakernelbench.annotation.labels import SkillLabels
from metakernelbench.annotation.questions import Asked
from metakernelbench.annotation.results import skill_consensuses
from metakernelbench.annotation.run import AT_ONCE, Outcome, Todo, answer_all, count, todo
from metakernelbench.annotation.scripted import read_replies, serving
from metakernelbench.annotation.subjects import Subjects
from metakernelbench.attempts.agents.models import check_provider
from metakernelbench.attempts.settings import SCRIPTED
from metakernelbench.errors import UserError
from metakernelbench.store.annotations import Annotations


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What is to be asked now, and how much of it has its answer already."""

    name: str
    needed: int
    items: tuple[Todo, ...]


def check_annotators(
    models: Sequence[str], passes: int, temperature: float, replies: Path | None, *, will_ask: bool = True
) -> None:
    """Raise `UserError` for what cannot work, before anything starts. Without `will_ask` no key is needed."""
    doubles = {model for model in models if models.count(model) > 1}
    if doubles:
        raise UserError(f"`{doubles.pop()}` is named twice", hint="more looks of one model are --passes")
    if passes < 1:
        raise UserError(f"--passes is {passes}; it counts from 1")
    if not 0 <= temperature <= 2:
        raise UserError(f"--temperature is {temperature:g}; it lies between 0 and 2")
    for model in models if will_ask else ():
        if not model.startswith(SCRIPTED):
            check_provider(model)
        elif replies is None:
            raise UserError(f"the model `{model}` needs prepared replies", hint="name their file with --replies")
    if replies is not None:
        if not any(model.startswith(SCRIPTED) for model in models):
            raise UserError("--replies is for models called `scripted/...`, and none is given")
        read_replies(replies)


@asynccontextmanager
async def annotators(models: Sequence[str], temperature: float, replies: Path | None) -> AsyncIterator[list[Annotator]]:
    """The annotators, with the stand-in for scripted ones running."""
    async with serving(() if replies is None else read_replies(replies)) as server:
        yield planned_annotators(models, temperature, server.api_base)


def planned_annotators(models: Sequence[str], temperature: float, api_base: str = "") -> list[Annotator]:
    """The annotators as they are asked, or, without an address for scripted ones, as they would be."""
    return [
        Annotator(model=m, temperature=temperature, api_base=api_base if m.startswith(SCRIPTED) else None)
        for m in models
    ]


def stages_of(subjects: Subjects, kept: Annotations, asked_by: Sequence[Annotator], passes: int) -> Iterator[Stage]:
    """The stages of an experiment, each made when it is reached: the second from what the first has found."""
    yield stage("skills", subjects.about_skills(), kept, asked_by, passes)
    yield stage("attempts", about_attempts(subjects, kept), kept, asked_by, passes)


def stage(
    name: str, asked: Sequence[Asked], kept: Annotations | None, asked_by: Sequence[Annotator], passes: int
) -> Stage:
    """These questions, less those that have their answer. Without a store none has."""
    items = todo(asked, asked_by, passes, kept)
    return Stage(name=name, needed=count(asked, asked_by, passes), items=tuple(items))


def about_attempts(subjects: Subjects, kept: Annotations) -> list[Asked]:
    """The questions about uptake and causes that follow from the labels of the skills so far."""
    found, _ = skill_consensuses(subjects, kept)
    labels: dict[str, SkillLabels] = {digest: consensus.labels for digest, consensus in found.items()}
    causes = [asked for asked in subjects.about_causes(labels).values() if isinstance(asked, Asked)]
    return [*subjects.about_uptake(labels).values(), *causes]


async def ask_stages(
    to_ask: Iterable[Stage],
    kept: Annotations,
    *,
    at_once: int = AT_ONCE,
    begun: Callable[[Stage], None] = lambda _: None,
    done: Callable[[Todo, str | None], None] = lambda *_: None,
) -> Outcome:
    """Ask everything that has no answer yet. Raises `UserError` and `InfrastructureFault` as `answer_all` does."""
    outcome = Outcome()
    for one in to_ask:
        outcome.kept += one.needed - len(one.items)
        begun(one)
        await answer_all(one.items, kept, outcome, done, at_once)
    return outcome
