"""Opens a variant's sandbox for a person: the same task, documentation, limits, clock and submissions as an agent's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
import socket
import sys
import termios
import time
import tty
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from metakernelbench.attempts.agents.models import OWN_SANDBOXES, quiet_libraries
from metakernelbench.attempts.attempt import mailbox_of
from metakernelbench.attempts.payload import terminal
from metakernelbench.attempts.settings import AttemptSettings
from metakernelbench.attempts.task import task_files, write_task
from metakernelbench.dsls import dsl as dsls
from metakernelbench.dsls.docs import build as docs
from metakernelbench.errors import InfrastructureFault
from metakernelbench.experiments.planned import PlannedAttempt
from metakernelbench.judging.judge import Judge

_INSIDE = "/logs/terminal"
_CONNECT_S = 30
_END_OF_INPUT = b"\x04"
_IDLE_S = 0.5


@contextlib.asynccontextmanager
async def opened(
    problem: str, dsl: str, *, settings: AttemptSettings, judge: Judge, kernel: bytes | None, folder: Path
) -> AsyncIterator[Any]:
    """The sandbox, with its clock running and its mailbox open. `folder` holds the task; `kernel` is put into place.

    Where a submission cannot be graded at all, what goes on inside is cancelled and the reason raised: nobody waits for
    an answer that never comes.
    """
    documentation = await asyncio.to_thread(docs.build, dsls.load(dsl))
    write_task(task_files(problem, dsl, settings, None), folder / "task", documentation.folder)
    environment = _environment(folder, settings)
    mailbox = mailbox_of(PlannedAttempt(problem=problem, dsl=dsl, model="a person"), settings, judge)
    if (sitting := asyncio.current_task()) is not None:
        mailbox.on_failure = sitting.cancel
    try:
        await environment.start(force_build=False)
        if kernel is not None:
            (folder / "kernel.py").write_bytes(kernel)
            await environment.upload_file(folder / "kernel.py", "/app/kernel.py")
        await mailbox.open(environment)
        yield environment
    except asyncio.CancelledError:
        if mailbox.failure is not None:
            raise mailbox.failure from None
        raise
    finally:
        await mailbox.close()
        await environment.stop(delete=True)


def _environment(folder: Path, settings: AttemptSettings) -> Any:
    """The Harbor environment that an attempt with these settings would get."""
    quiet_libraries()
    from harbor.environments.factory import EnvironmentFactory
    from harbor.models.task.task import Task
    from harbor.models.trial.config import EnvironmentConfig
    from harbor.models.trial.paths import TrialPaths

    task = Task(folder / "task")
    return EnvironmentFactory.create_environment_from_config(
        config=EnvironmentConfig(import_path=OWN_SANDBOXES[settings.sandbox]),
        environment_dir=folder / "task" / "environment",
        environment_name="try",
        session_id="try__env",
        trial_paths=TrialPaths(folder / "trial"),
        task_env_config=task.config.environment,
    )


async def interact(environment: Any) -> None:
    """Connect this process's terminal, or whatever its standard input is, to a login shell in the sandbox."""
    size = shutil.get_terminal_size()
    await environment.upload_file(terminal.__file__, f"{_INSIDE}.py")
    where = '"${MKB_ROOT:-}"' + _INSIDE
    shell = asyncio.create_task(environment.exec(f"exec python3 {where}.py {where} {size.lines} {size.columns}"))
    relay = asyncio.create_task(asyncio.to_thread(_relay, environment.outside(_INSIDE)))
    await asyncio.wait({shell, relay}, return_when=asyncio.FIRST_EXCEPTION)
    await relay
    await shell


def _relay(path: Path) -> None:
    with _connected(path) as connection, _raw(sys.stdin.fileno()):
        sources: list[Any] = [connection, sys.stdin.fileno()]
        while True:
            input_ended = len(sources) == 1
            readable, _, _ = select.select(sources, [], [], _IDLE_S if input_ended else None)
            if not readable:  # a shell that was busy has not heard of it yet
                connection.sendall(_END_OF_INPUT)
            if connection in readable:
                data = connection.recv(65536)
                if not data:
                    return
                os.write(sys.stdout.fileno(), data)
            if sys.stdin.fileno() in readable:
                data = os.read(sys.stdin.fileno(), 65536)
                if data:
                    connection.sendall(data)
                else:
                    sources.pop()


@contextlib.contextmanager
def _connected(path: Path) -> Iterator[socket.socket]:
    """The socket of the shell, as soon as that listens."""
    deadline = time.monotonic() + _CONNECT_S
    with socket.socket(socket.AF_UNIX) as connection:
        while True:
            try:
                connection.connect(str(path))
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise InfrastructureFault(f"the sandbox gave no terminal within {_CONNECT_S} s: {error}") from None
                time.sleep(0.05)
        yield connection


@contextlib.contextmanager
def _raw(fd: int) -> Iterator[None]:
    """Every key goes to the sandbox as it is typed, where `fd` is a terminal."""
    if not os.isatty(fd):
        yield
        return
    before = termios.tcgetattr(fd)
    tty.setraw(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
