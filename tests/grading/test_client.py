"""Who asks a verifier gets an answer, whatever becomes of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from metakernelbench.errors import InfrastructureFault, UserError
from metakernelbench.grading import client
from metakernelbench.grading.client import VerifierProcess
from metakernelbench.grading.profile import WAITING

KERNEL = (Path(__file__).parents[2] / "witnesses" / "tirx" / "p28.py").read_bytes()


def graded(verifier: VerifierProcess, kernel: bytes | None, **options: object) -> str | None:
    return verifier.grade("p28", kernel, "tirx", workload="smoke", device="cpu", **options).code  # type: ignore[arg-type]


def test_a_verifier_that_hangs_is_ended_and_the_next_grading_starts_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with VerifierProcess() as verifier:

        def hang(now: str) -> None:
            if now == WAITING:
                return
            monkeypatch.setattr(client, "_MOST_SILENT_S", 0.2)
            assert verifier._process is not None
            os.kill(verifier._process.pid, signal.SIGSTOP)

        with pytest.raises(InfrastructureFault, match="said nothing"):
            graded(verifier, KERNEL, progress=hang)
        monkeypatch.undo()
        assert graded(verifier, None) == "missing"


def test_a_verifier_that_waits_for_the_device_is_given_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float | None] = []
    refused = {"kind": "", "message": "over", "hint": ""}
    lines = iter([{"progress": "source"}, {"progress": WAITING}, {"error": refused}])

    def receive(_: VerifierProcess, patience_s: float | None) -> object:
        seen.append(patience_s)
        return next(lines)

    monkeypatch.setattr(VerifierProcess, "_receive", receive)
    monkeypatch.setattr(VerifierProcess, "_send", lambda *_: None)
    with pytest.raises(UserError, match="over"):
        graded(VerifierProcess(), KERNEL)
    assert seen == [client._MOST_SILENT_S, client._MOST_SILENT_S, None]
