"""A draw in which a call had to wait for a processor is made again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest

from metakernelbench.grading import disturbance, timed_calls
from metakernelbench.grading.contract import Contract
from metakernelbench.grading.cores import CalmCores
from metakernelbench.grading.disturbance import MOST_WAITED_MS, REPEATED_SHARE, waited_ms
from metakernelbench.grading.timed_calls import TimedCalls, _Measured


def test_a_process_that_shares_a_processor_waits() -> None:
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this system does not tell")
    allowed = os.sched_getaffinity(0)
    before = waited_ms()
    busy = f"import os; os.sched_setaffinity(0, {{{min(allowed)}}})\nwhile True: pass"
    rival = subprocess.Popen([sys.executable, "-S", "-c", busy])
    try:
        os.sched_setaffinity(0, {min(allowed)})
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            pass
    finally:
        os.sched_setaffinity(0, allowed)
        rival.kill()
        rival.wait()
    assert waited_ms() - before > 10


def test_a_process_that_is_gone_has_not_waited() -> None:
    assert waited_ms(2**22 + 1) == 0.0


def test_a_wait_disturbs_and_a_long_draw_is_not_made_again() -> None:
    def measured(waited: float, took_s: float) -> _Measured:
        return _Measured(waited_ms={"eager": 0.0, "worker 0": waited}, took_s=took_s)

    assert measured(2 * MOST_WAITED_MS, 0.01).disturbed
    assert not measured(MOST_WAITED_MS / 2, 0.01).disturbed
    assert not measured(2 * MOST_WAITED_MS, 2 * disturbance.LONGEST_DRAW_S).disturbed


class Scripted(TimedCalls):
    """Timed calls whose measurements are given: each draw's wait in milliseconds, for as long as there are any."""

    def __init__(self, waits: list[float], timed: int) -> None:
        self.contract = Contract(warmup_calls=1, timed_calls=timed, rechecked_calls=1)
        self.device, self.cores = "cpu", CalmCores()
        self.waits, self.kept, self.trace = waits, 0, []
        self.sides = [cast(Any, type("Side", (), {"fault": None})())]
        self.draws = cast(Any, type("Draws", (), {"next": lambda _: None})())

    def _measure(self, *_: Any) -> _Measured:
        return _Measured(waited_ms={"eager": self.waits.pop(0) if self.waits else 0.0})

    def _keep(self, *_: Any) -> None:
        self.kept += 1


def made(waits: list[float], timed: int = 10) -> Scripted:
    calls = Scripted(waits, timed)
    calls.run()
    return calls


def test_disturbed_draws_are_made_again_until_all_count() -> None:
    calls = made([9.0, 0.0, 9.0, 9.0])  # the first is a warm-up, which is never made again
    assert calls.kept == 10
    assert [draw.number for draw in calls.trace] == [-1, 0, 1, 1, 1, *range(2, 10)]
    assert [draw.repeated for draw in calls.trace][:6] == [False, False, True, True, False, False]


def test_a_machine_that_stays_busy_costs_a_fifth_more() -> None:
    calls = made([9.0] * 100)
    assert calls.kept == 10 and len(calls.trace) == 11 + 10 * REPEATED_SHARE
    assert timed_calls.REPEATED_SHARE == REPEATED_SHARE
