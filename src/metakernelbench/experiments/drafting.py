"""What designs are written with: a draft that plans each attempt once, and the choices that several of them make."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

from metakernelbench.errors import UserError
from metakernelbench.experiments.planned import Material, Plan, PlannedAttempt, PlannedComparison
from metakernelbench.problems.catalog import family_of


class Cell(NamedTuple):
    """What is attempted, by whom, for the how-manieth time."""

    problem: str
    model: str
    replicate: int


def cells(problems: Sequence[str], models: Sequence[str], replicates: int) -> Iterator[Cell]:
    """Every cell, in the order in which attempts should run: model by model, problem by problem."""
    return (Cell(problem, model, number) for model in models for problem in problems for number in range(replicates))


class Draft:
    """The attempts and comparisons of one design so far. Asking for the same attempt again gives the same one."""

    def __init__(self, design: str) -> None:
        self._design = design
        self._attempts: dict[str, PlannedAttempt] = {}
        self._solo: dict[tuple[Cell, str, str], PlannedAttempt] = {}
        self._comparisons: list[PlannedComparison] = []

    def pairs(self, dsls: Sequence[str]) -> list[tuple[str, str]]:
        """Every (source, target) of two different DSLs. Raises `UserError` where there is only one DSL."""
        if len(dsls) < 2:
            raise UserError(f"the design `{self._design}` needs two DSLs", hint="list more `dsls`")
        return list(permutations(dsls, 2))

    def solo(self, cell: Cell, dsl: str) -> PlannedAttempt:
        """The attempt that is given nothing."""
        return self._alone(cell, dsl, "solo")

    def again(self, cell: Cell, dsl: str) -> PlannedAttempt:
        """A second attempt that is given nothing."""
        return self._alone(cell, dsl, "again")

    def structured(self, cell: Cell, dsl: str) -> PlannedAttempt:
        """An attempt that is given nothing and asked to write its skill in a fixed form."""
        return self._alone(cell, dsl, "structured")

    def _alone(self, cell: Cell, dsl: str, label: str) -> PlannedAttempt:
        known = self._solo.get((cell, dsl, label))
        if known is None:
            known = self._add(
                PlannedAttempt(
                    problem=cell.problem,
                    dsl=dsl,
                    model=cell.model,
                    replicate=cell.replicate,
                    skill_form="structured" if label == "structured" else "free",
                    label=label,
                )
            )
            self._solo[cell, dsl, label] = known
        return known

    def given(
        self,
        source: PlannedAttempt,
        cell: Cell,
        dsl: str,
        material: Material = "skill",
        *,
        without: str | None = None,
        label: str = "",
    ) -> PlannedAttempt:
        """An attempt to which something of `source` is attached."""
        return self._add(
            PlannedAttempt(
                problem=cell.problem,
                dsl=dsl,
                model=cell.model,
                replicate=cell.replicate,
                arm="conditioned",
                source=source.key,
                material=material,
                without=without,
                label=label,
            )
        )

    def compare(
        self, arm: str, source: PlannedAttempt | None, baseline: PlannedAttempt, treatment: PlannedAttempt
    ) -> None:
        """Ask for a comparison."""
        self._comparisons.append(
            PlannedComparison(
                problem=treatment.problem,
                model=treatment.model,
                replicate=treatment.replicate,
                source_dsl=treatment.dsl if source is None else source.dsl,
                target_dsl=treatment.dsl,
                source=None if source is None else source.key,
                baseline=baseline.key,
                treatment=treatment.key,
                design=self._design,
                arm=arm,
            )
        )

    def _add(self, attempt: PlannedAttempt) -> PlannedAttempt:
        return self._attempts.setdefault(attempt.key, attempt)

    def plan(self) -> Plan:
        """All that was asked for."""
        return Plan(attempts=tuple(self._attempts.values()), comparisons=tuple(self._comparisons))


def other_of_another_family(problem: str, problems: Sequence[str]) -> str | None:
    """A problem of another family, chosen by the digest of both names; None where there is none.

    Each possible donor has a rank that depends on the two names only, so a donor stays the choice until one with a
    better rank is listed.
    """
    family = family_of(problem)
    donors = [other for other in problems if family_of(other) != family]
    return min(donors, key=lambda other: hashlib.sha256(f"{problem} {other}".encode()).digest(), default=None)


def others_of_the_family(problems: Sequence[str]) -> dict[str, str]:
    """Problem → the next one of its family, round and round; problems that are alone in theirs are left out."""
    families: dict[str, list[str]] = {}
    for problem in problems:
        families.setdefault(family_of(problem), []).append(problem)
    return {
        problem: members[(place + 1) % len(members)]
        for members in families.values()
        for place, problem in enumerate(members)
        if len(members) > 1
    }
