"""A run that is killed at any point, or shares its store with another, loses and repeats nothing that was finished."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from metakernelbench.store.store import Store
from tests.experiments.runner import PROBLEMS
from tests.experiments.support import outcome_of

ROOT = Path(__file__).parents[2]
ATTEMPTS = 4 * len(PROBLEMS)


def start(folder: Path, log: Path, seconds: float = 0.0) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.experiments.runner", str(folder), str(log), str(seconds)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    return process


def keys_in(log: Path) -> list[str]:
    return log.read_text().split() if log.exists() else []


def wait_for_lines(process: subprocess.Popen[str], log: Path, number: int) -> None:
    while len(keys_in(log)) < number:
        assert process.poll() is None, "the run has ended before it could be disturbed"
        time.sleep(0.002)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run leaves that nobody kills."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert start(folder, folder / "log").wait() == 0
    with Store.open(folder) as store:
        return outcome_of(store, "small")


@pytest.mark.parametrize("finished_before", [0, 1, 7, 12, 17])
def test_after_a_kill_a_second_run_gives_the_same_and_repeats_no_finished_attempt(
    tmp_path: Path, undisturbed: dict[str, Any], finished_before: int
) -> None:
    log = tmp_path / "log"
    process = start(tmp_path, log)
    wait_for_lines(process, log, finished_before)
    time.sleep(random.uniform(0, 0.02))
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept: set[str] = set()
    if (tmp_path / "store.sqlite").exists():
        with Store.open(tmp_path, create=True) as store:
            kept = set(store.standings("small"))
    log.rename(tmp_path / "first log") if log.exists() else None
    begun = time.monotonic()
    assert start(tmp_path, log).wait() == 0
    assert time.monotonic() - begun < 30, "the dead runner's leases were waited for"
    assert not kept & set(keys_in(log)), "a finished attempt was repeated"
    assert len(keys_in(tmp_path / "first log")) - len(kept) <= 2, "more was lost than what was in flight"
    with Store.open(tmp_path) as store:
        assert outcome_of(store, "small") == undisturbed


def test_two_processes_on_one_store_never_do_the_same_attempt(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    log = tmp_path / "log"
    processes = [start(tmp_path, log, 0.02) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert set(Counter(keys_in(log)).values()) == {1}
    with Store.open(tmp_path) as store:
        assert outcome_of(store, "small") == undisturbed
        assert store.leases.held("small") == {}


def test_one_of_two_runners_is_killed_and_the_other_finishes_its_attempts(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    doomed = start(tmp_path, tmp_path / "log of the doomed", 0.6)
    wait_for_lines(doomed, tmp_path / "log of the doomed", 2)
    other = start(tmp_path, tmp_path / "log", 0.02)
    wait_for_lines(other, tmp_path / "log", 2)
    doomed.kill()
    doomed.wait()
    assert other.wait() == 0
    with Store.open(tmp_path) as store:
        assert outcome_of(store, "small") == undisturbed


def test_ctrl_c_once_lets_running_attempts_end_and_a_second_run_does_the_rest(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    log = tmp_path / "log"
    process = start(tmp_path, log, 0.2)
    wait_for_lines(process, log, 2)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    with Store.open(tmp_path) as store:
        assert sorted(store.standings("small").keys() & set(keys_in(log))) == sorted(keys_in(log))
        assert store.leases.held("small") == {}
    assert len(keys_in(log)) < ATTEMPTS / 2
    before = keys_in(log)
    assert start(tmp_path, log).wait() == 0
    assert set(Counter(keys_in(log)).values()) == {1} and keys_in(log)[: len(before)] == before
    with Store.open(tmp_path) as store:
        assert outcome_of(store, "small") == undisturbed


def test_ctrl_c_twice_leaves_at_once(tmp_path: Path) -> None:
    process = start(tmp_path, tmp_path / "log", 600)
    assert process.stdout is not None
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "interrupted 1\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    process.send_signal(signal.SIGINT)
    assert process.wait(5) == 130
    with Store.open(tmp_path) as store:
        assert store.standings("small") == {} and store.leases.held("small") == {}
    assert list((tmp_path / "runners").iterdir()) == []
