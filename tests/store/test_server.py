"""A database server that goes away is waited for; what was finished is kept."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from sqlalchemy import event

from metakernelbench.errors import StoreError
from metakernelbench.experiments.designs import PlannedAttempt
from metakernelbench.store.store import Store
from tests.experiments.support import record_of, spec_of
from tests.postgresql import Server

SOLO = PlannedAttempt(problem="p28", dsl="tirx", model="vendor/model")
RECORD = record_of(SOLO, spec_of(Path()).attempt, None)


def test_a_server_that_goes_away_is_waited_for_and_nothing_is_lost(postgresql: Server, tmp_path: Path) -> None:
    store = Store.open(postgresql.new_database(), folder=tmp_path, create=True)
    told: list[str] = []
    store.tell(told.append)
    with store, store.leases.owner() as owner:
        assert store.leases.claim("small", SOLO.key, owner)
        postgresql.stop()
        saving = threading.Thread(
            target=store.save_attempt, args=("small", SOLO, RECORD), kwargs={"owner": owner}, daemon=True
        )
        saving.start()
        saving.join(0.5)
        assert saving.is_alive()
        postgresql.start()
        saving.join(30)
        assert not saving.is_alive()
        assert store.attempt("small", SOLO.key) == RECORD
        assert store.leases.held("small") == {}
    assert len(told) == 1 and "has gone away; waiting for it" in told[0]


def test_an_operation_that_the_server_broke_off_is_done_again(postgresql: Server, tmp_path: Path) -> None:
    url = postgresql.new_database()
    with Store.open(url, folder=tmp_path, create=True) as store, store.leases.owner() as owner:
        broken: list[str] = []

        @event.listens_for(store._database.engine, "before_cursor_execute")
        def _(*about: object) -> None:
            statement = str(about[2])
            if statement.startswith("INSERT INTO attempts") and not broken:
                broken.append(statement)
                postgresql.query(
                    url, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
                )

        assert store.leases.claim("small", SOLO.key, owner)
        store.save_attempt("small", SOLO, RECORD, owner=owner)
        assert broken and store.attempt("small", SOLO.key) == RECORD


def test_a_server_that_stays_away_is_one_sentence(postgresql: Server, tmp_path: Path) -> None:
    url = postgresql.new_database()
    with Store.open(url, folder=tmp_path, create=True) as store:
        store._database.gone_s = 0.3
        postgresql.stop()
        try:
            with pytest.raises(StoreError, match="cannot be reached") as caught:
                store.record_fault("small", SOLO.key, try_number=1, gave_up=True, message="")
            with pytest.raises(StoreError, match="cannot be reached"):
                Store.open(url, folder=tmp_path)
        finally:
            postgresql.start()
        assert "what was finished is kept" in (caught.value.hint or "") and "\n" not in caught.value.message


def test_closing_a_store_ends_the_waiting(postgresql: Server, tmp_path: Path) -> None:
    store = Store.open(postgresql.new_database(), folder=tmp_path, create=True)
    postgresql.stop()
    try:
        errors: list[StoreError] = []

        def use() -> None:
            try:
                store.faults("small")
            except StoreError as error:
                errors.append(error)

        waiting = threading.Thread(target=use, daemon=True)
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        store.close()
        waiting.join(30)
        assert errors and "has gone away" in errors[0].message
    finally:
        postgresql.start()
