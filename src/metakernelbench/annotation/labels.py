"""What an annotator says, as records: statements with their category, uptake, propagation, cause.

Plain values without any machinery, so that the store and the designs can use them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

type Question = Literal["skill", "uptake", "cause"]
"""What can be asked: what a skill contains, what an attempt did with it, what went wrong."""


class _Label(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Statement(_Label):
    """A statement of a skill under a category of the rubric."""

    category: str
    quote: str
    """Word for word as it stands in the skill."""
    start: int = Field(ge=0)
    """Where it begins in the skill's text, in characters."""
    end: int
    supported: bool
    """Whether the skill states evidence for it."""


class SkillLabels(_Label):
    """What a skill contains, by one annotator or by the majority."""

    statements: tuple[Statement, ...] = ()

    @property
    def categories(self) -> frozenset[str]:
        """The categories that are present."""
        return frozenset(statement.category for statement in self.statements)


class CategoryUptake(_Label):
    """What an attempt did with a category's statements."""

    category: str
    uptake: str
    evidence: str | None = None
    """Quoted from the attempt; None exactly for what left no trace (ignored, not applicable)."""


class Handed(_Label):
    """A claim that the attempt's own skill repeats."""

    source: str
    """Quoted from the attached skill."""
    own: str
    """Quoted from the attempt's own skill."""


class UptakeLabels(_Label):
    """What an attempt did with the skill that was attached to it."""

    uptake: tuple[CategoryUptake, ...] = ()
    propagated: tuple[Handed, ...] = ()


class CauseLabel(_Label):
    """What went wrong on the target's side of a harmed comparison."""

    cause: str
    """A cause of the taxonomy, or `none`."""
    step: str | None = None
    """The step of precedence that decided; None exactly for `none`."""
    decided_by: Literal["records", "annotator"]
    evidence: str | None = None
    """What the records say, or a quote from the attempt."""


type Labels = SkillLabels | UptakeLabels | CauseLabel
