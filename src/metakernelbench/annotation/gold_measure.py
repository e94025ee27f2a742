"""An annotator held to the gold set: precision, recall, F1 and kappa of every label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from metakernelbench.annotation.agreement import cohen
from metakernelbench.annotation.consensus import cause_consensus, skill_consensus, uptake_consensus
from metakernelbench.annotation.gold_set import GoldSet
from metakernelbench.annotation.labels import CauseLabel, SkillLabels, UptakeLabels
from metakernelbench.annotation.questions import Asked
from metakernelbench.annotation.rubric import rubric, taxonomy
from metakernelbench.store.annotations import Annotations, Answer

MAJORITY = "majority of all"
"""The name under which several annotators are measured together."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How an annotator finds one label, one against the rest. None where a ratio has nothing below it."""

    annotator: str
    label: str
    """A category, an uptake, `propagated`, or a cause."""
    n: int
    """Gold items that the annotator has answered."""
    found: int
    """Items with the label by the annotator."""
    gold: int
    """Items with the label by the gold set."""
    both: int

    @property
    def precision(self) -> float | None:
        """Of what the annotator found, the share that is there. 3 of 4: 0.75."""
        return self.both / self.found if self.found else None

    @property
    def recall(self) -> float | None:
        """Of what is there, the share that the annotator found."""
        return self.both / self.gold if self.gold else None

    @property
    def f1(self) -> float | None:
        """Harmonic mean of the two: 2 · both / (found + gold)."""
        return 2 * self.both / (self.found + self.gold) if self.found + self.gold else None

    @property
    def kappa(self) -> float | None:
        """Cohen's kappa with the gold set; None where neither of them varies."""
        neither = self.n - self.found - self.gold + self.both
        counts = (self.both, self.found - self.both, self.gold - self.both, neither)
        ratings = np.repeat(np.array([[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0]]), counts, axis=1)
        return cohen(ratings)


type Pairs = list[tuple[frozenset[str], frozenset[str]]]
"""Per item, the labels that were found and those that are gold."""


def all_questions(gold: GoldSet) -> list[Asked]:
    """Everything that the gold set asks."""
    causes = [gold.about_cause(attempt) for attempt in gold.attempt if attempt.cause is not None]
    return [
        *(skill.asked for skill in gold.skill),
        *(gold.about_uptake(attempt) for attempt in gold.attempt),
        *(asked for asked in causes if isinstance(asked, Asked)),
    ]


def measure(gold: GoldSet, kept: Annotations, models: Sequence[str], passes: int) -> list[Scores]:
    """The scores of each model, by the majority of its passes, and of the majority of all where there are several."""
    whose = {model: [model] for model in models}
    if len(models) > 1:
        whose[MAJORITY] = list(models)
    return [score for name, voters in whose.items() for score in _of(name, _Votes(gold, kept, voters, passes))]


class _Votes:
    """What some annotators have answered, by gold item."""

    def __init__(self, gold: GoldSet, kept: Annotations, voters: Sequence[str], passes: int) -> None:
        self.gold = gold
        self._kept = kept
        self._voters = voters
        self._passes = passes

    def of(self, question: str, subjects: Mapping[str, str], version: int) -> dict[str, list[Answer]]:
        """Id → the answers to the question about its subject."""
        answers = self._kept.of(question, subjects.values(), version)
        ours = {
            subject: [a for a in given if a.annotator in self._voters and a.pass_number <= self._passes]
            for subject, given in answers.items()
        }
        return {id: ours[subject] for id, subject in subjects.items() if ours.get(subject)}


def _of(name: str, votes: _Votes) -> list[Scores]:
    uptakes, propagated = _attempts(votes)
    return [
        *_scores(name, _skills(votes), rubric().ids),
        *_scores(name, uptakes, taxonomy().uptake_ids),
        *_scores(name, propagated, ["propagated"]),
        *_scores(name, _causes(votes), taxonomy().cause_ids),
    ]


def _skills(votes: _Votes) -> Pairs:
    answers = votes.of("skill", {s.id: s.asked.subject for s in votes.gold.skill}, rubric().version)
    pairs = []
    for skill in votes.gold.skill:
        if given := answers.get(skill.id):
            found = skill_consensus(skill.text, [a.read(SkillLabels.model_validate_json) for a in given])
            pairs.append((found.labels.categories, skill.labels.categories))
    return pairs


def _attempts(votes: _Votes) -> tuple[Pairs, Pairs]:
    """Uptake by attempt and category, and propagation by attempt."""
    subjects = {a.id: votes.gold.about_uptake(a).subject for a in votes.gold.attempt}
    answers = votes.of("uptake", subjects, taxonomy().version)
    uptakes: Pairs = []
    propagated: Pairs = []
    for attempt in votes.gold.attempt:
        if not (given := answers.get(attempt.id)):
            continue
        labels = uptake_consensus([a.read(UptakeLabels.model_validate_json) for a in given]).labels
        found = {label.category: label.uptake for label in labels.uptake}
        for gold in attempt.uptake:
            one = frozenset({found[gold.category]}) if gold.category in found else frozenset[str]()
            uptakes.append((one, frozenset({gold.uptake})))
        handed = frozenset({"propagated"})
        nothing = frozenset[str]()
        propagated.append((handed if labels.propagated else nothing, handed if attempt.propagated else nothing))
    return uptakes, propagated


def _causes(votes: _Votes) -> Pairs:
    """Causes of the attempts whose records do not decide."""
    asked = {a.id: votes.gold.about_cause(a) for a in votes.gold.attempt if a.cause is not None}
    subjects = {id: question.subject for id, question in asked.items() if isinstance(question, Asked)}
    answers = votes.of("cause", subjects, taxonomy().version)
    pairs = []
    for attempt in votes.gold.attempt:
        if given := answers.get(attempt.id):
            label = cause_consensus([a.read(CauseLabel.model_validate_json) for a in given]).labels
            found = frozenset({label.cause}) if label is not None else frozenset[str]()
            pairs.append((found, frozenset({attempt.cause or ""})))
    return pairs


def _scores(name: str, pairs: Pairs, labels: Sequence[str]) -> list[Scores]:
    return [
        Scores(
            annotator=name,
            label=label,
            n=len(pairs),
            found=sum(label in found for found, _ in pairs),
            gold=sum(label in gold for _, gold in pairs),
            both=sum(label in found and label in gold for found, gold in pairs),
        )
        for label in labels
        if pairs
    ]
