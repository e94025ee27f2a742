"""The words of the instrument, read from `rubric.toml` and `taxonomy.toml` and held to being complete.

Everything that names a category, an uptake, a cause or a step names it by the ids that stand there.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

CATEGORIES = 11
"""The study's number of categories; another number would be another instrument."""
NO_CAUSE = "none"
"""The answer where nothing failed on the target's side."""


class _Words(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Category(_Words):
    """One kind of content of a skill."""

    id: str = Field(pattern=r"^[a-z_]+$")
    title: str = Field(min_length=1)
    definition: str = Field(min_length=1)
    criterion: str = Field(min_length=1)
    positive: str = Field(min_length=1)
    """An example that counts."""
    negative: str = Field(min_length=1)
    """An example that does not, with the reason in brackets."""


class Rubric(_Words):
    """The categories of skill content."""

    version: int = Field(ge=1)
    category: tuple[Category, ...] = Field(min_length=CATEGORIES, max_length=CATEGORIES)

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(category.id for category in self.category)

    @property
    def titles(self) -> dict[str, str]:
        return {category.id: category.title for category in self.category}

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        _refuse_doubles("category", self.ids)
        return self


class Uptake(_Words):
    """What became of a category's statements in an attempt."""

    id: str = Field(pattern=r"^[a-z_]+$")
    title: str = Field(min_length=1)
    definition: str = Field(min_length=1)
    used: bool
    """Whether it counts towards the share that was taken up."""


class Propagation(_Words):
    """When a claim counts as handed on."""

    definition: str = Field(min_length=1)
    criterion: str = Field(min_length=1)


class Cause(_Words):
    """One class of what goes wrong on the target's side."""

    id: str = Field(pattern=r"^[a-z_]+$")
    title: str = Field(min_length=1)
    definition: str = Field(min_length=1)


class Step(_Words):
    """A place in the order of precedence, and the cause it stands for."""

    id: str = Field(pattern=r"^[a-z_]+$")
    cause: str


class Taxonomy(_Words):
    """Uptake, propagation and causes."""

    version: int = Field(ge=1)
    uptake: tuple[Uptake, ...] = Field(min_length=5, max_length=5)
    propagation: Propagation
    cause: tuple[Cause, ...] = Field(min_length=6, max_length=6)
    step: tuple[Step, ...]
    """First comes first."""

    @property
    def uptake_ids(self) -> tuple[str, ...]:
        return tuple(uptake.id for uptake in self.uptake)

    @property
    def used(self) -> frozenset[str]:
        """The uptakes that count as taken up."""
        return frozenset(uptake.id for uptake in self.uptake if uptake.used)

    @property
    def cause_ids(self) -> tuple[str, ...]:
        return tuple(cause.id for cause in self.cause)

    @property
    def steps(self) -> tuple[str, ...]:
        return tuple(step.id for step in self.step)

    @property
    def cause_titles(self) -> dict[str, str]:
        return {cause.id: cause.title for cause in self.cause}

    def cause_of(self, step: str) -> str:
        """The cause that a step stands for."""
        return {step.id: step.cause for step in self.step}[step]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for what, ids in (("uptake", self.uptake_ids), ("cause", self.cause_ids), ("step", self.steps)):
            _refuse_doubles(what, ids)
        stray = {step.cause for step in self.step} ^ set(self.cause_ids)
        if stray:
            raise ValueError(f"steps and causes do not cover each other: {', '.join(sorted(stray))}")
        return self


def _refuse_doubles(what: str, ids: tuple[str, ...]) -> None:
    doubles = sorted({id for id in ids if ids.count(id) > 1})
    if doubles:
        raise ValueError(f"{what} named twice: {', '.join(doubles)}")


@cache
def rubric() -> Rubric:
    """The rubric that this version ships."""
    return Rubric.model_validate(_shipped("rubric.toml"))


@cache
def taxonomy() -> Taxonomy:
    """The taxonomy that this version ships."""
    return Taxonomy.model_validate(_shipped("taxonomy.toml"))


def _shipped(name: str) -> dict[str, object]:
    return tomllib.loads((files("metakernelbench.annotation") / name).read_text(encoding="utf-8"))
