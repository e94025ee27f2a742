"""A disk that fills up, a database that goes away or is held by another: one sentence, and nothing finished is lost."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from metakernelbench.attempts.record import AttemptRecord
from metakernelbench.attempts.sandbox.available import sandbox_available
from metakernelbench.errors import StoreError
from metakernelbench.experiments.run import Outcome, run_experiment
from metakernelbench.experiments.spec import Concurrency, ExperimentSpec
from metakernelbench.store import database
from metakernelbench.store.store import Store
from tests.experiments.runner import PROBLEMS
from tests.experiments.support import Instant, NoJudge, lines, spec_of
from tests.postgresql import Server

ROOT = Path(__file__).parents[2]
ATTEMPTS = 4 * len(PROBLEMS)


def run(store: Store, spec: ExperimentSpec, attempts: Instant) -> Outcome:
    return asyncio.run(
        run_experiment(
            spec,
            store,
            judge=NoJudge(),
            progress=lines(),
            machinery=attempts.machinery(),
            backoff=lambda _: 0.01,
            poll_s=0.02,
        )
    )


class Disturbing(Instant):
    """Calls `disturb` when so many attempts have run."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._after = after
        self.disturb: Callable[[], None] = lambda: None

    async def run(self, planned: Any, **options: Any) -> AttemptRecord:
        record = await super().run(planned, **options)
        if len(self.ran) == self._after:
            self.disturb()
        return record


@pytest.mark.sandbox
@pytest.mark.skipif(sandbox_available() is not None, reason="no bubblewrap")
def test_a_full_disk_ends_the_run_in_a_sentence_and_the_next_run_goes_on() -> None:
    """On a file system of two megabytes, most of which something else takes up at first."""
    script = """
        mkdir /mnt/store && head -c 1500000 /dev/urandom > /mnt/filler
        "$PYTHON" -m tests.experiments.runner /mnt/store /tmp/log 0; echo "first $?"
        sort /tmp/log > /tmp/first; rm /mnt/filler
        "$PYTHON" -m tests.experiments.runner /mnt/store /tmp/log 0; echo "second $?"
        cat /tmp/log
    """
    done = subprocess.run(
        ["bwrap", "--dev-bind", "/", "/", "--size", "2000000", "--tmpfs", "/mnt", "--size", "100000", "--tmpfs", "/tmp",
         "--chdir", str(ROOT), "--setenv", "PYTHON", sys.executable, "sh", "-c", script],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    said, _, keys = done.stdout.partition("second 0\n")
    assert "first 2\n" in said, done.stdout + done.stderr
    assert "No space left on device" in said or "disk is full" in said
    assert "run again" in said or "run the same command again" in said
    assert "Traceback" not in done.stdout + done.stderr
    repeated = [key for key, times in Counter(keys.split()).items() if times > 1]
    assert len(repeated) <= 2, "more was lost than what was in flight"
    assert len(set(keys.split())) > ATTEMPTS / 2


@contextmanager
def run_while(store: Store, spec: ExperimentSpec, attempts: Disturbing) -> Iterator[Future[Outcome]]:
    """Runs in another thread, because a server ends with the thread that started it. Goes on once `attempts` has asked
    for a disturbance, and holds everything up until the caller is done with it."""
    asked, done = threading.Event(), threading.Event()

    def disturb() -> None:
        asked.set()
        assert done.wait(60)

    attempts.disturb = disturb
    running = ThreadPoolExecutor(1).submit(run, store, spec, attempts)
    assert asked.wait(60)
    yield running
    done.set()


def test_a_database_that_goes_away_for_a_while_costs_nothing(postgresql: Server, tmp_path: Path) -> None:
    url = postgresql.new_database()
    spec = spec_of(tmp_path, problems=PROBLEMS, store=url, artifacts=str(tmp_path))
    attempts = Disturbing(after=5)
    with Store.open(url, folder=tmp_path, create=True) as store:
        with run_while(store, spec, attempts) as running:
            postgresql.stop()
        sleep(0.3)
        postgresql.start()
        outcome = running.result()
        assert (outcome.remaining, outcome.failed) == (0, {})
    assert set(Counter(attempts.ran).values()) == {1}


def test_a_database_that_stays_away_ends_the_run_and_the_next_run_repeats_only_what_was_in_flight(
    postgresql: Server, tmp_path: Path
) -> None:
    url = postgresql.new_database()
    two = Concurrency(sandboxes=2)
    spec = spec_of(tmp_path, problems=PROBLEMS, store=url, artifacts=str(tmp_path), concurrency=two)
    first, second = Disturbing(after=7), Instant()
    with Store.open(url, folder=tmp_path, create=True) as store:
        store._database.gone_s = 0.2
        with run_while(store, spec, first) as running:
            postgresql.stop()
        error = running.exception()
    postgresql.start()
    assert isinstance(error, StoreError)
    assert "cannot be reached" in error.message
    assert "run the same command again" in str(error.hint)
    with Store.open(url, folder=tmp_path) as store:
        kept = set(store.standings("small"))
        assert run(store, spec, second).remaining == 0
    assert not kept & set(second.ran)
    assert len(set(first.ran) - kept) <= 2


def test_a_store_that_another_program_holds_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_BUSY_S", 0.1)
    spec = spec_of(tmp_path)
    with Store.open(tmp_path, create=True) as store:
        run(store, spec, Instant())
    other = sqlite3.connect(tmp_path / "store.sqlite", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    try:
        with Store.open(tmp_path) as store, pytest.raises(StoreError) as caught:
            run(store, spec_of(tmp_path, problems=PROBLEMS), Instant())
    finally:
        other.close()
    assert caught.value.message == f"the store {tmp_path}/store.sqlite cannot be used: database is locked"
    assert caught.value.hint == "another program holds it: let that end, then run the same command again"


def test_a_store_that_goes_wrong_lets_running_attempts_end(tmp_path: Path) -> None:
    """The folder of the work vanishes under a run of two at once: the other attempt is kept before the run ends."""

    class Vanishing(Instant):
        begun = 0

        async def run(self, planned: Any, **options: Any) -> AttemptRecord:
            self.begun += 1
            while self.begun < 2:
                await asyncio.sleep(0.001)
            if planned.dsl == "tirx":
                work = options["folder"].parent
                shutil.rmtree(work)
                work.write_text("in the way of every later attempt's folder")
            else:
                await asyncio.sleep(0.3)
            return await super().run(planned, **{**options, "folder": tmp_path})

    spec = spec_of(tmp_path, problems=PROBLEMS, concurrency=Concurrency(sandboxes=2))
    with Store.open(tmp_path, create=True) as store:
        with pytest.raises(StoreError, match=r"cannot write to .*: (Not a directory|File exists)"):
            run(store, spec, Vanishing())
        assert len(store.standings("small")) == 2
        assert store.leases.held("small") == {}
