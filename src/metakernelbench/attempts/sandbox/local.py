"""What our environments share: a state folder on this machine, a daemon that runs commands, files in and out.

The state folder belongs to one sandbox and goes with it. Files travel through the daemon, as archives, so that a link
the agent has planted is followed inside the sandbox, where it leads nowhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shutil
import socket
import tarfile
import tempfile
from abc import abstractmethod
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities

from metakernelbench.attempts.sandbox import daemon
from metakernelbench.attempts.sandbox.channel import Channel, CommandTimeout, SandboxLost
from metakernelbench.attempts.sandbox.limits import Amount, Limits, prepare
from metakernelbench.errors import InfrastructureFault
from metakernelbench.grading import groups

_START_S = 30
_STOP_S = 10
_TRANSFER_S = 60
_MAX_DOWNLOAD = 16 * 2**20 - 1


class LocalEnvironment(BaseEnvironment):  # type: ignore[misc]  # Harbor is not typed for us
    """A Harbor environment on this machine."""

    def __init__(self, *args: Any, slot: int = 0, **kwargs: Any) -> None:
        self.slot = slot
        self.limits = Limits(groups=(), prefix=(), in_force={})
        self._state: Path | None = None
        self._channel: Channel | None = None
        self._process: asyncio.subprocess.Process | None = None
        super().__init__(*args, **kwargs)

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True, mounted=False)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True)

    @classmethod
    def preflight(cls, kwargs: dict[str, Any] | None = None) -> None:
        """Newer Harbor versions pass `kwargs`; there is nothing to check before a sandbox is wanted."""

    def _validate_definition(self) -> None:
        if not (self.environment_dir / "task").is_dir():
            raise FileNotFoundError(f"{self.environment_dir} has no folder `task`: not a task of this benchmark")

    @abstractmethod
    def _populate(self, state: Path) -> None:
        """Fill the state folder."""

    @abstractmethod
    def _launch(self, state: Path, fd: int) -> list[str]:
        """The command line that starts the daemon on socket `fd`."""

    @abstractmethod
    def _inside(self, path: str) -> str:
        """Where a path of the sandbox is for the commands that run in it."""

    @abstractmethod
    def _environment(self) -> dict[str, str]:
        """The environment variables that every command starts with."""

    @property
    def amount(self) -> Amount:
        """What the task grants."""
        return Amount(cpus=int(self._effective_cpus or 1), memory_mb=int(self._effective_memory_mb or 8192))

    async def start(self, force_build: bool) -> None:  # nothing to build
        state = await asyncio.to_thread(self._make_state)
        ours, theirs = socket.socketpair()
        with theirs, (state / "launch.log").open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._launch(state, theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._channel = Channel(*await asyncio.open_connection(sock=ours))
        try:
            folders = " ".join(f"/logs/{name}" for name in ("agent", "verifier", "artifacts"))
            made = await self.exec(f"mkdir -p {folders}", timeout_sec=_START_S)
        except SandboxLost:
            said = (state / "launch.log").read_text(errors="replace").strip()[-500:]
            await self.stop(delete=True)
            raise InfrastructureFault(f"the sandbox did not start: {said or 'it said nothing'}") from None
        if made.return_code != 0:
            raise InfrastructureFault(f"the sandbox did not start: {made.stderr}")

    def _make_state(self) -> Path:
        groups.sweep()
        sweep_states()
        self._state = state = Path(tempfile.mkdtemp(prefix=f"mkb-{os.getpid()}-", dir=state_base()))
        state.chmod(0o711)
        self.limits = prepare(self.amount)
        self._populate(state)
        return state

    async def stop(self, delete: bool) -> None:  # a state folder is never of use again
        if self._channel is not None:
            try:
                await self.quiesce()
            except SandboxLost:  # it may hang, and with it the process that waits for it
                self._kill()
            self._channel.close()
        if self._process is not None and self._process.returncode is None:
            try:
                await asyncio.wait_for(self._process.wait(), _STOP_S)
            except TimeoutError:
                self._kill()
                await self._process.wait()
        await asyncio.to_thread(self._remove)

    def _kill(self) -> None:
        """A sandbox dies with the process that started it."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def _remove(self) -> None:
        self.limits.release()
        if self._state is not None:
            shutil.rmtree(self._state, ignore_errors=True)

    async def quiesce(self) -> None:
        """End everything that the agent has left running."""
        await self._connected().quiesce()

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: float | None = None,
        user: str | int | None = None,  # there is one user inside
    ) -> ExecResult:
        """Run a command line with bash. Raises `SandboxLost`: a dead sandbox must never look like a failed command."""
        try:
            done = await self._connected().run(
                ["bash", "-c", command],
                env={**self._environment(), **(self._merge_env(env) or {})},
                cwd=self._inside(cwd or self.task_env_config.workdir or "/app"),
                timeout=timeout_sec,
            )
        except CommandTimeout as error:
            return ExecResult(stdout="", stderr=str(error), return_code=124)
        return ExecResult(
            stdout=done.stdout.decode(errors="replace"),
            stderr=done.stderr.decode(errors="replace"),
            return_code=done.code,
        )

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        data = await asyncio.to_thread(Path(source_path).read_bytes)
        await self._transfer('mkdir -p "$(dirname "$1")" && cat > "$1"', target_path, data)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            tar.add(source_dir, arcname=".")
        await self._transfer('mkdir -p "$1" && tar -C "$1" --no-same-owner -xf -', target_dir, archive.getvalue())

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        data = await self._transfer('cat -- "$1"', source_path)
        Path(target_path).write_bytes(data)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        archive = io.BytesIO(await self._transfer('tar -C "$1" -cf - .', source_dir))
        Path(target_dir).mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=archive) as tar:
            tar.extractall(target_dir, filter="data")

    async def _transfer(self, script: str, path: str, data: bytes = b"") -> bytes:
        done = await self._connected().run(
            ["bash", "-c", script, "transfer", self._inside(path)],
            env=self._environment(),
            cwd=self._inside("/app"),
            stdin=data,
            timeout=_TRANSFER_S,
        )
        if done.code != 0:
            raise FileNotFoundError(f"{path}: {done.stderr.decode(errors='replace').strip()[:300]}")
        if len(done.stdout) > _MAX_DOWNLOAD:
            raise OSError(f"{path} is larger than {_MAX_DOWNLOAD >> 20} MB and was not copied")
        return done.stdout

    def outside(self, path: str) -> Path:
        """Where a file below /app, /mailbox or /logs is on this machine, while the sandbox lasts."""
        assert self._state is not None, "the environment is started first"
        return self._state / path.lstrip("/")

    def _connected(self) -> Channel:
        if self._channel is None:
            raise SandboxLost("the sandbox has not been started")
        return self._channel


def state_base() -> Path:
    """Where state folders are made: a place that any user can pass through."""
    shared = Path("/var/tmp")
    return shared if os.access(shared, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def sweep_states() -> None:
    """Remove the state folders of runs that were killed."""
    for state in state_base().glob("mkb-*-*"):
        owner = state.name.split("-")[1]
        with contextlib.suppress(OSError):  # another run may sweep at the same time
            if owner.isdigit() and not _runs(int(owner)) and state.stat().st_uid == os.geteuid():
                shutil.rmtree(state, ignore_errors=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def copy_daemon(state: Path) -> Path:
    """The daemon's source where any user can read it."""
    target = state / "daemon.py"
    shutil.copyfile(daemon.__file__, target)
    target.chmod(0o644)
    return target
