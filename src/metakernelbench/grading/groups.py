"""A control group for all processes of one grading's sandbox: what they may hold together, and whether memory ran out.

Made where this process may (root on its own machine, or a group that was delegated to it), in the one hierarchy of
version 2 or in the separate ones of version 1. Elsewhere there is none, and the verdict says so.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_MEMORY = {"memory.max", "memory.limit_in_bytes"}
_COUNTERS = ("memory.events", "memory.oom_control")


@dataclass(frozen=True)
class Group:
    """A group that is ready to be entered: one folder a hierarchy."""

    folders: tuple[Path, ...]

    @property
    def entrances(self) -> list[str]:
        """Files to which a process writes 0 to enter with all that it starts from then on."""
        return [str(folder / "cgroup.procs") for folder in self.folders]

    def take(self, pids: list[int]) -> None:
        """Move processes here; what they start from then on is here as well."""
        for folder in self.folders:
            for pid in pids:
                with contextlib.suppress(OSError):  # it ended meanwhile
                    (folder / "cgroup.procs").write_text(str(pid))

    def ran_out_of_memory(self) -> bool:
        """Whether a process in it was ended for want of memory."""
        for file in (folder / name for folder in self.folders for name in _COUNTERS):
            with contextlib.suppress(OSError):
                words = file.read_text().split()
                if "oom_kill" in words and int(words[words.index("oom_kill") + 1]) > 0:
                    return True
        return False

    def remove(self) -> None:
        """End what is left in it, and remove it."""
        for folder in self.folders:
            remove(folder)


def make(memory_bytes: int, processes: int, root: Path = _ROOT) -> Group | None:
    """A new group whose processes together are held to so much; None where memory cannot be limited here."""
    name = f"mkb-{os.getpid()}-{secrets.token_hex(4)}"
    one = {
        "memory.max": str(memory_bytes),
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "pids.max": str(processes),
    }
    several = {
        "memory": {"memory.limit_in_bytes": str(memory_bytes), "memory.memsw.limit_in_bytes": str(memory_bytes)},
        "pids": {"pids.max": str(processes)},
    }
    own = own_groups()
    wanted = {root / kind / own[kind].lstrip("/") / name: told for kind, told in several.items() if kind in own}
    if _has_memory(unified := root / own.get("", "").lstrip("/")):
        wanted = {unified / name: one}
    made = {folder: done for folder, settings in wanted.items() if (done := _make(folder, settings))}
    if any(done & _MEMORY for done in made.values()):
        return Group(tuple(made))
    Group(tuple(made)).remove()
    return None


def sweep(root: Path = _ROOT) -> None:
    """Remove the groups of processes that no longer run."""
    for kind, path in own_groups().items():
        for folder in (root / kind / path.lstrip("/")).glob("mkb-*-*"):
            maker = folder.name.split("-")[1]
            if maker.isdigit() and not Path("/proc", maker).exists():
                remove(folder)


def _has_memory(unified: Path) -> bool:
    """Whether a folder is a group of the one hierarchy whose children can be held to an amount of memory."""
    try:
        if "memory" not in (unified / "cgroup.controllers").read_text().split():
            return False
        with contextlib.suppress(OSError):  # refused where processes are in it: then its children have no limits
            (unified / "cgroup.subtree_control").write_text("+memory +pids")
        return "memory" in (unified / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False


def own_groups() -> dict[str, str]:
    """Hierarchy → this process's group in it; that of version 2 has the empty name."""
    own: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            own |= dict.fromkeys(kinds.split(","), path)
    return own


def _make(folder: Path, settings: Mapping[str, str]) -> set[str]:
    """Make a group with these settings, and say which of them it took: none where it cannot be made."""
    done = set[str]()
    with contextlib.suppress(OSError):
        folder.mkdir()
        for file, value in settings.items():
            with contextlib.suppress(OSError):
                (folder / file).write_text(value)
                done.add(file)
        if not done:
            folder.rmdir()
    return done


def remove(folder: Path) -> None:
    """End what is left in a group, and remove it."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            for pid in map(int, (folder / "cgroup.procs").read_text().split()):
                with contextlib.suppress(OSError):
                    if pid > 1:  # 0 stands for one of another namespace, and would mean this process's own group
                        os.kill(pid, signal.SIGKILL)
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:  # still being left
            time.sleep(0.02)
