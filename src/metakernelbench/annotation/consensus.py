"""What several annotators and passes agree on. The single answers stay in the store: this is computed from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from metakernelbench.annotation.labels import CategoryUptake, CauseLabel, SkillLabels, Statement, UptakeLabels
from metakernelbench.annotation.statements import parts, touched


@dataclass(frozen=True, kw_only=True)
class Consensus[L: (SkillLabels, UptakeLabels, CauseLabel | None)]:
    """The labels of more than half of the votes."""

    labels: L
    votes: int
    disputed: tuple[str, ...] = ()
    """On what the votes were not unanimous: categories, `propagation`, `cause`."""


def skill_consensus(skill: str, votes: Sequence[SkillLabels]) -> Consensus[SkillLabels]:
    """The categories that more than half of the votes find, each with its statements.

    A statement is a whole sentence of the skill: votes that quote different words of it agree. It is kept where more
    than half of the votes name it; where the votes agree on a category and on none of its sentences, those named most
    often stand for it.
    """
    found = parts(skill)
    present = Counter(category for vote in votes for category in vote.categories)
    statements: list[Statement] = []
    for category in sorted(present):
        if 2 * present[category] <= len(votes):
            continue
        named = [_named(vote, category, skill) for vote in votes]
        counts = Counter(index for one in named for index in one)
        enough = min(max(counts.values()), len(votes) // 2 + 1)
        for index in sorted(index for index, count in counts.items() if count >= enough):
            supported = sum(one[index] for one in named if index in one)
            part = found[index]
            statements.append(
                Statement(
                    category=category,
                    quote=part.of(skill),
                    start=part.start,
                    end=part.end,
                    supported=2 * supported > counts[index],
                )
            )
    disputed = tuple(sorted(category for category, count in present.items() if count < len(votes)))
    return Consensus(labels=SkillLabels(statements=tuple(statements)), votes=len(votes), disputed=disputed)


def _named(vote: SkillLabels, category: str, skill: str) -> dict[int, bool]:
    """The sentences that a vote names for a category, and whether it calls each supported."""
    found = parts(skill)
    named: dict[int, bool] = {}
    for statement in vote.statements:
        if statement.category == category:
            for index in touched(found, statement.start, statement.end):
                named[index] = named.get(index, False) or statement.supported
    return named


def uptake_consensus(votes: Sequence[UptakeLabels]) -> Consensus[UptakeLabels]:
    """Per category, the uptake that more than half of the votes on it give; a category without one is left out."""
    by_category: dict[str, list[CategoryUptake]] = {}
    for vote in votes:
        for label in vote.uptake:
            by_category.setdefault(label.category, []).append(label)
    agreed, disputed = [], []
    for category, labels in sorted(by_category.items()):
        first, count = Counter(label.uptake for label in labels).most_common(1)[0]
        if 2 * count > len(labels):
            agreed.append(next(label for label in labels if label.uptake == first))
        if count < len(labels):
            disputed.append(category)
    handing = [vote for vote in votes if vote.propagated]
    propagated = handing[0].propagated if 2 * len(handing) > len(votes) else ()
    if 0 < len(handing) < len(votes):
        disputed.append("propagation")
    majority = UptakeLabels(uptake=tuple(agreed), propagated=propagated)
    return Consensus(labels=majority, votes=len(votes), disputed=tuple(disputed))


def cause_consensus(votes: Sequence[CauseLabel]) -> Consensus[CauseLabel | None]:
    """The cause that more than half of the votes give; None where none has that."""
    first, count = Counter(vote.cause for vote in votes).most_common(1)[0]
    label = next(vote for vote in votes if vote.cause == first) if 2 * count > len(votes) else None
    return Consensus(labels=label, votes=len(votes), disputed=() if count == len(votes) else ("cause",))
