"""The gold set: skills and short attempts that we wrote and labelled, to measure an annotator with.

    gold/skills_<family>.toml     [[skill]] text, and [[skill.label]] category, quote, supported, why;
                                  [[skill.absent]] category, why: for what could be taken for it
    gold/attempts_<kind>.toml     [[attempt]] a course of work with a gold skill attached, and its labels

They are written to look like what agents leave: good and bad ones, in prose and not, for problems of the catalogue in
both of the benchmark's languages. What an annotator is shown of them is what it is shown of a real one: attempts become
records like any other, and are condensed like any other.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from metakernelbench.annotation.labels import CauseLabel, SkillLabels, Statement
from metakernelbench.annotation.questions import Asked, about_cause, about_skill, about_uptake
from metakernelbench.annotation.rubric import NO_CAUSE, rubric, taxonomy
from metakernelbench.annotation.statements import find_quote
from metakernelbench.attempts.record import AttemptRecord, Ending, Submission
from metakernelbench.grading.codes import finding
from metakernelbench.grading.contract import CONTRACT, CONTRACT_VERSION
from metakernelbench.grading.report import render
from metakernelbench.grading.verdict import Comparison, Isolation, Stage, Timing, Verdict

_EAGER_MS = 2.0
SUBMISSIONS = 10
"""Counted submissions of a gold attempt, as in the benchmark."""
_STAGES = {
    "wrong-output": Stage.CORRECTNESS, "runtime-error": Stage.CORRECTNESS, "worker-died": Stage.CORRECTNESS,
    "time-limit": Stage.CORRECTNESS, "wrong-structure": Stage.CORRECTNESS, "import-error": Stage.IMPORT,
    "no-launch": Stage.DEPENDENCE, "not-dependent": Stage.DEPENDENCE, "laundering": Stage.DEPENDENCE,
    "syntax-error": Stage.SOURCE, "no-solve": Stage.SOURCE, "late-write": Stage.TIMING,
}  # fmt: skip
"""Where a verdict with this code ends; the codes of rules end at the rules."""


class _Gold(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class GoldLabel(_Gold):
    """A statement that is there, and why it counts."""

    category: str
    quote: str
    supported: bool
    why: str = Field(min_length=1)


class GoldAbsence(_Gold):
    """A category that one could think is there, and why it is not."""

    category: str
    why: str = Field(min_length=1)


class GoldSkill(_Gold):
    """A skill with its labels. What is not labelled is absent."""

    id: str
    problem: str
    dsl: Literal["cute", "tirx"]
    text: str
    label: tuple[GoldLabel, ...] = ()
    absent: tuple[GoldAbsence, ...] = ()

    @property
    def labels(self) -> SkillLabels:
        """The labels as an annotator would give them."""
        found = []
        for label in self.label:
            span = find_quote(self.text, label.quote)
            assert span is not None, "checked when it was read"
            quote = self.text[slice(*span)]
            found.append(
                Statement(category=label.category, quote=quote, start=span[0], end=span[1], supported=label.supported)
            )
        return SkillLabels(statements=tuple(found))

    @property
    def asked(self) -> Asked:
        return about_skill(self.text)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for label in self.label:
            if find_quote(self.text, label.quote) is None:
                raise ValueError(f"{self.id}: the quote `{label.quote}` does not stand in the text")
        present, absent = {label.category for label in self.label}, {absence.category for absence in self.absent}
        if unknown := (present | absent) - set(rubric().ids):
            raise ValueError(f"{self.id}: `{unknown.pop()}` is no category")
        if both := present & absent:
            raise ValueError(f"{self.id}: {', '.join(sorted(both))} is labelled present and absent")
        return self


class GoldVerdict(_Gold):
    """What a grading said: passed at a speedup, or failed with a code."""

    speedup: float | None = None
    code: str | None = None
    detail: str = ""
    error: float | None = None
    """Of the worst output, in multiples of the allowance; None where nothing was compared."""

    def verdict(self, problem: str, dsl: str, *, final: bool) -> Verdict:
        common: dict[str, Any] = {
            "problem": problem, "dsl": dsl, "workload": "full", "device": "NVIDIA H200", "final": final,
            "isolation": Isolation(method="process"), "contract_version": CONTRACT_VERSION,
        }  # fmt: skip
        if self.code is None:
            assert self.speedup is not None
            ms = _EAGER_MS / self.speedup
            timing = Timing(
                implementation_ms=(ms,),
                eager_ms=(_EAGER_MS,),
                implementation_median_ms=ms,
                eager_median_ms=_EAGER_MS,
                speedup=self.speedup,
            )
            return Verdict(passed=True, draws_passed=CONTRACT.correctness_draws, timing=timing, **common)
        comparisons: tuple[Comparison, ...] = ()
        if self.error is not None:
            allowance = 0.01
            comparisons = (
                Comparison(
                    output="output",
                    error=self.error * allowance,
                    allowance=allowance,
                    mismatches=3 if self.error < 10 else 41_237,
                    elements=65_536,
                    passed=False,
                ),
            )
        stage = _STAGES.get(self.code, Stage.RULES)
        found = (finding(self.code, self.detail),)
        return Verdict(passed=False, ended_at=stage, findings=found, comparisons=comparisons, **common)


class GoldSubmission(GoldVerdict):
    """One counted submission."""

    at: float
    """Seconds of the attempt's clock."""


