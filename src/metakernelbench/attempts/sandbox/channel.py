"""The host's end of the daemon's socket: run a command inside the sandbox and get what it printed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from dataclasses import dataclass
from itertools import count
from typing import Any

from metakernelbench.errors import InfrastructureFault

_HEADER = struct.Struct("!II")
_MAX_MESSAGE = 64 * 2**20
_QUIESCE_S = 10


class SandboxLost(InfrastructureFault):
    """The sandbox has ended while something was asked of it."""


class CommandTimeout(Exception):
    """A command in the sandbox did not end in its time and was killed."""


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    code: int
    """Exit status; negative for a signal."""
    stdout: bytes
    stderr: bytes


class Channel:
    """One connection to one daemon. Commands may overlap."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._ids = count()
        self._waiting: dict[int, asyncio.Future[Finished]] = {}
        self._lost = False
        self._listener = asyncio.create_task(self._listen())

    async def run(
        self, argv: list[str], *, env: dict[str, str], cwd: str, stdin: bytes = b"", timeout: float | None = None
    ) -> Finished:
        """Run a command to its end; kill it if the caller is cancelled. Raises `CommandTimeout`, `SandboxLost`."""
        id = next(self._ids)
        try:
            async with asyncio.timeout(timeout):
                return await self._ask({"id": id, "argv": argv, "env": env, "cwd": cwd}, stdin)
        except TimeoutError:
            self._send({"id": id, "kill": True})
            raise CommandTimeout(f"`{' '.join(argv)[:200]}` did not end within {timeout} s") from None
        except asyncio.CancelledError:
            self._send({"id": id, "kill": True})
            raise

    async def quiesce(self) -> None:
        """End everything that runs in the sandbox except the daemon. Raises `SandboxLost`."""
        try:
            async with asyncio.timeout(_QUIESCE_S):
                await self._ask({"id": next(self._ids), "quiesce": True}, b"")
        except TimeoutError:
            raise SandboxLost("the sandbox no longer answers") from None

    def close(self) -> None:
        """Let go of the daemon, which ends it."""
        self._listener.cancel()
        self._writer.close()
        self._lose()

    async def _ask(self, message: dict[str, Any], body: bytes) -> Finished:
        future: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()
        self._waiting[message["id"]] = future
        try:
            self._send(message, body)
            return await future
        finally:
            self._waiting.pop(message["id"], None)

    def _send(self, message: dict[str, Any], body: bytes = b"") -> None:
        if self._lost:
            if "kill" in message:
                return
            raise SandboxLost("the sandbox has ended")
        head = json.dumps(message).encode()
        self._writer.write(_HEADER.pack(len(head), len(body)) + head + body)

    async def _listen(self) -> None:
        # Whatever cannot be understood counts as the end: work inside may have taken the daemon over.
        with contextlib.suppress(asyncio.IncompleteReadError, OSError, ValueError, TypeError, KeyError, RecursionError):
            while True:
                head_length, body_length = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
                if head_length + body_length > _MAX_MESSAGE:
                    break
                message = json.loads(await self._reader.readexactly(head_length))
                body = await self._reader.readexactly(body_length)
                self._deliver(message, body)
        self._lose()

    def _lose(self) -> None:
        self._lost = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SandboxLost("the sandbox has ended"))

    def _deliver(self, message: dict[str, Any], body: bytes) -> None:
        future = self._waiting.get(message["id"])
        if future is None or future.done():
            return
        if "error" in message:  # no process could be started: too many run already, or memory is used up
            future.set_result(Finished(126, b"", str(message["error"]).encode()))
        else:
            split = int(message["stdout"])
            future.set_result(Finished(int(message["code"]), body[:split], body[split:]))
