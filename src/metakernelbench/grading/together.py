"""Runs gradings of one problem from their sources to their verdicts, with the timing stage in common."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from metakernelbench.errors import InfrastructureFault
from metakernelbench.grading.stages import Grading
from metakernelbench.grading.verdict import Stage, Verdict


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

    It is repeated, with fresh workers, where clocks did not agree, since a disturbed machine can be why. Whoever is at
    fault meanwhile takes no part any more.
    """
    tries = gradings[0].tries
    for number in range(tries):
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
            raise InfrastructureFault("this GPU has too little memory for the problem") from None
        for grading in gradings:
            grading.spent(Stage.TIMING, time.monotonic() - start)
        is_last = calls.believable or number == tries - 1
        for grading, side in taking_part:
            if is_last or side.fault is not None:
                grading.trace = calls.trace
                grading.finish_timing(calls, side)
        if is_last:
            return
        gradings = [grading for grading, side in taking_part if side.fault is None]
