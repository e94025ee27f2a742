"""The spreadsheet that a person annotates with: what stands where in it.

    how to          what to do, and the words with their definitions
    skills          a row a statement, a column a category: `s` where it holds and evidence is stated, `u` where it
                    holds without; a skill whose column `done` has an x is labelled, whatever its other cells
    uptake          a row an attempt and category: the uptake (from a list), and words from the attempt as evidence
    handed on       a row an attempt: x where a claim was handed on, with the two sentences; `no` where none was
    causes          a row a harmed attempt: the cause (from a list), and words from the attempt as evidence
    attempts        the course of each attempt, and the note that it was given, to read

Rows are blind like a model's questions: they carry digests, no key, arm or outcome. What is left empty is not an answer
and stays to be asked. Uptake and causes are asked once skills are labelled, by whomever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from metakernelbench.annotation.labels import CauseLabel, Labels, SkillLabels, UptakeLabels
from metakernelbench.annotation.questions import Asked
from metakernelbench.annotation.results import skill_consensuses
from metakernelbench.annotation.rubric import rubric, taxonomy
from metakernelbench.annotation.subjects import Subjects
from metakernelbench.errors import UserError
from metakernelbench.store.annotations import Annotations, Answer

HUMAN = "human:"
"""What a person's name is kept under."""
SUPPORTED, UNSUPPORTED, YES, NO = "s", "u", "x", "no"
TRACELESS = ("ignored", "not_applicable")
"""Uptakes that need no evidence."""
SKILL_COLUMNS = ("skill", "done", "statement", "text", *rubric().ids)
UPTAKE_COLUMNS = ("attempt", "category", "statements", "uptake", "evidence")
HANDED_COLUMNS = ("attempt", "handed on", "sentence of the note", "sentence of the own note")
CAUSE_COLUMNS = ("attempt", "cause", "evidence")
SHEETS = ("how to", "skills", "uptake", "handed on", "causes")
"""Those that are read back."""


def words() -> str:
    """Under which words a sheet was written: labels made under others would be misread."""
    return f"rubric {rubric().version}, taxonomy {taxonomy().version}"


def check_name(path: Path) -> None:
    """Raise `UserError` for a file that is no Excel workbook by its name."""
    if path.suffix != ".xlsx":
        raise UserError(f"{path} does not end in .xlsx, the only kind of spreadsheet that is written and read")


@dataclass(frozen=True, kw_only=True)
class Form:
    """Everything that a person is asked, by subject."""

    skills: dict[str, str]
    uptake: dict[str, Asked]
    causes: dict[str, Asked]

    @staticmethod
    def of(subjects: Subjects, kept: Annotations) -> Form:
        found, _ = skill_consensuses(subjects, kept)
        labels = {digest: consensus.labels for digest, consensus in found.items()}
        uptake = subjects.about_uptake(labels).values()
        causes = [asked for asked in subjects.about_causes(labels).values() if isinstance(asked, Asked)]
        return Form(
            skills=subjects.skills,
            uptake={asked.subject: asked for asked in uptake},
            causes={asked.subject: asked for asked in causes},
        )

    def labels_by(self, kept: Annotations, annotator: str) -> dict[str, Labels]:
        """Subject → what this person has said of it. Subjects of different questions are different digests."""
        asked: tuple[tuple[Callable[[str], Labels], dict[str, list[Answer]]], ...] = (
            (SkillLabels.model_validate_json, kept.of("skill", self.skills, rubric().version)),
            (UptakeLabels.model_validate_json, kept.of("uptake", self.uptake, taxonomy().version)),
            (CauseLabel.model_validate_json, kept.of("cause", self.causes, taxonomy().version)),
        )
        return {
            answer.subject: answer.read(reading)
            for reading, by_subject in asked
            for answers in by_subject.values()
            for answer in answers
            if answer.annotator == HUMAN + annotator
        }
