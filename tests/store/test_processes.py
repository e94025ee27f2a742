"""Several processes on one store, which not even exists when they start."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import IO, Any

from sqlalchemy import Connection

from metakernelbench.experiments.designs import Plan
from metakernelbench.store.leases import LEASE_S, Leases
from metakernelbench.store.store import Store
from tests.experiments.support import spec_of
from tests.postgresql import Server
from tests.store.conftest import Place

KEYS = [f"p{number:02}" for number in range(40)]


def started(place: Place) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.store.claimer", place.url or str(place.folder), str(place.folder), *KEYS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_processes_that_make_a_store_together_lend_every_attempt_once(place: Place) -> None:
    processes = [started(place) for _ in range(3)]
    try:
        for process in processes:
            tell(process.stdin)
        answers: list[dict[str, Any]] = [json.loads(process.stdout.readline()) for process in processes]  # type: ignore[union-attr]
        assert Counter(key for answer in answers for key in answer["claimed"]) == Counter(KEYS)

        store = place.open()
        owner_of = {key: answer["owner"] for answer in answers for key in answer["claimed"]}
        assert store.leases.held("shared") == owner_of
        busiest = max(range(3), key=lambda number: len(answers[number]["claimed"]))
        processes[busiest].kill()
        processes[busiest].wait()
        lost = answers[busiest]["claimed"]
        assert set(store.leases.held("shared")) == set(KEYS) - set(lost)
        with store.leases.owner() as heir:
            assert [key for key in KEYS if store.leases.claim("shared", key, heir)] == lost
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def tell(stdin: IO[str] | None) -> None:
    assert stdin is not None
    stdin.write("go\n")
    stdin.flush()


def test_an_attempt_that_is_claimed_while_another_runner_looks_at_it_stays_with_the_first(
    postgresql: Server, tmp_path: Path
) -> None:
    """Between looking at a lease that has run out and taking it, a server lets others in; SQLite does not."""
    store, now = Store.open(postgresql.new_database(), folder=tmp_path, create=True), [1000.0]

    class Slow(Leases):
        def _holder(self, connection: Connection, experiment: str, key: str) -> str | None:
            holder = super()._holder(connection, experiment, key)
            assert quick.claim("small", "p28", one)
            return holder

    def leases(kind: type[Leases]) -> Leases:
        return kind(store._database, tmp_path / "runners", clock=lambda: now[0])

    quick, slow = leases(Leases), leases(Slow)
    with quick.owner() as one, quick.owner() as other, quick.owner() as old:
        assert quick.claim("small", "p28", old)
        now[0] += LEASE_S + 1
        assert not slow.claim("small", "p28", other)
        assert quick.held("small") == {"p28": one.name}


def test_an_experiment_that_two_runners_record_at_once_is_recorded(place: Place, store: Store) -> None:
    spec, plan = spec_of(place.folder), Plan(attempts=(), comparisons=())
    other = place.open()
    for _ in range(2):
        for each in (store, other):
            each.save_experiment(spec, plan)
    assert store.experiments() == ["small"]
