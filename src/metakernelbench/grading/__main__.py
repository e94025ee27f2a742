"""A verifier process: reads one request a line on standard input, writes progress and verdicts a line on standard
output.

    {"problem": ..., "dsl": ..., "kernel": <base64 or null>, "workload": ..., "device": ..., "final": ..., "contract":
    {...}}

answers with any number of {"progress": ...} and then {"verdict": ...} or {"error": {"kind", "message", "hint"}}. With
"op": "head-to-head" and "entrants", a list of {"dsl", "kernel"}, the answer is {"head_to_head": ...}; "op":
"start-ahead" with "dsl", "device" and "count" has no answer, "op": "await-start" is answered once what was started is
ready. Standard output is for answers only; whatever a library prints goes to standard error.
"""

from __future__ import annotations

import base64
import ctypes
import dataclasses
import json
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from metakernelbench.grading.head_to_head import HeadToHead
    from metakernelbench.grading.isolation import Host
    from metakernelbench.grading.profile import Profile
    from metakernelbench.grading.verdict import Verdict
    from metakernelbench.grading.verifier import Verifier

_PR_SET_PDEATHSIG = 1


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # no grading outlives who asked for it
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from metakernelbench.grading import folders, groups

    folders.sweep()
    groups.sweep()
    server = _Server(answers)
    try:
        for line in sys.stdin:
            server.serve(json.loads(line))
    finally:
        server.close()
    os._exit(0)  # all has been ended; taking an interpreter with torch apart takes a good part of a second


class _Server:
    """Answers requests. The verifier itself, which takes seconds to import, starts with the first that needs it."""

    def __init__(self, answers: TextIO) -> None:
        self._answers = answers
        self._started_s = time.monotonic()
        self._imported_s = self._started_s
        """When the verifier was ready."""
        self._verifier: Verifier | None = None

    def serve(self, request: dict[str, Any]) -> None:
        """Answer one request."""
        from metakernelbench.errors import MkbError, UserError

        if request.get("op") == "start-ahead":
            with suppress(UserError):  # the grading will say it
                self._verifier_for(request).start_ahead(request["dsl"], request["device"], request["count"])
            return
        if request.get("op") == "await-start":
            if self._verifier is not None:
                self._verifier.await_start()
            self._answer({"started": {}})
            return
        if self._verifier is not None:
            self._verifier.profile = None
        try:
            if request.get("op") == "head-to-head":
                answer: dict[str, Any] = {"head_to_head": dataclasses.asdict(self._head_to_head(request))}
            else:
                answer = {"verdict": dataclasses.asdict(self._grade(request))}
            if self._verifier is not None and self._verifier.profile is not None:
                answer["profile"] = self._profile(self._verifier.profile, request["asked_s"]).to_dict()
        except MkbError as error:
            answer = {"error": {"kind": error.kind, "message": error.message, "hint": error.hint}}
        self._answer(answer)

    def _profile(self, session: Profile, asked_s: float) -> Profile:
        """A session's profile with what came before it, since it was asked for: the clock is the machine's, and so the
        same in all its processes."""
        before = {
            "verifier process": max(0.0, self._started_s - asked_s),
            "imports": max(0.0, self._imported_s - max(asked_s, self._started_s)),
        }
        return replace(session, seconds={**before, **session.seconds}, all_s=time.monotonic() - asked_s)

    def close(self) -> None:
        if self._verifier is not None:
            self._verifier.close()

    def _grade(self, request: dict[str, Any]) -> Verdict:
        from metakernelbench.grading.screening import screen

        arguments = (request["problem"], _kernel(request), request["dsl"])
        options = _options(request)
        return screen(*arguments, **options) or self._verifier_for(request).grade(
            *arguments, **options, progress=self._tell
        )

    def _head_to_head(self, request: dict[str, Any]) -> HeadToHead:
        from metakernelbench.grading.head_to_head import Entrant

        entrants = [Entrant(item["dsl"], _kernel(item)) for item in request["entrants"]]
        verifier = self._verifier_for({"dsl": entrants[0].dsl if entrants else "", "device": request["device"]})
        return verifier.head_to_head(request["problem"], entrants, **_options(request), progress=self._tell)

    def _verifier_for(self, request: dict[str, Any]) -> Verifier:
        """The verifier. Its first host starts before torch is imported here: the two imports take the same seconds."""
        if self._verifier is None:
            ahead = _start_ahead(request)
            from metakernelbench.grading.verifier import Verifier

            self._verifier = Verifier(ahead)
            self._imported_s = time.monotonic()
        return self._verifier

    def _tell(self, progress: str) -> None:
        self._answer({"progress": progress})

    def _answer(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer, allow_nan=False) + "\n")
        self._answers.flush()


def _kernel(item: dict[str, Any]) -> bytes | None:
    return None if item["kernel"] is None else base64.b64decode(item["kernel"])


def _options(request: dict[str, Any]) -> dict[str, Any]:
    from metakernelbench.grading.contract import Contract

    return {
        **{name: request[name] for name in ("workload", "device", "final")},
        "contract": Contract(**request["contract"]),
    }


def _start_ahead(request: dict[str, Any]) -> Host | None:
    """The host for the first request; None where the request is a mistake, which its grading will say."""
    from metakernelbench.dsls import dsl as dsls
    from metakernelbench.errors import MkbError
    from metakernelbench.grading.isolation import Host

    try:
        plugin = dsls.load(request["dsl"])
        return Host(plugin, request["device"]) if request["device"] in plugin.devices and plugin.versions() else None
    except MkbError:
        return None


if __name__ == "__main__":
    main()
