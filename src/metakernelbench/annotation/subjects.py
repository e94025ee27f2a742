"""What of an experiment is annotated: every skill that was kept, every attempt that was given one, every harm."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from metakernelbench.annotation.labels import CauseLabel, SkillLabels
from metakernelbench.annotation.questions import Asked, about_cause, about_skill, about_uptake
from metakernelbench.annotation.removal import without_category
from metakernelbench.annotation.statements import find_quote
from metakernelbench.attempts.record import AttemptRecord
from metakernelbench.experiments.planned import Plan, PlannedAttempt
from metakernelbench.store.artifacts import digest_of


@dataclass(frozen=True, kw_only=True)
class Subjects:
    """An experiment's plan and records, with the treatments that came out harmed."""

    plan: Plan
    records: Mapping[str, AttemptRecord]
    harmed: Collection[str]
    """Keys of treatments that fell short of an attempt that was given nothing."""
    max_submissions: int

    @cached_property
    def skill_of(self) -> dict[str, str]:
        """Key of an attempt → digest of the skill that it kept."""
        kept = ((key, record.skill) for key, record in self.records.items())
        return {key: digest_of(skill) for key, skill in kept if skill is not None}

    @cached_property
    def skills(self) -> dict[str, str]:
        """Digest → text, each text once, in the order of digests: nothing of the experiment shows in it."""
        texts = {self.skill_of[key]: self.records[key].skill or "" for key in self.skill_of}
        return dict(sorted(texts.items()))

    def about_skills(self) -> list[Asked]:
        """What does each skill contain? Of both arms alike."""
        return [about_skill(text) for text in self.skills.values()]

    def about_uptake(self, labels: Mapping[str, SkillLabels]) -> dict[str, Asked]:
        """Key of a treatment → what it did with its skill, where that skill has labelled statements."""
        found = {}
        for attempt, record, note, of_note in self._treatments(labels):
            asked = about_uptake(record, note, of_note)
            if asked is not None:
                found[attempt.key] = asked
        return found

    def about_causes(self, labels: Mapping[str, SkillLabels]) -> dict[str, Asked | CauseLabel]:
        """Key of a harmed treatment → what went wrong in it, or the answer where the records decide."""
        return {
            attempt.key: about_cause(record, note, self.max_submissions)
            for attempt, record, note, _ in self._treatments(labels)
            if attempt.key in self.harmed
        }

    def _treatments(
        self, labels: Mapping[str, SkillLabels]
    ) -> Iterator[tuple[PlannedAttempt, AttemptRecord, str, SkillLabels]]:
        """The attempts that were given a skill, with its text as attached and its labels, where it has any."""
        for attempt in self.plan.attempts:
            record, source = self.records.get(attempt.key), attempt.source
            if record is None or record.ended == "skipped" or source is None or attempt.material != "skill":
                continue
            if source not in self.skill_of or self.skill_of[source] not in labels:
                continue
            of_note = labels[self.skill_of[source]]
            note = self.skills[self.skill_of[source]]
            if attempt.without is not None:
                note = without_category(note, of_note.statements, attempt.without)
                left = tuple(s for s in of_note.statements if find_quote(note, s.quote) is not None)
                of_note = SkillLabels(statements=left)
            yield attempt, record, note, of_note

    def unlabelled(self, labels: Collection[str]) -> int:
        """How many attempts were given a skill that has no labels yet: what is asked of them is not known."""
        given = [a for a in self.plan.attempts if a.source is not None and a.material == "skill"]
        ran = [a for a in given if a.key in self.records and self.records[a.key].ended != "skipped"]
        return sum(self.skill_of.get(a.source or "") not in labels for a in ran)
