"""How far an experiment has come, as one value that a table or a JSON document is made of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from metakernelbench.experiments.plan import Fingerprint, RunPlan, State, kinds_of, plan_missing
from metakernelbench.experiments.spec import ExperimentSpec
from metakernelbench.experiments.stored_plan import asks_otherwise, would_run_again
from metakernelbench.store.store import Store


@dataclass(frozen=True, kw_only=True)
class KindStatus:
    """The attempts of one kind."""

    planned: int
    passed: int
    """Of those kept: the final kernel passed."""
    running: int
    """Of those not kept: a runner is at them now."""
    states: dict[str, int]
    """State → attempts; they add up to `planned`."""


@dataclass(frozen=True, kw_only=True)
class ExperimentStatus:
    """One experiment."""

    name: str
    updated_at: str
    kinds: dict[str, KindStatus]
    """What attempts are for → how they stand."""
    running: dict[str, str]
    """Key → the runner that is at it."""
    failed: dict[str, str]
    """Key → the fault that the attempt was given up for."""
    waiting: dict[str, str]
    """Key → what the attempt waits for."""
    complete: bool
    otherwise: str | None = None
    """How the file that was asked about differs from what the store holds; then it is not complete."""


def status_of(store: Store, name: str, fingerprint: Fingerprint) -> ExperimentStatus:
    """The status of an experiment as last run. Raises `UnknownName`."""
    stored = store.experiment(name)
    plan = plan_missing(stored.spec, stored.plan, store, fingerprint)
    running = store.leases.held(name)
    return ExperimentStatus(
        name=name,
        updated_at=stored.updated_at,
        kinds=_kinds(plan, store, running),
        running=running,
        failed={item.attempt.key: item.reason or "" for item in plan.items if item.state is State.FAILED},
        waiting={item.attempt.key: item.reason or "" for item in plan.items if item.state is State.WAITING},
        complete=all(item.settled for item in plan.items),
    )


def status_of_file(store: Store, spec: ExperimentSpec, fingerprint: Fingerprint) -> ExperimentStatus:
    """The status of an experiment as last run, which is complete only where a run of this file would do nothing."""
    status = status_of(store, spec.name, fingerprint)
    otherwise = asks_otherwise(spec, store)
    if otherwise is None and status.complete:
        otherwise = would_run_again(spec, store, fingerprint)
    return replace(status, otherwise=otherwise, complete=status.complete and otherwise is None)


def _kinds(plan: RunPlan, store: Store, running: dict[str, str]) -> dict[str, KindStatus]:
    standings, kinds = store.standings(plan.spec.name), kinds_of(plan.plan)
    passed, busy = Counter[str](), Counter[str]()
    for item in plan.items:
        key = item.attempt.key
        passed[kinds[key]] += item.state is State.KEPT and bool(standings[key].passed)
        busy[kinds[key]] += key in running
    return {
        kind: KindStatus(
            planned=counts.total(),
            passed=passed[kind],
            running=busy[kind],
            states={state.value: counts[state] for state in State},
        )
        for kind, counts in plan.counts().items()
    }
