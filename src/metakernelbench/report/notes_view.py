"""What annotators said of a comparison: what the skill held, what became of it, and why a harm came about."""

from __future__ import annotations

from dataclasses import dataclass

from metakernelbench.annotation.labels import SkillLabels, UptakeLabels
from metakernelbench.annotation.results import Results
from metakernelbench.annotation.rubric import NO_CAUSE, rubric, taxonomy
from metakernelbench.text import harmless


@dataclass(frozen=True, kw_only=True)
class Held:
    """A category that the source's skill holds."""

    category: str
    quotes: tuple[tuple[str, bool], ...]
    """(statement, whether the skill states evidence for it)."""
    uptake: str | None
    """What the treatment did with it; None where nobody has annotated that."""
    evidence: str | None


@dataclass(frozen=True, kw_only=True)
class Notes:
    """The annotations of one comparison."""

    held: tuple[Held, ...] | None
    """None where nobody has annotated the skill."""
    handed_on: tuple[tuple[str, str], ...] | None
    """(claim of the source, the treatment's own skill); None where nobody has annotated the attempt."""
    cause: str | None
    cause_from: str | None
    cause_evidence: str | None


def notes(source: str, treatment: str, results: Results | None) -> Notes | None:
    """The annotations of a comparison, by the keys of its attempts; None where there are none."""
    if results is None:
        return None
    labels, uptake = results.skill_labels(source), results.uptakes.get(treatment)
    cause = results.causes.get(treatment)
    if labels is None and uptake is None and cause is None:
        return None
    why = None if cause is None else cause.labels
    return Notes(
        held=None if labels is None else _held(labels, None if uptake is None else uptake.labels),
        handed_on=None if uptake is None else _pairs(uptake.labels),
        cause=None if why is None else (taxonomy().cause_titles | _NONE).get(why.cause, why.cause),
        cause_from=None if why is None else _DECIDED[why.decided_by],
        cause_evidence=None if why is None else _harmless(why.evidence),
    )


_NONE = {NO_CAUSE: "none found on the target's side"}
_DECIDED = {"records": "from the records", "annotator": "by annotators"}


def _held(labels: SkillLabels, uptake: UptakeLabels | None) -> tuple[Held, ...]:
    """The categories that a skill holds, in the rubric's order, each with what became of it."""
    done = {} if uptake is None else {label.category: label for label in uptake.uptake}
    words = {word.id: word.title for word in taxonomy().uptake}
    return tuple(
        Held(
            category=rubric().titles[category],
            quotes=tuple((harmless(s.quote), s.supported) for s in labels.statements if s.category == category),
            uptake=words.get(done[category].uptake, done[category].uptake) if category in done else None,
            evidence=_harmless(done[category].evidence) if category in done else None,
        )
        for category in rubric().ids
        if category in labels.categories
    )


def _pairs(uptake: UptakeLabels) -> tuple[tuple[str, str], ...]:
    return tuple((harmless(handed.source), harmless(handed.own)) for handed in uptake.propagated)


def _harmless(text: str | None) -> str | None:
    return None if text is None else harmless(text)
