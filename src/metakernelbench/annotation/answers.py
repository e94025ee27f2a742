"""The form of an annotator's answers, and the checks that make an answer labels: known words, quotes that are there.

An answer that fails is `Malformed`, with reasons written for whoever gave it: a model is sent them and tries again.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from metakernelbench.annotation.causes import Fact, cause_by
from metakernelbench.annotation.labels import (
    CategoryUptake,
    CauseLabel,
    Handed,
    SkillLabels,
    Statement,
    UptakeLabels,
)
from metakernelbench.annotation.rubric import rubric, taxonomy
from metakernelbench.annotation.statements import find_quote, parts
from metakernelbench.text import harmless

_MIN_WORDS = 3
"""A quote of fewer words could stand anywhere."""
_MOST_REASONS = 12
_TRACELESS = ("ignored", "not_applicable")


class Malformed(ValueError):
    """An answer that cannot be used; the message says what is wrong with it."""


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LabelAnswer(_Answer):
    category: str
    quote: str
    supported: bool


class SkillAnswer(_Answer):
    """What a skill contains."""

    labels: tuple[LabelAnswer, ...]


class UptakeOfCategory(_Answer):
    category: str
    uptake: str
    evidence: str | None


class HandedAnswer(_Answer):
    source: str
    own: str


class UptakeAnswer(_Answer):
    """What became of a skill in an attempt."""

    uptake: tuple[UptakeOfCategory, ...]
    propagated: tuple[HandedAnswer, ...]


class StepAnswer(_Answer):
    step: str
    evidence: str


class CauseAnswer(_Answer):
    """What went wrong."""

    causes: tuple[StepAnswer, ...]


def schema_of(answer: type[_Answer], allowed: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The JSON schema of an answer, with the words that are `allowed` for a field of that name."""
    schema = answer.model_json_schema()
    for part in (schema, *schema.get("$defs", {}).values()):
        for name, words in allowed.items():
            if name in part.get("properties", {}) and words:
                part["properties"][name] = {"type": "string", "enum": list(words)}
    return schema


def parsed[A: _Answer](text: str, answer: type[A]) -> A:
    """The JSON object in a reply, which may stand in a fence. Raises `Malformed`."""
    fence = re.fullmatch(r"\s*```(?:json)?\s*\n(.*?)\n?```\s*", text, re.DOTALL)
    body = fence[1] if fence else text.strip()
    try:
        data = json.loads(body)
    except ValueError as error:
        raise Malformed(f"The answer is not one JSON object: {error}.") from error
    try:
        return answer.model_validate(data)
    except ValidationError as error:
        mistakes = error.errors(include_url=False)[:_MOST_REASONS]
        lines = [f"{'.'.join(map(str, mistake['loc'])) or 'answer'}: {mistake['msg']}" for mistake in mistakes]
        raise Malformed("The answer has another form than asked for: " + "; ".join(lines) + ".") from error


def skill_labels_of(text: str, skill: str) -> SkillLabels:
    """The labels in a reply about `skill`. Raises `Malformed`."""
    shown, reasons, statements = harmless(skill), _Reasons(), []
    for number, label in enumerate(parsed(text, SkillAnswer).labels, start=1):
        reasons.unknown(f"label {number}", "category", label.category, rubric().ids)
        span = reasons.found(f"label {number}", label.quote, shown, "note")
        if span is not None:
            quote = skill[slice(*span)]  # as it stands in the skill, hidden characters included
            statements.append(
                Statement(category=label.category, quote=quote, start=span[0], end=span[1], supported=label.supported)
            )
    reasons.raise_if_any()
    unique = {(s.category, s.start, s.end): s for s in statements}
    return SkillLabels(statements=tuple(sorted(unique.values(), key=lambda s: (s.start, s.end, s.category))))


