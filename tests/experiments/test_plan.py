"""Every planned attempt is in one state, and what is still to be spent is bounded."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from metakernelbench.attempts.settings import AttemptSettings
from metakernelbench.experiments import plan as plan_module
from metakernelbench.experiments.plan import Freshness, State, plan_missing, plan_of
from metakernelbench.experiments.planned import PlannedAttempt
from metakernelbench.store.artifacts import digest_of
from metakernelbench.store.store import Store
from tests.experiments.support import fingerprint, record_of, spec_of

TIRX_SOLO, TRITON_SOLO = "p28/tirx/vendor/model/0/solo", "p28/triton/vendor/model/0/solo"
FROM_TIRX, FROM_TRITON = "p28/triton/vendor/model/0/from-tirx", "p28/tirx/vendor/model/0/from-triton"


def states(store: Store) -> dict[str, tuple[State, str | None]]:
    spec = spec_of(store.folder, problems=("p28",))
    plan = plan_missing(spec, plan_of(spec), store, fingerprint)
    return {item.attempt.key: (item.state, item.reason) for item in plan.items}


def save(store: Store, key: str, *, skill: str | None = "What was learned.", attached: str | None = None) -> None:
    spec = spec_of(store.folder, problems=("p28",))
    planned = next(attempt for attempt in plan_of(spec).attempts if attempt.key == key)
    record = record_of(planned, spec.attempt, attached).model_copy(update={"skill": skill})
    store.save_attempt(
        "small",
        planned,
        record,
        attached=attached and digest_of(attached),
        task=Freshness(spec.attempt, fingerprint).task(planned),
    )


def test_with_no_store_everything_is_missing_and_the_bound_is_the_whole_budget() -> None:
    spec = spec_of(Path())
    plan = plan_missing(spec, plan_of(spec), None, fingerprint)
    assert plan.counts() == {"solo": Counter({State.MISSING: 4}), "cross-dsl: skill": Counter({State.MISSING: 4})}
    assert plan.sandbox_hours == pytest.approx(8 * 2400 / 3600)
    assert plan.gradings == 8 * 11


def test_states_follow_from_what_the_store_holds(tmp_path: Path) -> None:
    store = Store.open(tmp_path, create=True)
    save(store, TIRX_SOLO)
    save(store, FROM_TIRX, attached="What was learned.")
    save(store, TRITON_SOLO, skill=None)
    assert states(store) == {
        TIRX_SOLO: (State.KEPT, None),
        TRITON_SOLO: (State.KEPT, None),
        FROM_TIRX: (State.KEPT, None),
        FROM_TRITON: (State.SKIPPED, None),
    }
    store.record_fault("small", FROM_TRITON, try_number=3, gave_up=True, message="of no interest any more")
    assert states(store)[FROM_TRITON] == (State.SKIPPED, None)


def test_what_was_given_up_is_failed_until_it_has_a_record(tmp_path: Path) -> None:
    store = Store.open(tmp_path, create=True)
    store.record_fault("small", TIRX_SOLO, try_number=1, gave_up=False, message="tried again")
    assert states(store)[TIRX_SOLO] == (State.MISSING, None)
    store.record_fault("small", TIRX_SOLO, try_number=3, gave_up=True, message="the sandbox was lost")
    assert states(store)[TIRX_SOLO] == (State.FAILED, "the sandbox was lost")
    save(store, TIRX_SOLO)
    assert states(store)[TIRX_SOLO] == (State.KEPT, None)


def test_a_changed_contract_is_named_as_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(tmp_path, create=True)
    save(store, TIRX_SOLO)
    monkeypatch.setattr(plan_module, "CONTRACT_VERSION", 99)
    assert states(store)[TIRX_SOLO] == (State.STALE, "graded under contract 1, now 99")


def test_a_changed_source_skill_is_named_as_the_reason(tmp_path: Path) -> None:
    store = Store.open(tmp_path, create=True)
    save(store, TIRX_SOLO)
    save(store, FROM_TIRX, attached="What was learned before.")
    assert states(store)[FROM_TIRX] == (State.STALE, "its source skill has changed")


def test_what_frames_an_attachment_is_part_of_a_task(tmp_path: Path) -> None:
    """A changed header above attached notes makes treatments stale, and solo attempts not."""
    store = Store.open(tmp_path, create=True)
    save(store, TIRX_SOLO)
    save(store, FROM_TIRX, attached="What was learned.")
    spec = spec_of(tmp_path, problems=("p28",))

    def with_another_header(planned: PlannedAttempt, settings: AttemptSettings, attached: str | None) -> str:
        return fingerprint(planned, settings, attached and f"Notes: {attached}")

    plan = plan_missing(spec, plan_of(spec), store, with_another_header)
    found = {item.attempt.key: (item.state, item.reason) for item in plan.items}
    assert found[TIRX_SOLO] == (State.KEPT, None)
    assert found[FROM_TIRX] == (State.STALE, "its task or settings have changed")


def test_a_treatment_that_was_skipped_runs_when_its_source_gets_a_skill(tmp_path: Path) -> None:
    store = Store.open(tmp_path, create=True)
    save(store, TIRX_SOLO, skill=None)
    spec = spec_of(tmp_path, problems=("p28",))
    treatment = next(attempt for attempt in plan_of(spec).attempts if attempt.key == FROM_TIRX)
    record = record_of(treatment, spec.attempt, None).model_copy(
        update={"ended": "skipped", "final": None, "kernel": None, "skill": None}
    )
    store.save_attempt("small", treatment, record, task="")
    assert states(store)[FROM_TIRX] == (State.SKIPPED, None)
    save(store, TIRX_SOLO)
    assert states(store)[FROM_TIRX] == (State.STALE, "its source skill has changed")
