"""Two stores become one: what is missing is copied whole, what differs is listed, nothing is overwritten."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metakernelbench.attempts.settings import AttemptSettings
from metakernelbench.errors import StoreError, UnknownName
from metakernelbench.experiments.plan import plan_of
from metakernelbench.experiments.run import run_experiment
from metakernelbench.experiments.spec import ExperimentSpec
from metakernelbench.store.merge import chosen, merge, plan_merge
from metakernelbench.store.store import Store
from tests.experiments.support import Instant, NoJudge, lines, outcome_of, record_of, spec_of
from tests.store.conftest import Place
from tests.store.test_rematches import rematch


def filled(folder: Path, **changes: Any) -> tuple[ExperimentSpec, Store]:
    """A store with a finished experiment."""
    spec = spec_of(folder, **changes)
    store = Store.open(folder, create=True)
    asyncio.run(run_experiment(spec, store, judge=NoJudge(), progress=lines(), machinery=Instant().machinery()))
    return spec, store


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[Store]:
    _, store = filled(tmp_path / "theirs")
    with store:
        yield store


def bring(source: Store, target: Store, *, name: str | None = None) -> None:
    merge(source, target, [plan_merge(source, target, "small", name=name)])


def test_everything_comes_into_an_empty_store(theirs: Store, store: Store) -> None:
    theirs.record_fault("small", "p28/tirx/vendor/model/0/solo", try_number=1, gave_up=False, message="lost")
    theirs.rematches.save("small", rematch())
    bring(theirs, store)
    assert outcome_of(store, "small") == outcome_of(theirs, "small")
    assert [attempt.key for attempt in store.experiment("small").plan.attempts] == list(outcome_of(theirs, "small"))
    assert store.standings("small") == theirs.standings("small")
    assert store.rematches.of("small") == theirs.rematches.of("small")
    assert [fault.message for fault in store.faults("small")] == ["lost"]


def test_a_second_time_brings_nothing_and_changes_nothing(theirs: Store, store: Store) -> None:
    bring(theirs, store)
    before = outcome_of(store, "small")
    plan = plan_merge(theirs, store, "small")
    assert (plan.new, plan.present, plan.conflicts) == ((), len(before), ())
    merge(theirs, store, [plan])
    assert outcome_of(store, "small") == before


def test_two_halves_of_an_experiment_become_one(theirs: Store, tmp_path: Path) -> None:
    _, ours = filled(tmp_path / "ours", models=("vendor/other",))
    with ours:
        bring(theirs, ours)
        stored = ours.experiment("small")
        assert stored.spec.models == ("vendor/other", "vendor/model")
        assert len(stored.plan.attempts) == 16 and len(stored.plan.comparisons) == 8
        assert set(outcome_of(ours, "small")) == {attempt.key for attempt in plan_of(stored.spec).attempts}


def test_what_differs_is_listed_and_nothing_is_brought_over(theirs: Store, tmp_path: Path) -> None:
    attempt = AttemptSettings(device="cpu", workload="smoke", budget_s=60)
    spec, ours = filled(tmp_path / "ours", attempt=attempt)
    with ours:
        changed = plan_of(spec).attempts[0]
        ours.save_attempt("small", changed, record_of(changed, attempt, None, kernel="another"))
        before = outcome_of(ours, "small")
        with pytest.raises(StoreError) as caught:
            bring(theirs, ours)
        assert "small: `attempt.budget_s` is 60.0 here and 2400.0 there" in caught.value.message.split("\n")
        assert f"small: `{changed.key}` has another record in each store" in caught.value.message.split("\n")
        assert "--as" in (caught.value.hint or "")
        assert outcome_of(ours, "small") == before

        bring(theirs, ours, name="theirs")
        assert outcome_of(ours, "theirs") == outcome_of(theirs, "small")
        assert ours.experiments() == ["small", "theirs"]


def test_an_unreadable_record_is_named_and_stops_it(theirs: Store, store: Store, tmp_path: Path) -> None:
    Place(tmp_path / "theirs").execute("UPDATE attempts SET record = '{'")
    with pytest.raises(StoreError, match=r"the record of p03/.* cannot be read: "):
        bring(theirs, store)
    assert store.experiments() == []


def test_a_damaged_text_stops_it_before_any_record_is_written(theirs: Store, store: Store) -> None:
    for path in (theirs.folder / "artifacts").glob("*/*.gz"):
        if not path.name.startswith(theirs_plan(theirs)):
            path.write_bytes(b"damaged")
    with pytest.raises(StoreError, match="cannot be read"):
        bring(theirs, store)
    assert store.experiments() == [] and store.standings("small") == {}


def theirs_plan(store: Store) -> str:
    """Digest of the plan's text."""
    with store._database.reading() as connection:
        return str(connection.exec_driver_sql("SELECT plan FROM experiments").scalar())


def test_an_unknown_experiment_lists_the_nearest(theirs: Store) -> None:
    assert chosen(theirs, []) == ["small"]
    with pytest.raises(UnknownName, match="unknown experiment `smal`; nearest: `small`"):
        chosen(theirs, ["smal"])
