"""Runs gradings of one problem from their sources to their verdicts, with the timing stage in common."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from metakernelbench.grading.stages import Grading, too_little_memory
from metakernelbench.grading.verdict import Stage, Verdict

_FIRST_PAUSE_S = 1.0
"""Before the third try of the timed calls; each further pause is three times as long."""


def grade_together(gradings: Sequence[Grading]) -> tuple[Verdict, ...]:
    """All stages of all gradings. A fault ends a grading, except those that a final one measures on after."""
    ready: list[Grading] = []
    for grading in gradings:
        if grading.until_timing():
            ready.append(grading)
        else:
            grading.close()  # whatever it left running must not disturb the others
    if ready:
        _time(ready)
    return tuple(grading.verdict() for grading in gradings)


def _time(gradings: Sequence[Grading]) -> None:
    """The timing stage of those that have something to time, all of one problem, workload and device.

    It is repeated, with fresh workers, where clocks did not agree, since a disturbed machine can be why; at once, and
    from then on after ever longer pauses, which a disturbance is less likely to outlast. Whoever is at fault meanwhile
    takes no part any more.
    """
    tries = gradings[0].tries
    for number in range(tries):
        if number > 1:
            time.sleep(_FIRST_PAUSE_S * 3 ** (number - 2))
        asked = [(grading, grading.side(again=number > 0)) for grading in gradings]
        taking_part = [(grading, side) for grading, side in asked if side is not None]
        gradings = [grading for grading, _ in taking_part]
        if not taking_part:
            return
        start = time.monotonic()
        calls = gradings[0].timed_calls([side for _, side in taking_part])
        try:
            calls.run()
        except torch.OutOfMemoryError:
            if all(grading.blamed_for_memory(Stage.TIMING) for grading in gradings):
                return
            raise too_little_memory(Stage.TIMING) from None
        for grading, side in taking_part:
            grading.spent(Stage.TIMING, time.monotonic() - start)
            grading.keep_clocks(calls, side)
        is_last = calls.believable or number == tries - 1
        for grading, side in taking_part:
            if is_last or side.fault is not None:
                grading.trace = calls.trace
                grading.finish_timing(calls, side)
        if is_last:
            return
        gradings = [grading for grading, side in taking_part if side.fault is None]
