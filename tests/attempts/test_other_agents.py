"""Any of Harbor's agents can be named; what it leaves is collected and graded like everyone's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from metakernelbench.attempts.attempt import run_attempt
from metakernelbench.attempts.sandbox.available import sandbox_available
from metakernelbench.attempts.settings import AttemptSettings
from metakernelbench.experiments.planned import PlannedAttempt
from tests.experiments.support import NoJudge


@pytest.mark.sandbox
@pytest.mark.skipif(sandbox_available() is not None, reason=str(sandbox_available()))
def test_an_agent_that_does_nothing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    settings = AttemptSettings(agent="nop", device="cpu", workload="smoke", budget_s=60)
    planned = PlannedAttempt(problem="p28", dsl="tirx", model="openai/some-model")
    record = asyncio.run(run_attempt(planned, settings=settings, skill=None, judge=NoJudge(), folder=tmp_path))
    assert (record.ended, record.kernel, record.final, record.submissions) == ("completed", None, None, ())
    assert record.versions["agent"] == "nop" and record.sandbox["kind"] == "bubblewrap"
