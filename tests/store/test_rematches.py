"""A store keeps what was measured head to head, for the kernels that it was measured for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from metakernelbench.errors import InfrastructureFault, StoreError
from metakernelbench.experiments.designs import PlannedAttempt
from metakernelbench.store.artifacts import digest_of
from metakernelbench.store.rematches import Rematch, lease_key
from metakernelbench.store.store import Store
from tests.experiments.support import record_of, spec_of
from tests.store.conftest import Place

BASELINE = PlannedAttempt(problem="p28", dsl="cute", model="vendor/model")
TREATMENT = PlannedAttempt(
    problem="p28", dsl="cute", model="vendor/model", arm="conditioned", source="p28/tirx/vendor/model/0/solo"
)
SETTINGS = spec_of(Path()).attempt
RECORDS = [record_of(BASELINE, SETTINGS, None), record_of(TREATMENT, SETTINGS, "a skill")]


def rematch(**changes: Any) -> Rematch:
    values: dict[str, Any] = {
        "baseline": BASELINE.key,
        "treatment": TREATMENT.key,
        "ratio": 1.25,
        "low": 1.2,
        "high": 1.3,
        "baseline_sha256": digest_of(RECORDS[0].kernel or ""),
        "treatment_sha256": digest_of(RECORDS[1].kernel or ""),
        "workload": "smoke",
        "device": "cpu",
        "judge": "local",
        "contract_version": 1,
        "versions": {"torch": "2.13.0"},
        "measurement": {"baseline_ms": [1.25, 1.5]},
        "measured_at": "2026-01-01T00:00:00+00:00",
    }
    return Rematch(**(values | changes))


def test_a_rematch_is_read_back_equal_and_found_by_its_comparison(store: Store) -> None:
    other = rematch(treatment="another", ratio=None, low=None, high=None, reason="the treatment no longer passes")
    store.rematches.save("small", rematch())
    store.rematches.save("small", other)
    store.rematches.save("another experiment", rematch(ratio=3.0))
    assert store.rematches.of("small") == {(r.baseline, r.treatment): r for r in (rematch(), other)}


def test_a_repeated_rematch_replaces_the_first_which_stays_in_the_database(place: Place, store: Store) -> None:
    store.rematches.save("small", rematch(ratio=1.1))
    store.rematches.save("small", rematch(ratio=1.2))
    assert [r.ratio for r in store.rematches.of("small").values()] == [1.2]
    assert place.execute("SELECT ratio FROM rematches ORDER BY id") == [(1.1,), (1.2,)]


def test_a_rematch_fits_only_the_kernels_that_were_timed() -> None:
    assert rematch().fits(*RECORDS)
    assert not rematch().fits(RECORDS[0], RECORDS[1].model_copy(update={"kernel": "def solve(): ..."}))
    assert not rematch().fits(RECORDS[0].model_copy(update={"kernel": None}), RECORDS[1])


def test_a_ratio_and_a_reason_for_having_none_exclude_each_other() -> None:
    for changes in ({"reason": "slow"}, {"ratio": None}):
        with pytest.raises(ValueError, match="with the reason"):
            rematch(**changes)


def test_an_unreadable_rematch_is_named(place: Place, store: Store) -> None:
    store.rematches.save("small", rematch())
    for damage in ("versions = '{'", "versions = '{}', reason = 'slow'"):
        place.execute(f"UPDATE rematches SET {damage}")
        with pytest.raises(StoreError, match=f"the rematch of {TREATMENT.key} in .* cannot be read: "):
            store.rematches.of("small")


def test_saving_a_rematch_needs_and_returns_the_lease(store: Store) -> None:
    key = lease_key(BASELINE.key, TREATMENT.key)
    with store.leases.owner() as owner:
        with pytest.raises(InfrastructureFault, match="another runner has taken over the rematch"):
            store.rematches.save("small", rematch(), owner=owner)
        assert store.rematches.of("small") == {}
        assert store.leases.claim("small", key, owner)
        store.rematches.save("small", rematch(), owner=owner)
        assert store.leases.held("small") == {}
