"""Feedback during an attempt: the agent's `task submit` leaves a request in the sandbox, this end answers it.

Everything that counts is kept here, on the host: the clock, the number of submissions, what was graded. What is read
from the sandbox is a few bytes of unknown origin, and is read with a command inside it, so that a link the agent plants
leads to nothing that it could not read itself.

Rules: a request is graded as it was when it was read. One that cannot be read, is too large or cannot be parsed, or
that we failed to grade, is answered and not counted. At most `max_submissions` are counted. When the agent's time ends
the mailbox is closed; a submission whose grading was under way is recorded without an answer, and counts.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
import re
import shlex
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from metakernelbench.attempts.payload import task_tool
from metakernelbench.attempts.record import Submission
from metakernelbench.attempts.sandbox.channel import SandboxLost
from metakernelbench.errors import InfrastructureFault
from metakernelbench.grading.contract import CONTRACT
from metakernelbench.grading.source import parse
from metakernelbench.grading.verdict import Verdict

_POLL_S = 0.3
_COMMAND_S = 20
_MAX_REQUESTS = 200
"""Requests of one attempt that are looked at, counted or not."""
_MAX_ANSWER = 40_000
_ID = re.compile(r"[0-9a-z-]{1,40}")
_FOLDER = '"${MKB_ROOT:-}"/mailbox'


class Sandbox(Protocol):
    """What the mailbox needs of a Harbor environment."""

    async def exec(self, command: str, *, timeout_sec: int | None = None) -> Any:
        """Run a command line; the result has `stdout` and `return_code`."""


type Grade = Callable[[bytes], Awaitable[Verdict]]
"""Grades one source. Raises `InfrastructureFault`."""


@dataclass
class Mailbox:
    """The host's end of one attempt's feedback."""

    grade: Grade
    render: Callable[[Verdict], str]
    budget_s: float
    max_submissions: int
    submissions: list[Submission] = field(default_factory=list[Submission])
    used: int = 0
    failure: Exception | None = None
    """Why nothing is answered any more, where that is neither the attempt's end nor a single grading's failure."""
    on_failure: Callable[[], object] = lambda: None
    _sandbox: Sandbox | None = None
    _seen: set[str] = field(default_factory=set[str])
    _started: float = 0.0
    _poller: asyncio.Task[None] | None = None

    @property
    def clock_s(self) -> float:
        """Seconds since the agent's time began."""
        return time.monotonic() - self._started

    async def open(self, sandbox: Sandbox) -> None:
        """Start the agent's clock, show it in the sandbox, and answer what is asked there from now on."""
        self._sandbox = sandbox
        self._started = time.monotonic()
        await self._inside(
            f'mkdir -p {_FOLDER}/requests {_FOLDER}/answers && echo "$(date +%s) {self.budget_s:.0f}" > {_FOLDER}/clock'
        )
        await self._show_state()
        self._poller = asyncio.create_task(self._poll())

    async def close(self) -> None:
        """Answer nothing from now on."""
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.gather(self._poller, return_exceptions=True)
            with contextlib.suppress(SandboxLost):
                await self._show_state(closed=True)

    async def _poll(self) -> None:
        try:
            while len(self._seen) < _MAX_REQUESTS:
                for id in (await self._new_requests())[: _MAX_REQUESTS - len(self._seen)]:
                    self._seen.add(id)
                    await self._handle(id)
                await asyncio.sleep(_POLL_S)
            await self._show_state(closed=True)
        except SandboxLost:
            pass  # the attempt itself finds out
        except Exception as error:  # whatever it is, the agent must not wait for answers that never come
            self.failure = error
            self.on_failure()

    async def _new_requests(self) -> list[str]:
        listed = await self._inside(f"ls {_FOLDER}/requests | head -n {2 * _MAX_REQUESTS}")
        names = (name.removesuffix(".py") for name in listed.split("\n") if name.endswith(".py"))
        return [name for name in sorted(names) if _ID.fullmatch(name) and name not in self._seen]

    async def _handle(self, id: str) -> None:
        requested_at = self.clock_s
        source = await read_file(self._opened(), f"/mailbox/requests/{id}.py", CONTRACT.max_source_bytes + 1)
        refusal = await asyncio.to_thread(refuse, source) or self._none_left()
        text = None if source is None else source[: CONTRACT.max_source_bytes].decode(errors="replace")
        submission = Submission(number=None, requested_at_s=requested_at, source=text, answer="")
        if source is None or refusal is not None:
            answer = refusal or ""
            self.submissions.append(submission.model_copy(update={"answered_at_s": self.clock_s, "answer": answer}))
            await self._answer(id, answer, task_tool.NOT_GRADED)
            return
        self.used += 1
        self.submissions.append(submission.model_copy(update={"number": self.used}))
        done: dict[str, Any]
        try:
            verdict = await self.grade(source)
        except InfrastructureFault as fault:
            self.used -= 1
            answer = f"The grading failed for a reason that is not yours ({fault.message}). Not counted: submit again."
            done, code = {"number": None}, task_tool.NOT_GRADED
        else:
            answer, done = self.render(verdict), {"verdict": verdict}
            code = task_tool.PASSED if verdict.passed else task_tool.NOT_PASSED
        done |= {"answered_at_s": self.clock_s, "answer": answer}
        self.submissions[-1] = self.submissions[-1].model_copy(update=done)
        await self._answer(id, answer, code)

    def _none_left(self) -> str | None:
        if self.used < self.max_submissions:
            return None
        return (
            f"All {self.max_submissions} submissions are used. Not graded. "
            "The final kernel.py is graded when the attempt ends."
        )

    async def _answer(self, id: str, text: str, exit_status: int) -> None:
        await self._show_state()
        await self._write(f"answers/{id}.json", json.dumps({"text": text[:_MAX_ANSWER], "exit": exit_status}))

    async def _show_state(self, *, closed: bool = False) -> None:
        """Tell the sandbox's tools how things stand. `started` is in the sandbox's own time, which may not be ours."""
        state = {
            "budget_s": self.budget_s,
            "used": self.used,
            "max_submissions": self.max_submissions,
            "closed": closed,
        }
        rest = json.dumps(state)[1:]
        await self._inside(
            f'read -r started _ < {_FOLDER}/clock; printf \'{{"started": %s, %s\' "$started" {shlex.quote(rest)} '
            f"> {_FOLDER}/state.part && mv {_FOLDER}/state.part {_FOLDER}/state.json"
        )

    async def _write(self, name: str, text: str) -> None:
        data = base64.b64encode(text.encode()).decode()
        path = f"{_FOLDER}/{name}"
        await self._inside(f"printf %s {data} | base64 -d > {path}.part && mv {path}.part {path}")

    async def _inside(self, command: str) -> str:
        result = await self._opened().exec(command, timeout_sec=_COMMAND_S)
        return result.stdout or ""

    def _opened(self) -> Sandbox:
        assert self._sandbox is not None, "the mailbox is opened first"
        return self._sandbox