class GoldStep(_Gold):
    """One step of the agent."""

    say: str = ""
    type: str = ""
    see: str = ""


class GoldUptake(_Gold):
    category: str
    uptake: str
    why: str = Field(min_length=1)


class GoldAttempt(_Gold):
    """An attempt with a gold skill attached, and its labels."""

    id: str
    source: str
    """The id of the gold skill that was attached."""
    dsl: Literal["cute", "tirx"]
    ended: Ending = "completed"
    step: tuple[GoldStep, ...]
    submission: tuple[GoldSubmission, ...] = ()
    final: GoldVerdict | None = None
    """None where there was no kernel at the end."""
    final_is: int | None = None
    """The number of the submission whose file was there at the end; None for another file."""
    own_skill: str | None = None
    uptake: tuple[GoldUptake, ...]
    propagated: bool
    propagated_why: str = Field(min_length=1)
    cause: str | None = None
    """None where the comparison was not harmed, so that no cause is asked."""
    cause_why: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for label in self.uptake:
            if label.uptake not in taxonomy().uptake_ids:
                raise ValueError(f"{self.id}: `{label.uptake}` is no uptake")
        if self.cause is not None and self.cause not in (*taxonomy().cause_ids, NO_CAUSE):
            raise ValueError(f"{self.id}: `{self.cause}` is no cause")
        if (self.cause is None) != (not self.cause_why):
            raise ValueError(f"{self.id}: a cause and its reason belong together")
        if self.propagated and self.own_skill is None:
            raise ValueError(f"{self.id}: without a skill of its own it hands nothing on")
        return self

    def record(self, problem: str) -> AttemptRecord:
        """The attempt as a record, like any other."""
        submissions = []
        for number, sent in enumerate(self.submission, start=1):
            verdict = sent.verdict(problem, self.dsl, final=False)
            submissions.append(
                Submission(
                    number=number,
                    requested_at_s=sent.at,
                    answered_at_s=sent.at + 30,
                    source=_source(number),
                    verdict=verdict,
                    answer=render(verdict),
                )
            )
        final = None if self.final is None else self.final.verdict(problem, self.dsl, final=True)
        return AttemptRecord(
            problem=problem,
            dsl=self.dsl,
            model="gold/written",
            replicate=0,
            arm="conditioned",
            source=f"{problem}/other/gold/written/0/solo",
            ended=self.ended,
            instruction="",
            submissions=tuple(submissions),
            kernel=None if final is None else _source(self.final_is or 0),
            skill=self.own_skill,
            final=final,
            trajectory={"steps": list(self._steps())},
            fingerprint="gold",
            started_at="2026-01-01T00:00:00+00:00",
            finished_at="2026-01-01T00:40:00+00:00",
        )

    def _steps(self) -> Iterator[dict[str, Any]]:
        for step in self.step:
            calls = [{"function_name": "bash_command", "arguments": {"keystrokes": step.type}}] if step.type else []
            yield {
                "source": "agent",
                "message": step.say,
                "tool_calls": calls,
                "observation": {"results": [{"content": step.see}]},
            }


def _source(number: int) -> str:
    """A stand-in for a kernel.py: what was written is in the steps."""
    return f"# kernel.py, version {number or 'of the end'}\n"


class GoldSet(_Gold):
    """All of it."""

    skill: tuple[GoldSkill, ...]
    attempt: tuple[GoldAttempt, ...]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        ids = [*(skill.id for skill in self.skill), *(attempt.id for attempt in self.attempt)]
        if doubles := sorted({id for id in ids if ids.count(id) > 1}):
            raise ValueError(f"named twice: {', '.join(doubles)}")
        for attempt in self.attempt:
            source = next((skill for skill in self.skill if skill.id == attempt.source), None)
            if source is None:
                raise ValueError(f"{attempt.id}: there is no gold skill `{attempt.source}`")
            if {label.category for label in attempt.uptake} != source.labels.categories:
                raise ValueError(f"{attempt.id}: uptake is labelled for other categories than {source.id} holds")
        return self

    def source_of(self, attempt: GoldAttempt) -> GoldSkill:
        """The skill that was attached to an attempt."""
        return next(skill for skill in self.skill if skill.id == attempt.source)

    def about_uptake(self, attempt: GoldAttempt) -> Asked:
        """The question about an attempt's uptake, with the gold labels of its skill: errors do not add up."""
        source = self.source_of(attempt)
        asked = about_uptake(attempt.record(source.problem), source.text, source.labels)
        assert asked is not None, "every source of a gold attempt has labels"
        return asked

    def about_cause(self, attempt: GoldAttempt) -> Asked | CauseLabel:
        """The question about a harmed attempt's cause, or the label where its records decide."""
        source = self.source_of(attempt)
        return about_cause(attempt.record(source.problem), source.text, SUBMISSIONS)


@cache
def gold_set() -> GoldSet:
    """The gold set that this version ships."""
    folder = files("metakernelbench.annotation") / "gold"
    found: dict[str, list[Any]] = {"skill": [], "attempt": []}
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if path.name.endswith(".toml"):
            data = tomllib.loads(path.read_text(encoding="utf-8"))
            for kind, items in data.items():
                found[kind] += items
    return GoldSet.model_validate(found)
