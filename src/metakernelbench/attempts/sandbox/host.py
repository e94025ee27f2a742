"""An environment without isolation, for prepared turns on a machine where no sandbox can be had. Never for a model.

Commands run as the user who runs this program, with the machine's own files and network. The paths of the sandbox
(/app, /task, /mailbox, /logs) are folders below a state folder; commands find them through `MKB_ROOT` and their working
folder.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from harbor.environments.base import ExecResult

from metakernelbench.attempts.sandbox.command import WRITABLE
from metakernelbench.attempts.sandbox.local import LocalEnvironment, copy_daemon


class HostEnvironment(LocalEnvironment):
    """The same interface as the sandbox, without its walls."""

    @staticmethod
    def type() -> str:
        return "host"

    def _populate(self, state: Path) -> None:
        state.chmod(0o700)
        self.limits.release()
        self.limits = type(self.limits)(groups=(), prefix=(), in_force={"isolation": "none"})
        shutil.copytree(self.environment_dir / "task", state / "task")
        if (self.environment_dir / "docs").is_dir():
            (state / "docs").symlink_to((self.environment_dir / "docs").resolve())
        for name in (*WRITABLE, "tmp"):
            (state / name).mkdir()
        (state / "home" / ".bash_profile").write_text('. "$MKB_ROOT/task/profile.sh"\n')
        copy_daemon(state)

    def _launch(self, state: Path, fd: int) -> list[str]:
        at_the_end = ["env", f"TMUX_TMPDIR={self._inside('/tmp')}", "tmux", "kill-server"]
        return [sys.executable, "-I", "-S", str(state / "daemon.py"), str(fd), *at_the_end]

    def _inside(self, path: str) -> str:
        assert self._state is not None, "the environment is started first"
        return str(self._state / path.lstrip("/"))

    def _environment(self) -> dict[str, str]:
        python = str(Path(sys.executable).parent)
        return {
            "PATH": f"{self._inside('/task/bin')}:{python}:{os.environ.get('PATH', os.defpath)}",
            "MKB_PYTHON": python,  # a login shell starts its PATH anew
            "HOME": self._inside("/home"),
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
            "TERM": "xterm-256color",
            "TMUX_TMPDIR": self._inside("/tmp"),
            "OMP_NUM_THREADS": str(self.amount.cpus),
            "PYTHONPATH": self._inside("/task"),
            "MKB_ROOT": self._inside("").rstrip("/"),
        }

    async def exec(self, command: str, *args: object, **kwargs: object) -> ExecResult:
        """Harbor names its own folder, /logs, inside command lines."""
        return await super().exec(command.replace("/logs/", f"{self._inside('/logs')}/"), *args, **kwargs)  # type: ignore[arg-type]

    async def quiesce(self) -> None:
        await super().exec("tmux kill-server", timeout_sec=5)
        await super().quiesce()
