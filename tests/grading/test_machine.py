"""Sharing a machine: one grading at a time on a device, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from metakernelbench.grading.exclusive import device_lock
from metakernelbench.grading.folders import new_folder, sweep
from metakernelbench.grading.processes import Drain, ending

HOLD = """
import sys
from metakernelbench.grading.exclusive import device_lock
with device_lock("cpu"):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("own_temporary_folder")
def test_second_grading_waits_for_the_first_and_says_so() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "held\n"
        waited: list[str] = []

        def waiting() -> None:
            waited.append("waiting")
            other.kill()  # a holder that dies lets go

        with device_lock("cpu", waiting):
            assert waited == ["waiting"]
    with device_lock("cpu", lambda: pytest.fail("nobody holds it")):
        pass


def test_folders_of_dead_processes_are_removed(own_temporary_folder: Path) -> None:
    own = new_folder("runtime")
    process = subprocess.Popen(["true"])
    process.wait()
    dead = own_temporary_folder / f"mkb-{process.pid}-scratch-abc"
    stranger = own_temporary_folder / "mkb-notes"
    for folder in (dead, stranger):
        folder.mkdir()
    sweep()
    assert own.exists() and stranger.exists() and not dead.exists()


TAKE = """
import sys
from metakernelbench.grading.slots import is_workers_uid, worker_uid
assert is_workers_uid(worker_uid()) and worker_uid() == worker_uid()
print(worker_uid(), flush=True)
sys.stdin.readline()
"""


@pytest.mark.usefixtures("own_temporary_folder")
def test_verifiers_side_by_side_have_different_users_for_their_workers() -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", TAKE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    taken = {process.stdout.readline() for process in processes if process.stdout}
    for process in processes:
        process.communicate("\n")
    assert len(taken) == 3 and all(process.returncode == 0 for process in processes)
    again = subprocess.run([sys.executable, "-c", TAKE], input="\n", capture_output=True, text=True, check=True)
    assert again.stdout in taken, "what a process took is free when it ended"


def test_drain_keeps_the_end_of_what_was_printed() -> None:
    read, write = os.pipe()
    drain = Drain(read)
    for number in range(3000):
        os.write(write, f"line {number}\n".encode())
    os.close(write)
    assert drain.text(5.0).endswith("line 2999\n")
    assert drain.total > 20_000 and len(drain.text()) <= 4096


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"signal": 9}, "it was ended by SIGKILL"),
        ({"exit": 3}, "it left with exit code 3"),
        ({}, ""),
        ({"signal": "9"}, ""),
        ({"signal": 4000}, ""),
    ],
)
def test_ending_is_told_in_words(status: dict[str, object], words: str) -> None:
    assert ending(status) == words
