"""Drives a verifier process from any other process. Needs the standard library only, so that the command line starts
fast."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from metakernelbench.errors import InfrastructureFault, UserError
from metakernelbench.grading.contract import CONTRACT, Contract
from metakernelbench.grading.head_to_head import Entrant, HeadToHead
from metakernelbench.grading.profile import WAITING, Profile
from metakernelbench.grading.verdict import Verdict

_MOST_SILENT_S = 3600.0
"""After so long without a word, unless it waits for its turn on the device, a verifier hangs. It speaks at each
stage's beginning, and the longest stages take minutes, with all that the contract allows a worker."""


class VerifierProcess:
    """A verifier in a process of its own, for one grading after another. Starts on first use.

    With `own_session`, a Ctrl-C in the terminal does not reach it: whoever uses it decides when a grading ends.
    `environment` goes over that of this process.
    """

    def __init__(self, *, own_session: bool = False, environment: Mapping[str, str] | None = None) -> None:
        self._own_session = own_session
        self._changes = dict(environment or {})
        self._process: subprocess.Popen[str] | None = None
        self.profile: Profile | None = None
        """Of the last session; None where it ended before anything was started."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115

    def grade(
        self,
        problem_id: str,
        kernel: bytes | None,
        dsl: str,
        *,
        workload: str,
        device: str,
        final: bool = False,
        contract: Contract = CONTRACT,
        progress: Callable[[str], None] | None = None,
    ) -> Verdict:
        """As `Verifier.grade`. A verifier that dies is an `InfrastructureFault`, and the next grading starts
        another."""
        request = {"problem": problem_id, "dsl": dsl, "kernel": _encoded(kernel)}
        options = {"workload": workload, "device": device, "final": final, "contract": dataclasses.asdict(contract)}
        return Verdict.from_dict(self._ask({**request, **options}, "verdict", progress))

    def head_to_head(
        self,
        problem_id: str,
        entrants: Sequence[Entrant],
        *,
        workload: str,
        device: str,
        final: bool = False,
        contract: Contract = CONTRACT,
        progress: Callable[[str], None] | None = None,
    ) -> HeadToHead:
        """As `Verifier.head_to_head`; a verifier that dies is as in `grade`."""
        items = [{"dsl": entrant.dsl, "kernel": _encoded(entrant.kernel)} for entrant in entrants]
        request = {"op": "head-to-head", "problem": problem_id, "entrants": items}
        options = {"workload": workload, "device": device, "final": final, "contract": dataclasses.asdict(contract)}
        return HeadToHead.from_dict(self._ask({**request, **options}, "head_to_head", progress))

    def start_ahead(self, dsl: str, device: str, count: int = 1) -> None:
        """Let what the next `count` gradings need start now. A mistake in the request shows when it is graded."""
        self._send({"op": "start-ahead", "dsl": dsl, "device": device, "count": count})

    def await_start(self) -> None:
        """Return when all that was started ahead is ready."""
        self._ask({"op": "await-start"}, "started", None)

    def interrupt(self) -> None:
        """Kill the process, from another thread: a grading that waits for it ends with an `InfrastructureFault`."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process and everything in it."""
        process, self._process = self._process, None  # a grading in another thread may find it dead meanwhile
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(OSError):  # it died with a request in the pipe
                process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, request: dict[str, Any], wanted: str, progress: Callable[[str], None] | None) -> dict[str, Any]:
        """The answer to a request, under the name `wanted`. Raises what the verifier raised."""
        self._send({**request, "asked_s": time.monotonic()})
        said = ""
        while True:
            answer = self._receive(None if said == WAITING else _MOST_SILENT_S)
            if wanted in answer:
                self.profile = Profile.from_dict(answer["profile"]) if "profile" in answer else None
                found: dict[str, Any] = answer[wanted]
                return found
            if "error" in answer:
                raise _error(answer["error"])
            said = answer["progress"]
            if progress is not None:
                progress(said)

    def _send(self, request: dict[str, Any]) -> None:
        process = self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        except OSError:
            raise self._died() from None

    def _receive(self, patience_s: float | None) -> dict[str, Any]:
        """The next line that the verifier says, which is ended where it takes longer than this."""
        assert self._process is not None and self._process.stdout is not None
        with _watchdog(self._process, patience_s) as ended:
            line = self._process.stdout.readline()
        if not line:
            died = self._died()
            if ended.is_set():
                raise InfrastructureFault(f"the verifier said nothing for {patience_s:g} s and was ended")
            raise died
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "metakernelbench.grading"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**_environment(), **self._changes},
                start_new_session=self._own_session,
                text=True,
                encoding="utf-8",
            )
        return self._process

    def _died(self) -> InfrastructureFault:
        """The fault that a dead verifier is; the next request starts another one."""
        process, self._process = self._process, None
        if process is None:
            return InfrastructureFault("the verifier was closed while it graded")
        process.kill()
        code = process.wait()
        self._errors.seek(0)
        last = self._errors.read()[-1500:].decode(errors="replace").strip()
        self._errors.seek(0)
        self._errors.truncate()
        return InfrastructureFault(f"the verifier ended unexpectedly (exit code {code}): {last}")


@contextlib.contextmanager
def _watchdog(process: subprocess.Popen[str], patience_s: float | None) -> Iterator[threading.Event]:
    """Kill the process where this takes longer, and say so."""
    ended = threading.Event()
    if patience_s is None:
        yield ended
        return

    def end() -> None:
        ended.set()
        process.kill()

    timer = threading.Timer(patience_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield ended
    finally:
        timer.cancel()


def _encoded(kernel: bytes | None) -> str | None:
    return None if kernel is None else base64.b64encode(kernel).decode()


def _environment() -> dict[str, str]:
    from metakernelbench.grading.bytecode import bytecode_home
    from metakernelbench.grading.processes import shared_environment

    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, **shared_environment(), "PYTHONPYCACHEPREFIX": str(bytecode_home())}


def _error(error: dict[str, Any]) -> Exception:
    kinds = {InfrastructureFault.kind: InfrastructureFault}
    return kinds.get(error["kind"], UserError)(error["message"], hint=error["hint"])
