"""What a design asks for: attempts, what each is given of an earlier one, and the comparisons between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Literal

from metakernelbench.errors import UserError

type Arm = Literal["solo", "conditioned"]
type Material = Literal["skill", "implementation", "trajectory"]
type SkillForm = Literal["free", "structured"]


@dataclass(frozen=True, kw_only=True, order=True)
class PlannedAttempt:
    """One attempt that a design asks for. Its `key` is its identity in the store."""

    problem: str
    dsl: str
    model: str
    replicate: int = 0
    arm: Arm = "solo"
    source: str | None = None
    """Key of the attempt of which something is attached; None exactly for a solo attempt."""
    material: Material = "skill"
    """What of the source is attached."""
    without: str | None = None
    """The category of statements that is taken out of the attached skill."""
    skill_form: SkillForm = "free"
    """How the attempt is asked to write down its own skill."""
    label: str = ""
    """Last part of the key. Left empty it becomes `solo`, or `from-<source's DSL>`."""

    def __post_init__(self) -> None:
        if not self.label:
            label = "solo" if self.source is None else f"from-{self.source.split('/')[1]}"
            object.__setattr__(self, "label", label)

    @cached_property
    def key(self) -> str:
        """Readable and unique within an experiment: `p28/tirx/model/0/solo`, `p28/cute/model/0/from-tirx`."""
        return f"{self.problem}/{self.dsl}/{self.model}/{self.replicate}/{self.label}"


@dataclass(frozen=True, kw_only=True, order=True)
class PlannedComparison:
    """Two attempts at one variant, and the attempt that the second was given something of: keys of attempts.

    `problem`, `model` and `replicate` are those of the two; `source` may be another problem's or another model's.
    """

    problem: str
    model: str
    replicate: int
    source_dsl: str
    """The target's own where there is no source."""
    target_dsl: str
    source: str | None
    """None where the treatment was given nothing, as in `retry`."""
    baseline: str
    treatment: str
    design: str = "cross-dsl"
    """The design that asks for this comparison."""
    arm: str = "skill"
    """Which of the design's treatments it is: comparisons with equal `design` and `arm` answer one question."""

    @property
    def direction(self) -> str:
        """`tirx→cute`; without a source, the DSL alone."""
        return self.target_dsl if self.source is None else f"{self.source_dsl}→{self.target_dsl}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a design asks for. Attempts stand after the attempts that they take material from."""

    attempts: tuple[PlannedAttempt, ...]
    comparisons: tuple[PlannedComparison, ...]


def merged(plans: Iterable[Plan]) -> Plan:
    """One plan of several designs: what they share is planned once. Raises `UserError` for a plan that cannot be run:
    one key for different attempts, a source or a compared attempt that nobody plans, sources that form a cycle."""
    attempts: dict[str, PlannedAttempt] = {}
    comparisons: dict[PlannedComparison, None] = {}
    for plan in plans:
        for attempt in plan.attempts:
            known = attempts.setdefault(attempt.key, attempt)
            if known is not attempt and known != attempt:
                raise UserError(f"two different attempts are planned under the key `{attempt.key}`", hint=_OF_DESIGNS)
        comparisons.update(dict.fromkeys(plan.comparisons))
    _check_compared(comparisons, attempts)
    return Plan(attempts=_sources_first(attempts), comparisons=tuple(comparisons))


def _check_compared(comparisons: Iterable[PlannedComparison], attempts: dict[str, PlannedAttempt]) -> None:
    for comparison in comparisons:
        for key in (comparison.source, comparison.baseline, comparison.treatment):
            if key is not None and key not in attempts:
                raise UserError(
                    f"the design `{comparison.design}` compares `{key}`, which it does not plan", hint=_OF_DESIGNS
                )


def _sources_first(attempts: dict[str, PlannedAttempt]) -> tuple[PlannedAttempt, ...]:
    """The attempts in the order given, moved back only where one stands before its source."""
    seen: set[str] = set()
    in_order = True
    for attempt in attempts.values():
        source = attempt.source
        if source is not None and source not in attempts:
            raise UserError(
                f"`{attempt.key}` is to be given the {attempt.material} of `{source}`, which is not planned",
                hint=f"the design must plan that attempt too; {_OF_DESIGNS}",
            )
        in_order = in_order and (source is None or source in seen)
        seen.add(attempt.key)
    return tuple(attempts.values()) if in_order else _sorted(attempts)


def _sorted(attempts: dict[str, PlannedAttempt]) -> tuple[PlannedAttempt, ...]:
    graph = {key: [] if attempt.source is None else [attempt.source] for key, attempt in attempts.items()}
    try:
        return tuple(attempts[key] for key in TopologicalSorter(graph).static_order())
    except CycleError as error:
        cycle: Sequence[str] = error.args[1]
        raise UserError(
            f"these attempts wait for each other, so that none can start: {' ← '.join(f'`{key}`' for key in cycle)}",
            hint=_OF_DESIGNS,
        ) from None


_OF_DESIGNS = "this is a mistake in the design, not in the experiment file; `mkb designs show` says where it is from"
