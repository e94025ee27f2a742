"""What is missing of an experiment: every planned attempt against what the store holds of it."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from metakernelbench.attempts.settings import SCRIPTED, AttemptSettings
from metakernelbench.experiments.materials import Materials, NotAnnotated
from metakernelbench.experiments.planned import Plan, PlannedAttempt, merged
from metakernelbench.experiments.registry import load_design
from metakernelbench.experiments.spec import ExperimentSpec
from metakernelbench.grading.contract import CONTRACT_VERSION
from metakernelbench.store.store import Standing, Store

type Fingerprint = Callable[[PlannedAttempt, AttemptSettings, str | None], str]
"""`attempts.attempt.fingerprint`, or a stand-in."""


class State(StrEnum):
    """How a planned attempt stands."""

    KEPT = "kept"
    """Finished, and nothing that it depends on has changed since."""
    MISSING = "missing"
    FAILED = "failed"
    """The last run gave it up for a reason of ours."""
    STALE = "stale"
    """Finished, but what it depends on has changed since: it runs again."""
    SKIPPED = "skipped"
    """Its source left nothing to attach: nothing runs, the comparison inherits the baseline."""
    WAITING = "waiting"
    """What it is given of its source has to be annotated first."""


TO_RUN = (State.MISSING, State.FAILED, State.STALE)
"""The states of attempts that need a sandbox."""


@dataclass(frozen=True, slots=True)
class Item:
    """One planned attempt and how it stands."""

    attempt: PlannedAttempt
    state: State
    reason: str | None = None
    """Why it is stale or waiting, or what it failed of."""
    settled: bool = False
    """Whether the store holds all there will be of it."""


@dataclass(frozen=True)
class RunPlan:
    """Every planned attempt of an experiment, in the plan's order, and at most how much is still to be spent."""

    spec: ExperimentSpec
    plan: Plan
    items: tuple[Item, ...]

    @cached_property
    def to_run(self) -> list[Item]:
        """The attempts that need a sandbox now, and those that will once their source is annotated."""
        return [item for item in self.items if item.state in (*TO_RUN, State.WAITING)]

    def counts(self) -> dict[str, Counter[State]]:
        """Kind of attempt → number of attempts in each state."""
        kinds = kinds_of(self.plan)
        pairs = Counter((kinds[item.attempt.key], item.state) for item in self.items)
        counts: dict[str, Counter[State]] = {kind: Counter() for kind, _ in pairs}
        for (kind, state), number in pairs.items():
            counts[kind][state] = number
        return counts

    @property
    def sandbox_hours(self) -> float:
        """Upper bound: every attempt to run uses up its budget."""
        return len(self.to_run) * self.spec.attempt.budget_s / 3600

    @property
    def gradings(self) -> int:
        """Upper bound: every attempt to run uses up its submissions, and is graded once more at its end."""
        return len(self.to_run) * (self.spec.attempt.max_submissions + 1)


def kinds_of(plan: Plan) -> dict[str, str]:
    """Key → what the attempt is for: the design and arm of which it is the treatment, or else `solo` or `conditioned`.

    One that several designs treat is counted under the first.
    """
    kinds: dict[str, str] = {}
    for comparison in plan.comparisons:
        kinds.setdefault(comparison.treatment, f"{comparison.design}: {comparison.arm}")
    return {attempt.key: kinds.get(attempt.key, attempt.arm) for attempt in plan.attempts}


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """A plan is hundreds of thousands of small objects without cycles, through which Python's collector of cycles would
    look again and again: a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_collector_at_rest()
def plan_of(spec: ExperimentSpec) -> Plan:
    """The attempts and comparisons that an experiment's designs ask for. Raises `UserError`."""
    return merged(
        load_design(name).plan(
            spec.problems, spec.dsls, spec.models, spec.replicates, options=spec.options.get(name, {})
        )
        for name in spec.design
    )


def idle_designs(spec: ExperimentSpec, plan: Plan) -> str | None:
    """What to say of designs that compare nothing with these problems, DSLs and models; None where there is none."""
    idle = sorted({*spec.design} - {comparison.design for comparison in plan.comparisons})
    if not idle:
        return None
    return f"{' and '.join(idle)}: no comparison comes of this; `mkb designs show {idle[0]}` says what it needs"