def uptake_labels_of(text: str, *, categories: Sequence[str], note: str, attempt: str, own: str | None) -> UptakeLabels:
    """The labels in a reply about an attempt. Raises `Malformed`."""
    answer, reasons = parsed(text, UptakeAnswer), _Reasons()
    given = Counter(label.category for label in answer.uptake)
    for category in categories:
        if given[category] != 1:
            reasons.add(f"`uptake` needs exactly one entry for `{category}` and has {given[category]}")
    for label in answer.uptake:
        where = f"the uptake of `{label.category}`"
        reasons.unknown(where, "category", label.category, categories)
        reasons.unknown(where, "uptake", label.uptake, taxonomy().uptake_ids)
        if label.uptake in _TRACELESS and label.evidence:
            reasons.add(f"{where} is `{label.uptake}`, so its evidence must be null")
        elif label.uptake not in _TRACELESS:
            reasons.found(where, label.evidence or "", harmless(attempt), "attempt")
    for number, handed in enumerate(answer.propagated, start=1):
        if own is None:
            reasons.add("there is no own note, so `propagated` must be empty")
            break
        reasons.found(f"propagated {number}, source", handed.source, harmless(note), "note")
        reasons.found(f"propagated {number}, own", handed.own, harmless(own), "own note")
    reasons.raise_if_any()
    return UptakeLabels(
        uptake=tuple(CategoryUptake(**label.model_dump()) for label in answer.uptake),
        propagated=tuple(Handed(**handed.model_dump()) for handed in answer.propagated),
    )


def cause_label_of(
    text: str, *, steps: Sequence[str], established: tuple[Fact, ...], attempt: str, failed: bool
) -> CauseLabel:
    """The cause that a reply and the records lead to. Raises `Malformed`."""
    answer, reasons = parsed(text, CauseAnswer), _Reasons()
    claims: dict[str, str] = {}
    for claim in answer.causes:
        reasons.unknown("a cause", "step", claim.step, steps)
        reasons.found(f"the cause `{claim.step}`", claim.evidence, harmless(attempt), "attempt")
        claims.setdefault(claim.step, claim.evidence)
    if failed and not claims and not established:
        reasons.add("the final kernel did not pass, so `causes` needs at least one entry")
    reasons.raise_if_any()
    return cause_by(established, claims)


class _Reasons:
    """What is wrong with an answer, collected so that one retry can put all of it right."""

    def __init__(self) -> None:
        self._reasons: list[str] = []

    def add(self, reason: str) -> None:
        self._reasons.append(reason)

    def unknown(self, where: str, field: str, word: str, known: Iterable[str]) -> None:
        if word not in (words := tuple(known)):
            self.add(f"{where}: the {field} `{word[:60]}` is none of {', '.join(words)}")

    def found(self, where: str, quote: str, text: str, part: str) -> tuple[int, int] | None:
        """Where the quote stands; a reason where it does not, or is too short to say anything."""
        shown = " ".join(quote.split())
        shown = shown if len(shown) <= 120 else f"{shown[:117]}..."
        span = find_quote(text, harmless(quote))
        if span is None:
            self.add(f'{where}: the quote "{shown}" does not stand in the part `{part}`')
        elif len(quote.split()) < _MIN_WORDS and not _is_whole(text, span):
            self.add(f'{where}: the quote "{shown}" has fewer than {_MIN_WORDS} words')
            return None
        return span

    def raise_if_any(self) -> None:
        if self._reasons:
            more = len(self._reasons) - _MOST_REASONS
            tail = f"; and {more} more" if more > 0 else ""
            raise Malformed("; ".join(self._reasons[:_MOST_REASONS]) + tail + ".")


def _is_whole(text: str, span: tuple[int, int]) -> bool:
    """Whether the span is all of a statement or of a line: `Use erf.` says enough, `Use` does not."""
    start, end = span
    line = text[text.rfind("\n", 0, start) + 1 : (text.find("\n", end) + 1 or len(text) + 1) - 1]
    return line.strip() == text[start:end] or any((part.start, part.end) == span for part in parts(text))
