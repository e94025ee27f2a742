"""About how much the attempts that are still to run will cost, model by model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import islice
from statistics import fmean
from typing import Literal

from metakernelbench.attempts.record import Usage
from metakernelbench.attempts.settings import SCRIPTED
from metakernelbench.experiments.plan import RunPlan, State
from metakernelbench.experiments.prices import Price, price_of
from metakernelbench.experiments.spec import Usage as Assumed
from metakernelbench.store.store import Store

_LOOKED_AT = 200
"""Finished attempts of a model that the mean is taken over: enough for two digits."""


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """What one model's attempts will cost."""

    model: str
    attempts: int
    """Still to run."""
    usd: float | None
    """For all of them; None where no price is known."""
    basis: Literal["measured", "assumed", "unknown", "prepared"]
    """The tokens of finished attempts, those that the experiment assumes, no price at all, or prepared turns."""
    price: str | None = None
    """The price table's entry."""
    finished: int = 0
    """Attempts that the measured tokens are the mean of."""
    input_tokens: float = 0
    """Of one attempt."""
    cached_tokens: float = 0
    output_tokens: float = 0


def estimate(plan: RunPlan, store: Store | None) -> list[ModelCost]:
    """One entry for each model that has attempts to run, in the order of the experiment file."""
    to_run = Counter(item.attempt.model for item in plan.to_run)
    return [_cost(model, to_run[model], plan, store) for model in plan.spec.models if to_run[model]]


def _cost(model: str, attempts: int, plan: RunPlan, store: Store | None) -> ModelCost:
    if model.startswith(SCRIPTED):
        return ModelCost(model=model, attempts=attempts, usd=0.0, basis="prepared")
    used = [] if store is None else _finished(model, plan, store)
    price = price_of(model, plan.spec.attempt.model_options.get("model_info"))
    if price is None:
        return _by_bills(model, attempts, used)
    if used:
        tokens = tuple(
            fmean(getattr(usage, name) or 0 for usage in used)
            for name in ("input_tokens", "cached_tokens", "output_tokens")
        )
        return _priced(model, attempts, price, tokens, finished=len(used))
    assumed: Assumed = plan.spec.usage
    tokens = (assumed.input_tokens, assumed.cached_tokens, assumed.output_tokens)
    return _priced(model, attempts, price, tokens, finished=0)


def _priced(model: str, attempts: int, price: Price, tokens: tuple[float, ...], *, finished: int) -> ModelCost:
    return ModelCost(
        model=model,
        attempts=attempts,
        usd=attempts * price.usd(*tokens),
        basis="measured" if finished else "assumed",
        price=price.name,
        finished=finished,
        input_tokens=tokens[0],
        cached_tokens=tokens[1],
        output_tokens=tokens[2],
    )


def _by_bills(model: str, attempts: int, used: list[Usage]) -> ModelCost:
    """Without a price, what the finished attempts say they have cost."""
    bills = [usage.cost_usd for usage in used if usage.cost_usd]
    if not bills:
        return ModelCost(model=model, attempts=attempts, usd=None, basis="unknown")
    return ModelCost(model=model, attempts=attempts, usd=attempts * fmean(bills), basis="measured", finished=len(bills))


def _finished(model: str, plan: RunPlan, store: Store) -> list[Usage]:
    """What finished attempts have used, as far as the provider said."""
    kept = (item.attempt.key for item in plan.items if item.state is State.KEPT and item.attempt.model == model)
    usages = (usage for _, usage in store.usages(plan.spec.name, islice(kept, _LOOKED_AT)))
    return [usage for usage in usages if usage.input_tokens]
