"""What `mkb run --dry-run` prints: what would run and why, and at most or about how much of what it would use."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table

from metakernelbench.cli import output
from metakernelbench.text import harmless

if TYPE_CHECKING:
    from metakernelbench.experiments.estimate import ModelCost
    from metakernelbench.experiments.plan import RunPlan
    from metakernelbench.experiments.spec import ExperimentSpec
    from metakernelbench.store.store import Store

_SHOWN = 5
"""Reasons and models listed where there may be many."""


def show_plan(spec: ExperimentSpec, *, as_json: bool) -> None:
    """Print how an experiment stands and what is left of it; starts and writes nothing."""
    from metakernelbench.attempts.attempt import fingerprint
    from metakernelbench.experiments.estimate import estimate
    from metakernelbench.experiments.obstacles import obstacles
    from metakernelbench.experiments.plan import idle_designs, plan_missing, plan_of
    from metakernelbench.experiments.stored_plan import loses

    store = _existing_store(spec)
    try:
        plan = plan_missing(spec, plan_of(spec), store, fingerprint)
        costs = estimate(plan, store)
        lost = None if store is None else loses(spec, store)
    finally:
        if store is not None:
            store.close()
    if lost is not None:
        output.warn(lost)
    found = asyncio.run(obstacles(spec))
    if as_json:
        output.print_json(_as_json(plan, costs) | {"obstacles": found})
        return
    _print(plan, costs)
    if (idle := idle_designs(spec, plan.plan)) is not None:
        output.warn(idle)
    for obstacle in found:
        output.warn(f"would not start here: {obstacle}")


def last_line(text: str) -> str:
    """The line of an error text that says what went wrong: for a traceback that is the last."""
    return text.strip().splitlines()[-1] if text.strip() else "no reason given"


def _existing_store(spec: ExperimentSpec) -> Store | None:
    """The store, or None where there is none yet: a dry run makes none."""
    from metakernelbench.experiments.loading import open_store
    from metakernelbench.store.database import NoStore

    try:
        return open_store(spec)
    except NoStore:
        return None


def _as_json(plan: RunPlan, costs: list[ModelCost]) -> dict[str, Any]:
    listed = [item for item in plan.items if item.reason is not None]
    known = [cost.usd for cost in costs if cost.usd is not None]
    return {
        "experiment": plan.spec.name,
        "store": plan.spec.store,
        "planned": len(plan.items),
        "comparisons": len(plan.plan.comparisons),
        "counts": {
            kind: {state.value: number for state, number in counts.items()} for kind, counts in plan.counts().items()
        },
        "reasons": [{"key": i.attempt.key, "state": i.state.value, "reason": i.reason} for i in listed],
        "upper_bound": {
            "attempts": len(plan.to_run),
            "sandbox_hours": plan.sandbox_hours,
            "gradings": plan.gradings,
        },
        "cost_estimate": {
            "usd": sum(known) if len(known) == len(costs) else None,
            "models": [dataclasses.asdict(cost) for cost in costs],
        },
    }


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _say(text: str) -> None:
    output.stdout.print(harmless(text), markup=False, soft_wrap=True)


def _print(plan: RunPlan, costs: list[ModelCost]) -> None:
    spec = plan.spec
    _say(
        f"{spec.name}: {_count(len(plan.items), 'attempt')}, {_count(len(plan.plan.comparisons), 'comparison')} "
        f"({', '.join(spec.design)}: {_count(len(spec.problems), 'problem')}, {_count(len(spec.dsls), 'DSL')}, "
        f"{_count(len(spec.models), 'model')}, {_count(spec.replicates, 'replicate')})"
    )
    output.stdout.print(_table(plan))
    _print_reasons(plan)
    _say(
        f"at most still to run: {_count(len(plan.to_run), 'attempt')}, {plan.sandbox_hours:,.1f} sandbox hours, "
        f"{_count(plan.gradings, 'grading')} on {_place(spec)}"
    )
    _print_costs(costs)


def _place(spec: ExperimentSpec) -> str:
    return "a CPU" if spec.attempt.device == "cpu" else "a GPU"


def _table(plan: RunPlan) -> Table:
    kinds = plan.counts()
    states = shown_states({state.value: number for state, number in counts.items()} for counts in kinds.values())
    table = Table("attempts", *states, "planned", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for kind, counts in kinds.items():
        row = {state.value: number for state, number in counts.items()}
        table.add_row(harmless(kind), *(str(row.get(state, 0)) for state in states), str(counts.total()))
    return table


def shown_states(rows: Iterable[Mapping[str, int]]) -> list[str]:
    """The states that deserve a column: the usual two, and what occurs, so that the table fits a narrow terminal."""
    from metakernelbench.experiments.plan import State

    occurring = {state for row in rows for state, number in row.items() if number}
    return [state.value for state in State if state in (State.KEPT, State.MISSING) or state.value in occurring]


def _print_reasons(plan: RunPlan) -> None:
    """One line a reason, the most frequent first."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for item in plan.items:
        if item.reason is not None:
            groups[item.state.value, last_line(item.reason)].append(item.attempt.key)
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    for (state, reason), keys in ordered[:_SHOWN]:
        such_as = keys[0] if len(keys) == 1 else f"{len(keys):,} attempts, such as {keys[0]}"
        _say(f"{state}: {such_as}: {reason}")
    if len(ordered) > _SHOWN:
        _say(f"... and {len(ordered) - _SHOWN:,} more reasons; --json lists them")


def _print_costs(costs: list[ModelCost]) -> None:
    if not costs:
        return
    known = [cost.usd for cost in costs if cost.usd is not None]
    if known:
        unknown = "" if len(known) == len(costs) else f", without {_count(len(costs) - len(known), 'unpriced model')}"
        _say(f"about to pay for model calls: {_usd(sum(known))}{unknown}")
    for cost in costs[:_SHOWN]:
        _say(f"  {cost.model}: {_cost(cost)}")
    if len(costs) > _SHOWN:
        _say(f"  ... and {_count(len(costs) - _SHOWN, 'more model')}; --json lists them")


def _cost(cost: ModelCost) -> str:
    attempts = _count(cost.attempts, "attempt")
    if cost.basis == "prepared":
        return f"nothing, its turns are prepared ({attempts})"
    if cost.usd is None:
        return f"{attempts} at a price that LiteLLM's table does not have; give it as `model_info` of model_options"
    if cost.price is None:
        return f"{_usd(cost.usd)}: {attempts} at what {_count(cost.finished, 'finished attempt')} have cost in the mean"
    tokens = (
        f"{cost.input_tokens / 1e6:.3g} M tokens in ({cost.cached_tokens / 1e6:.3g} M of them cached), "
        f"{cost.output_tokens / 1e6:.3g} M out"
    )
    measured = f"the mean of {_count(cost.finished, 'finished attempt')}"
    basis = measured if cost.basis == "measured" else "assumed, see [usage]"
    return f"{_usd(cost.usd)}: {attempts} of {tokens} ({basis}), price of `{cost.price}`"


def _usd(amount: float) -> str:
    return f"${amount:,.2f}" if amount < 100 else f"${amount:,.0f}"
