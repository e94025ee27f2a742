"""A cost estimate says what it rests on: finished attempts, an assumption, bills, or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from metakernelbench.attempts.record import Usage
from metakernelbench.attempts.settings import AttemptSettings
from metakernelbench.experiments import prices
from metakernelbench.experiments.estimate import ModelCost, estimate
from metakernelbench.experiments.plan import Freshness, plan_missing, plan_of
from metakernelbench.experiments.prices import price_of
from metakernelbench.store.store import Store
from tests.experiments.support import fingerprint, record_of, spec_of

INFO = {"input_cost_per_token": 2e-6, "cache_read_input_token_cost": 1e-6, "output_cost_per_token": 8e-6}
USAGE = Usage(turns=9, input_tokens=1_000_000, cached_tokens=500_000, output_tokens=100_000)


def settings(**options: Any) -> AttemptSettings:
    return AttemptSettings(device="cpu", workload="smoke", model_options=options)


def cost_of(folder: Path, usage: Usage | None = None, **changes: Any) -> ModelCost:
    """Of eight attempts, or of those that are left when the first two have used so much."""
    spec = spec_of(folder, **({"attempt": settings(model_info=INFO)} | changes))
    plan = plan_of(spec)
    with Store.open(folder, create=True) as store:
        freshness = Freshness(spec.attempt, fingerprint)
        for attempt in plan.attempts[:2] if usage else ():
            record = record_of(attempt, spec.attempt, None).model_copy(update={"usage": usage, "skill": "Learned."})
            store.save_attempt(spec.name, attempt, record, task=freshness.task(attempt))
        (cost,) = estimate(plan_missing(spec, plan, store, fingerprint), store)
    return cost


def test_before_any_attempt_has_finished_the_tokens_are_the_experiments_assumption(tmp_path: Path) -> None:
    cost = cost_of(tmp_path)
    assert (cost.basis, cost.attempts, cost.finished, cost.price) == ("assumed", 8, 0, "model_info")
    assert cost.usd == pytest.approx(8 * (240_000 * 2e-6 + 960_000 * 1e-6 + 60_000 * 8e-6))


def test_finished_attempts_say_what_the_rest_will_take(tmp_path: Path) -> None:
    cost = cost_of(tmp_path, USAGE)
    assert (cost.basis, cost.attempts, cost.finished) == ("measured", 6, 2)
    assert cost.usd == pytest.approx(6 * (0.5 * 2 + 0.5 * 1 + 0.1 * 8))


def test_without_a_price_the_bills_of_finished_attempts_count(tmp_path: Path) -> None:
    cost = cost_of(tmp_path, USAGE.model_copy(update={"cost_usd": 1.5}), attempt=settings())
    assert (cost.basis, cost.usd, cost.price) == ("measured", pytest.approx(9.0), None)


def test_without_a_price_and_without_bills_nothing_is_made_up(tmp_path: Path) -> None:
    cost = cost_of(tmp_path, USAGE, attempt=settings())
    assert (cost.basis, cost.usd) == ("unknown", None)


def test_prepared_turns_cost_nothing(tmp_path: Path) -> None:
    cost = cost_of(tmp_path, models=("scripted/turns",))
    assert (cost.basis, cost.usd) == ("prepared", 0.0)


def test_litellms_table_is_found_and_a_model_behind_a_gateway_has_its_vendors_price() -> None:
    table = prices._table()
    assert len(table) > 100, "LiteLLM keeps its prices elsewhere now"
    name = next(name for name in table if "/" not in name and price_of(name) is not None)
    known = price_of(name)
    assert price_of(f"gateway/vendor/{name}") == known
    assert known is not None
    assert known.name == name
    assert price_of("openrouter/vendor/model") is None


def test_input_that_the_table_gives_no_cached_price_for_costs_the_full_price() -> None:
    price = price_of("any", {"input_cost_per_token": 1e-6, "output_cost_per_token": 2e-6})
    assert price is not None
    assert price.usd(10, 4, 5) == pytest.approx(20e-6)
