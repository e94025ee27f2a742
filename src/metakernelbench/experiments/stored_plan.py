"""A file against the plan that the store holds under its name, which is that of the last file that ran."""

from __future__ import annotations

from metakernelbench.experiments.plan import Fingerprint, plan_missing, plan_of
from metakernelbench.experiments.planned import Plan
from metakernelbench.experiments.spec import ExperimentSpec
from metakernelbench.store.store import Store


def asks_otherwise(spec: ExperimentSpec, store: Store) -> str | None:
    """How a file's plan differs from the stored one, in a clause; None where it is the same or nothing is stored."""
    if (stored := _stored(spec, store)) is None:
        return None
    asked, kept = _keys(plan_of(spec)), _keys(stored)
    if asked == kept:
        return None
    others = f", {len(asked - kept)} of them others" if len(asked) == len(kept) else ""
    return f"{spec.name}: the file asks for {_attempts(len(asked))}, the stored plan has {len(kept)}{others}"


def would_run_again(spec: ExperimentSpec, store: Store, fingerprint: Fingerprint) -> str | None:
    """How many of a file's attempts a run would not keep, in a clause; None where there is none."""
    open_items = [item for item in plan_missing(spec, plan_of(spec), store, fingerprint).items if not item.settled]
    if not open_items:
        return None
    return f"{spec.name}: as the file is now, {_attempts(len(open_items))} would run"


def loses(spec: ExperimentSpec, store: Store) -> str | None:
    """What running a file takes out of the stored plan, in a sentence; None where it takes nothing out."""
    if (stored := _stored(spec, store)) is None:
        return None
    asked, kept = _keys(plan_of(spec)), _keys(stored)
    if kept <= asked:
        return None
    return (
        f"This run's plan of {_attempts(len(asked))} replaces the stored one of {len(kept)} under the name "
        f"`{spec.name}`: {len(kept - asked)} leave status, tables and reports until a file that asks for them runs "
        "again (their records stay). Give the file another `name` to keep both."
    )


def _stored(spec: ExperimentSpec, store: Store) -> Plan | None:
    return store.experiment(spec.name).plan if spec.name in store.experiments() else None


def _keys(plan: Plan) -> set[str]:
    return {attempt.key for attempt in plan.attempts}


def _attempts(number: int) -> str:
    return f"{number} attempt{'' if number == 1 else 's'}"