@_collector_at_rest()
def plan_missing(spec: ExperimentSpec, plan: Plan, store: Store | None, fingerprint: Fingerprint) -> RunPlan:
    """How every planned attempt stands in the store; `store` is None where there is none yet."""
    if store is None:
        return RunPlan(spec=spec, plan=plan, items=tuple(Item(a, State.MISSING) for a in plan.attempts))
    books = _Books(spec, store, Freshness(spec.attempt, fingerprint))
    books.materials.expect(attempt for attempt in plan.attempts if attempt.source in books.standings)
    items: dict[str, Item] = {}
    for attempt in plan.attempts:
        items[attempt.key] = books.item(attempt, None if attempt.source is None else items[attempt.source])
    return RunPlan(spec=spec, plan=plan, items=tuple(items.values()))


class _Books:
    """What the store holds of one experiment, read at once."""

    def __init__(self, spec: ExperimentSpec, store: Store, freshness: Freshness) -> None:
        self.standings = store.standings(spec.name)
        self.materials = Materials(store, spec.name)
        self._given_up = {fault.key: fault.message for fault in store.faults(spec.name) if fault.gave_up}
        self._freshness = freshness

    def item(self, attempt: PlannedAttempt, source: Item | None) -> Item:
        """How an attempt stands, after its source."""
        standing = self.standings.get(attempt.key)
        if source is not None and source.state in (*TO_RUN, State.WAITING):
            return self._unless_failed(attempt, standing, reason="its source runs again")
        attached: str | None = None
        if source is not None:
            try:
                attached = self._attached(attempt, source)
            except NotAnnotated as error:
                return Item(attempt, State.WAITING, str(error))
            if attached is None:
                settled = standing is not None and standing.ended == "skipped"
                return Item(attempt, State.SKIPPED, settled=settled)
        reason = None if standing is None else self._freshness.reason(attempt, standing, attached)
        if standing is not None and reason is None:
            return Item(attempt, State.KEPT, settled=True)
        return self._unless_failed(attempt, standing, reason)

    def _attached(self, attempt: PlannedAttempt, source: Item) -> str | None:
        if source.state is State.SKIPPED:
            return None
        return self.materials.digest(attempt, self.standings[source.attempt.key])

    def _unless_failed(self, attempt: PlannedAttempt, standing: Standing | None, reason: str | None) -> Item:
        """Stale, missing, or failed where the last run has given it up."""
        if standing is not None:
            return Item(attempt, State.STALE, reason)
        if attempt.key in self._given_up:
            return Item(attempt, State.FAILED, self._given_up[attempt.key])
        return Item(attempt, State.MISSING)


@dataclass
class Freshness:
    """Says whether a record still answers what is asked now. Digests of tasks are computed once a task."""

    settings: AttemptSettings
    fingerprint: Fingerprint
    _tasks: dict[tuple[str, ...], str] = field(default_factory=dict[tuple[str, ...], str])

    def task(self, attempt: PlannedAttempt) -> str:
        """Fingerprint of an attempt's task, where something is attached with a stand-in for it."""
        # Attempts at one variant by one model have one task; prepared turns are looked up by the attempt's own key.
        shared = (attempt.problem, attempt.dsl, attempt.model, attempt.skill_form, attempt.arm)
        known_by = (attempt.key,) if attempt.model.startswith(SCRIPTED) else shared
        if known_by not in self._tasks:
            attached = None if attempt.source is None else "..."
            self._tasks[known_by] = self.fingerprint(attempt, self.settings, attached)
        return self._tasks[known_by]

    def reason(self, attempt: PlannedAttempt, standing: Standing, attached: str | None) -> str | None:
        """Why a record is stale, given the digest of what its source has for it now; None where it is fresh."""
        if standing.contract_version != CONTRACT_VERSION:
            return f"graded under contract {standing.contract_version}, now {CONTRACT_VERSION}"
        if standing.attached != attached:
            return f"its source {attempt.material} has changed"
        if standing.task != self.task(attempt):
            return "its task or settings have changed"
        return None
