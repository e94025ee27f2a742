import os
import subprocess
from pathlib import Path

import pytest

from metakernelbench.attempts.sandbox.limits import Amount, prepare
from metakernelbench.grading import groups

AMOUNT = Amount(cpus=1, memory_mb=300)


@pytest.fixture(autouse=True)
def at_the_root_of_every_hierarchy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "own_groups", dict)


def test_one_group_of_the_unified_hierarchy_holds_everything(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    limits = prepare(AMOUNT, cgroup_root=tmp_path)
    (group,) = limits.groups
    written = {file: (group / file).read_text() for file in ("memory.max", "memory.swap.max", "cpu.max")}
    assert written == {"memory.max": str(300 << 20), "memory.swap.max": "0", "cpu.max": "100000 100000"}
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory +cpu +pids"
    assert limits.in_force["memory"] == "300 MB in all (cgroup v2)"
    assert "prlimit" in limits.prefix
    assert not any(part.startswith("--data") for part in limits.prefix)


def test_separate_hierarchies_get_a_group_each(tmp_path: Path) -> None:
    for name in ("memory", "cpu", "pids"):
        (tmp_path / name).mkdir()
    limits = prepare(AMOUNT, cgroup_root=tmp_path)
    assert {group.parent.name for group in limits.groups} == {"memory", "cpu", "pids"}
    assert limits.in_force["cpu"] == "1 core (cgroup v1)"


def test_a_hierarchy_without_memory_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("hugetlb\n")
    limits = prepare(AMOUNT, cgroup_root=tmp_path)
    assert limits.groups == ()
    assert limits.in_force["memory"] == "300 MB a process (prlimit)"


def test_without_groups_a_process_is_still_limited(tmp_path: Path) -> None:
    limits = prepare(AMOUNT, cgroup_root=tmp_path)
    source = "import os; print(len(os.sched_getaffinity(0))); bytearray(400 << 20)"
    done = subprocess.run([*limits.prefix, "python3", "-c", source], capture_output=True, text=True, check=False)
    assert done.stdout == "1\n"
    assert "MemoryError" in done.stderr


def test_releasing_removes_the_groups_and_ends_what_is_in_them() -> None:
    limits = prepare(AMOUNT)
    if not limits.groups:
        pytest.skip("this process may not make control groups")
    process = subprocess.Popen(["sleep", "60"])
    for group in limits.groups:
        (group / "cgroup.procs").write_text(str(process.pid))
    limits.release()
    assert process.wait(timeout=5) == -9
    assert [group for group in limits.groups if group.exists()] == []


def test_groups_of_runs_that_are_no_more_are_swept_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "own_groups", lambda: {"": "/"})
    dead, alive = tmp_path / "mkb-4194305-x", tmp_path / f"mkb-{os.getpid()}-x"
    dead.mkdir()
    alive.mkdir()
    groups.sweep(tmp_path)
    assert (dead.exists(), alive.exists()) == (False, True)
