"""Hostile submissions leave nothing behind, and the next honest one passes: `benchmarks/survival.py` in short."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from pathlib import Path

import pytest
from benchmarks.hostile import HOSTILE, Hostile

from metakernelbench.grading import groups
from metakernelbench.grading.slots import is_workers_uid
from tests.grading.support import HONEST, QUICK, Grader

CHOSEN = (
    "aborts",
    "leaves at import",
    "stops itself",
    "takes memory in children",
    "forks and leaves",
    "leaves a daemon that prints",
    "stopped children",
    "many files",
    "deep folders",
    "shared memory of System V",
    "closes everything",
    "prints a gigabyte",
)


@pytest.mark.timeout(400)
def test_nothing_is_left_and_the_next_honest_one_passes(grade: Grader) -> None:
    assert grade(HONEST).passed
    before, wrong = left_by(grade), []
    for hostile in chosen():
        verdict = grade(hostile.source, final=True, contract=dataclasses.replace(QUICK, time_limit_s=3))
        codes = {finding.code for finding in verdict.findings}
        if not codes & set(hostile.codes) or (left := beyond(before, grade)):
            wrong.append((hostile.name, verdict.findings, left if codes & set(hostile.codes) else None))
    assert not wrong
    assert grade(HONEST).passed


def chosen() -> list[Hostile]:
    by_name = {hostile.name: hostile for hostile in HOSTILE}
    return [by_name[name] for name in CHOSEN]


def beyond(before: set[str], grade: Grader) -> set[str]:
    """What is there and was not, once it had a few moments to go."""
    for _ in range(40):
        if not (left := left_by(grade) - before):
            return left
        time.sleep(0.1)
    return left


def left_by(grade: Grader) -> set[str]:
    """Processes, folders, control groups, shared memory and descriptors of this test's verifier."""
    assert grade.process._process is not None
    verifier = grade.process._process.pid
    processes = {f"process {pid}" for pid in below(verifier) if is_workers_uid(uid_of(pid))}
    folders = {str(path) for path in Path("/tmp").glob(f"mkb-{verifier}-*")}
    held = {str(path) for kind, path in groups.own_groups().items() for path in group_folders(kind, path, verifier)}
    names = [str(path.readlink()) for path in Path(f"/proc/{verifier}/fd").iterdir() if path.is_symlink()]
    kinds = Counter(name.partition(":")[0] for name in names if "memfd" not in name)
    descriptors = {f"descriptor {n} ({kind})" for kind, number in kinds.items() for n in range(number)}
    return processes | folders | held | descriptors


def group_folders(kind: str, path: str, verifier: int) -> list[Path]:
    return list(Path("/sys/fs/cgroup", kind, path.lstrip("/")).glob(f"mkb-{verifier}-*"))


def below(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and parent(int(folder.name)) == pid:
                found += [int(folder.name), *below(int(folder.name))]
        except (OSError, IndexError):
            continue
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])


def uid_of(pid: int) -> int:
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return -1
