"""Processor and memory limits for a sandbox: control groups where this process may make them, else per-process limits.

Nothing here fails for want of a limit: what is in force is recorded with the attempt.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from metakernelbench.grading import groups

_MAX_PROCESSES = 1024
_MAX_FILE_BYTES = 4 * 2**30
_PERIOD_US = 100_000


@dataclass(frozen=True, kw_only=True)
class Amount:
    """How much a sandbox may use."""

    cpus: int
    memory_mb: int


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits that are ready to be entered."""

    groups: tuple[Path, ...]
    """Control groups; a process enters one by writing its id to `cgroup.procs`."""
    prefix: tuple[str, ...]
    """Command that sets per-process limits and runs the rest of its arguments."""
    in_force: dict[str, str]
    """Resource → by what means, for the record."""

    def release(self) -> None:
        """Kill what is left in the groups and remove them."""
        for group in self.groups:
            groups.remove(group)


def prepare(amount: Amount, *, cgroup_root: Path = Path("/sys/fs/cgroup")) -> Limits:
    """Make limits of `amount`, by the strongest means that this host allows."""
    name = f"mkb-{os.getpid()}-{secrets.token_hex(4)}"
    made, by_group = _version_2(amount, name, cgroup_root) or _version_1(amount, name, cgroup_root)
    prefix = ["prlimit", f"--fsize={_MAX_FILE_BYTES}", "--core=0"]
    in_force = {"file size": f"{_MAX_FILE_BYTES >> 30} GB a file"}
    if "memory" not in by_group:
        prefix.append(f"--data={amount.memory_mb << 20}")
        in_force["memory"] = f"{amount.memory_mb} MB a process (prlimit)"
    prefix.append("--")
    if "cpu" not in by_group:
        available = sorted(os.sched_getaffinity(0))
        prefix += ["taskset", "--cpu-list", ",".join(map(str, available[: amount.cpus]))]
        in_force["cpu"] = f"{_cores(min(amount.cpus, len(available)))} (affinity, which the agent could undo)"
    return Limits(groups=made, prefix=tuple(prefix), in_force={**in_force, **by_group})


type _Made = tuple[tuple[Path, ...], dict[str, str]]


def _version_2(amount: Amount, name: str, root: Path) -> _Made | None:
    """One group of the unified hierarchy, below this process's own; None where that hierarchy does not do memory."""
    parent = root / groups.own_groups().get("", "").lstrip("/")
    with contextlib.suppress(OSError):
        controllers = (parent / "cgroup.controllers").read_text().split()
        if "memory" not in controllers:
            return None
        wanted = [name for name in ("memory", "cpu", "pids") if name in controllers]
        with contextlib.suppress(OSError):  # refused where this process's group is not the root and not delegated
            (parent / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in wanted))
        group = parent / name
        group.mkdir()
        settings = {
            "memory.max": f"{amount.memory_mb << 20}",
            "memory.swap.max": "0",
            "cpu.max": f"{amount.cpus * _PERIOD_US} {_PERIOD_US}",
            "pids.max": f"{_MAX_PROCESSES}",
        }
        return (group,), _in_force(_set(group, settings), amount, "cgroup v2")
    return None


def _version_1(amount: Amount, name: str, root: Path) -> _Made:
    """A group in each of the separate hierarchies that can be written to."""
    per_controller = {
        "memory": {"memory.limit_in_bytes": f"{amount.memory_mb << 20}"},
        "cpu": {"cpu.cfs_period_us": f"{_PERIOD_US}", "cpu.cfs_quota_us": f"{amount.cpus * _PERIOD_US}"},
        "pids": {"pids.max": f"{_MAX_PROCESSES}"},
    }
    made: list[Path] = []
    done: set[str] = set()
    for controller, settings in per_controller.items():
        group = root / controller / groups.own_groups().get(controller, "").lstrip("/") / name
        with contextlib.suppress(OSError):
            group.mkdir()
            made.append(group)
            done |= _set(group, settings)
    return tuple(made), _in_force(done, amount, "cgroup v1")


def _set(group: Path, settings: Mapping[str, str]) -> set[str]:
    """Write what can be written and say what that was."""
    done = set()
    for file, value in settings.items():
        with contextlib.suppress(OSError):
            (group / file).write_text(value)
            done.add(file)
    return done


def _in_force(done: set[str], amount: Amount, by: str) -> dict[str, str]:
    in_force = {}
    if done & {"memory.max", "memory.limit_in_bytes"}:
        in_force["memory"] = f"{amount.memory_mb} MB in all ({by})"
    if done & {"cpu.max", "cpu.cfs_quota_us"}:
        in_force["cpu"] = f"{_cores(amount.cpus)} ({by})"
    if "pids.max" in done:
        in_force["processes"] = f"{_MAX_PROCESSES} ({by})"
    return in_force


def _cores(number: int) -> str:
    return "1 core" if number == 1 else f"{number} cores"
