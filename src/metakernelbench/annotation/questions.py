"""The three questions that an annotator can be asked, made ready to be sent: instruction, data, form, check.

What a question leaves out is part of the instrument. Of a skill the annotator sees the text alone: no problem, no
language, no model, no arm, no verdict. Of an attempt it sees its course and the note it was given, but not the attempt
that it is compared with, so that a label of uptake cannot follow from the comparison.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from metakernelbench.annotation import answers
from metakernelbench.annotation.causes import cause_by, facts, open_steps
from metakernelbench.annotation.condensing import BUDGET, condensed, source_of
from metakernelbench.annotation.labels import CauseLabel, Labels, Question, SkillLabels
from metakernelbench.annotation.rubric import rubric, taxonomy
from metakernelbench.attempts.record import AttemptRecord
from metakernelbench.store.artifacts import digest_of

if TYPE_CHECKING:
    from jinja2 import Environment

PROMPT_VERSION = "1"
"""Raised whenever a template in `prompts/` changes what is asked."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One question about one text."""

    question: Question
    subject: str
    """Digest of what is asked about; answers are found by it, whoever gave them and however the question was put."""
    instruction: str
    parts: Callable[[], Mapping[str, str]] = field(repr=False)
    """Makes the data; for an attempt that is some work, and only who asks has to do it."""
    schema: Mapping[str, Any] = field(repr=False)
    check: Callable[[str], Labels] = field(repr=False)
    """Reads a reply. Raises `Malformed`."""

    @property
    def words_version(self) -> int:
        """Version of the words that the labels are in."""
        return rubric().version if self.question == "skill" else taxonomy().version

    @cached_property
    def data(self) -> Mapping[str, str]:
        """Named parts, all of them written by others."""
        return self.parts()

    def request(self, **how: object) -> str:
        """Digest of all that is sent and of `how`: two equal ones would get the same answer."""
        parts = [self.instruction, self.subject, dict(self.schema), how]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()


def about_skill(skill: str) -> Asked:
    """What does this skill contain?"""
    return Asked(
        question="skill",
        subject=digest_of(skill),
        instruction=_template("skill.md.j2").render(rubric=rubric()),
        parts=lambda: {"note": skill},
        schema=answers.schema_of(answers.SkillAnswer, {"category": rubric().ids}),
        check=lambda text: answers.skill_labels_of(text, skill),
    )


def about_uptake(record: AttemptRecord, source_skill: str, labels: SkillLabels, budget: int = BUDGET) -> Asked | None:
    """What did this attempt do with the skill that was attached to it? None where the skill has no labelled statement:
    then there is nothing that could be taken up."""
    categories = tuple(category for category in rubric().ids if category in labels.categories)
    if not categories:
        return None
    own, listed = record.skill, _listed(labels, categories)

    @cache
    def data() -> dict[str, str]:
        found = {"note": source_skill, "statements": listed, "attempt": condensed(record, budget)}
        return found if own is None else found | {"own note": own}

    return Asked(
        question="uptake",
        subject=_subject("uptake", source_skill, listed, own, budget, source_of(record)),
        instruction=_template("uptake.md.j2").render(taxonomy=taxonomy()),
        parts=data,
        schema=answers.schema_of(answers.UptakeAnswer, {"category": categories, "uptake": taxonomy().uptake_ids}),
        check=lambda text: answers.uptake_labels_of(
            text, categories=categories, note=source_skill, attempt=data()["attempt"], own=own
        ),
    )


def _listed(labels: SkillLabels, categories: tuple[str, ...]) -> str:
    lines = []
    for category in categories:
        lines.append(f"{category}:")
        lines += [f"- {' '.join(s.quote.split())}" for s in labels.statements if s.category == category]
    return "\n".join(lines)


def about_cause(
    record: AttemptRecord, source_skill: str, max_submissions: int, budget: int = BUDGET
) -> Asked | CauseLabel:
    """What went wrong in this treatment? The answer itself where the records decide."""
    established = facts(record, max_submissions)
    steps = open_steps(record, established)
    if not steps:
        return cause_by(established, {})
    failed = record.final is None or not record.final.passed
    definitions = {step.id: _definition(step.cause) for step in taxonomy().step}

    @cache
    def data() -> dict[str, str]:
        return {"note": source_skill, "attempt": condensed(record, budget)}

    return Asked(
        question="cause",
        subject=_subject("cause", source_skill, steps, budget, source_of(record)),
        instruction=_template("cause.md.j2").render(steps=steps, definitions=definitions, failed=failed),
        parts=data,
        schema=answers.schema_of(answers.CauseAnswer, {"step": steps}),
        check=lambda text: answers.cause_label_of(
            text, steps=steps, established=established, attempt=data()["attempt"], failed=failed
        ),
    )


def _definition(cause: str) -> str:
    return next(found.definition for found in taxonomy().cause if found.id == cause)


def _subject(*parts: object) -> str:
    return digest_of(json.dumps(parts))


def _template(name: str) -> Any:
    return _templates().get_template(name)


@cache
def _templates() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("metakernelbench.annotation", "prompts")
    return Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
