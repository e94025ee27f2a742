"""The sandbox for machines without a container engine: no network, nothing of the host writable."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from metakernelbench.attempts.sandbox.available import sandbox_available
from metakernelbench.attempts.sandbox.command import (
    FILTER,
    HOME,
    STAGED,
    WRITABLE,
    environment_inside,
    launch_command,
    slot_uid,
)
from metakernelbench.attempts.sandbox.local import LocalEnvironment, copy_daemon
from metakernelbench.attempts.sandbox.runtime import BASE_REQUIREMENTS, Runtime, runtime_for
from metakernelbench.grading import seccomp

__all__ = ["BubblewrapEnvironment", "sandbox_available"]

_ETC = {
    "passwd": f"agent:x:1000:1000:agent:{HOME}:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "group": "agent:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "profile": ". /task/profile.sh\n",
    "ld.so.conf": "",
}
_MOUNT_POINTS = ("alternatives", "ld.so.cache", "localtime")


class BubblewrapEnvironment(LocalEnvironment):
    """One sandbox. Where root starts it, `slot` gives those that run side by side a user each."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._runtime: Runtime | None = None
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "bubblewrap"

    def _populate(self, state: Path) -> None:
        self._runtime = runtime_for((*BASE_REQUIREMENTS, *required_packages(self.environment_dir)))
        shutil.copytree(self.environment_dir / "task", state / "task")
        _make_readable(state / "task")
        (state / "etc").mkdir(mode=0o755)
        for name, text in _ETC.items():
            (state / "etc" / name).write_text(text)
        for name in _MOUNT_POINTS:
            host = Path("/etc", name)
            if host.is_dir():
                (state / "etc" / name).mkdir()
            elif host.exists():
                (state / "etc" / name).touch()
        _make_readable(state / "etc")
        (state / "pyvenv.cfg").write_text(self._runtime.venv_config())
        (state / "pyvenv.cfg").chmod(0o644)
        copy_daemon(state)
        if (calls := seccomp.program()) is not None:
            (state / FILTER).write_bytes(calls)
        for name in STAGED:
            (state / name).mkdir(mode=0o755)
        uid = slot_uid(self.slot)
        for name in WRITABLE:
            (state / name).mkdir(mode=0o700)
            if uid is not None:
                os.chown(state / name, uid, uid)

    def _launch(self, state: Path, fd: int) -> list[str]:
        assert self._runtime is not None, "the state folder is filled first"
        memory_mb = self.amount.memory_mb
        docs = self.environment_dir / "docs"
        return launch_command(
            state, self._runtime, self.limits,
            docs=docs.resolve() if docs.is_dir() else None, slot=self.slot, memory_mb=memory_mb, fd=fd,
        )  # fmt: skip

    def _inside(self, path: str) -> str:
        return path

    def _environment(self) -> dict[str, str]:
        return environment_inside(self.amount.cpus)


def required_packages(environment_dir: Path) -> tuple[str, ...]:
    """The packages that a task folder asks for, from its requirements.txt."""
    file = environment_dir / "requirements.txt"
    return tuple(line for line in file.read_text().split("\n") if line.strip()) if file.is_file() else ()


def _make_readable(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