async def read_file(sandbox: Sandbox, path: str, limit: int) -> bytes | None:
    """The first `limit` bytes of a regular file in a sandbox; None where there is none that can be read in time."""
    place = f'"${{MKB_ROOT:-}}"{shlex.quote(path)}'
    result = await sandbox.exec(
        f"[ -f {place} ] && [ ! -L {place} ] && head -c {limit} {place} | base64", timeout_sec=_COMMAND_S
    )
    if result.return_code != 0:
        return None
    try:
        return base64.b64decode(result.stdout or "")[:limit]
    except binascii.Error:
        return None


def refuse(source: bytes | None) -> str | None:
    """Why a request is not graded, as the agent is told; None where it can be."""
    if source is None:
        return "No file could be read. Not graded, not counted."
    if len(source) > CONTRACT.max_source_bytes:
        return f"kernel.py is larger than {CONTRACT.max_source_bytes} bytes. Not graded, not counted: make it smaller."
    try:
        parse(source)
    except UnicodeDecodeError as error:
        return f"kernel.py is not UTF-8 (byte {error.start}). Not graded, not counted."
    except SyntaxError as error:
        return f"kernel.py cannot be parsed: line {error.lineno}: {error.msg}. Not graded, not counted."
    except (ValueError, RecursionError, MemoryError) as error:
        return f"kernel.py cannot be parsed: {error}. Not graded, not counted."
    return None
