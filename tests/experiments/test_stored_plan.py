"""The last file that ran defines the plan: a file that asks for another one is told so, and what it would take away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from metakernelbench.experiments.plan import plan_of
from metakernelbench.experiments.spec import ExperimentSpec
from metakernelbench.experiments.status import status_of_file
from metakernelbench.experiments.stored_plan import asks_otherwise, loses
from metakernelbench.store.store import Store
from tests.experiments.support import fingerprint, record_of, spec_of


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path, create=True) as opened:
        yield opened


def ran(store: Store, spec: ExperimentSpec) -> ExperimentSpec:
    """As a run of solo attempts leaves it."""
    plan = plan_of(spec)
    store.save_experiment(spec, plan)
    for attempt in plan.attempts:
        store.save_attempt(spec.name, attempt, record_of(attempt, spec.attempt, None))
    return spec


def solo(folder: Path, *problems: str, **changes: object) -> ExperimentSpec:
    return spec_of(folder, design=("retry",), problems=problems, dsls=("tirx",), **changes)


def test_the_same_file_asks_for_nothing_else(store: Store, tmp_path: Path) -> None:
    spec = ran(store, solo(tmp_path, "p03", "p28"))
    assert (asks_otherwise(spec, store), loses(spec, store)) == (None, None)
    assert status_of_file(store, spec, fingerprint).complete


def test_nothing_is_said_before_the_first_run(store: Store, tmp_path: Path) -> None:
    spec = solo(tmp_path, "p28")
    assert (asks_otherwise(spec, store), loses(spec, store)) == (None, None)


def test_a_larger_file_is_not_complete_after_a_smaller_one_ran(store: Store, tmp_path: Path) -> None:
    ran(store, solo(tmp_path, "p28"))
    larger = solo(tmp_path, "p03", "p28")
    status = status_of_file(store, larger, fingerprint)
    assert not status.complete
    assert status.otherwise == "small: the file asks for 4 attempts, the stored plan has 2"
    assert loses(larger, store) is None


def test_a_file_that_asks_for_as_many_others_is_told_how_many(store: Store, tmp_path: Path) -> None:
    ran(store, solo(tmp_path, "p28"))
    said = asks_otherwise(solo(tmp_path, "p03"), store)
    assert said == "small: the file asks for 2 attempts, the stored plan has 2, 2 of them others"


def test_a_file_with_other_settings_is_not_complete(store: Store, tmp_path: Path) -> None:
    spec = ran(store, solo(tmp_path, "p28"))
    changed = spec.model_copy(update={"attempt": spec.attempt.model_copy(update={"budget_s": 60.0})})
    status = status_of_file(store, changed, fingerprint)
    assert (status.complete, status.otherwise) == (False, "small: as the file is now, 2 attempts would run")


def test_a_run_that_would_shrink_the_stored_plan_says_by_how_much(store: Store, tmp_path: Path) -> None:
    ran(store, solo(tmp_path, "p03", "p28"))
    said = loses(solo(tmp_path, "p28"), store)
    assert said is not None
    assert said.startswith(
        "This run's plan of 2 attempts replaces the stored one of 4 under the name `small`: 2 leave status, tables and "
        "reports until a file that asks for them runs again"
    )
