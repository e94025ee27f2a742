"""How often the timing stage is repeated, and with which pauses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from metakernelbench.grading import together


class Timed:
    """A grading that comes as far as the timing stage, where its clocks agree in the try with this number."""

    def __init__(self, agrees_in: int) -> None:
        self.tries, self._agrees_in = 5, agrees_in
        self.asked: list[bool] = []
        self.kept = 0
        self.finished = False

    def until_timing(self) -> bool:
        return True

    def side(self, *, again: bool) -> Any:
        self.asked.append(again)
        return SimpleNamespace(fault=None)

    def timed_calls(self, _sides: Any) -> Any:
        return SimpleNamespace(run=lambda: None, trace=(), believable=len(self.asked) == self._agrees_in)

    def spent(self, *_: object) -> None:
        pass

    def keep_clocks(self, *_: object) -> None:
        self.kept += 1

    def finish_timing(self, *_: object) -> None:
        self.finished = True

    def verdict(self) -> str:
        return "verdict"


@pytest.mark.parametrize(
    ("agrees_in", "tries", "pauses"),
    [(1, 1, []), (2, 2, []), (3, 3, [1.0]), (5, 5, [1.0, 3.0, 9.0]), (99, 5, [1.0, 3.0, 9.0])],
)
def test_tries_follow_at_once_and_then_after_ever_longer_pauses(
    monkeypatch: pytest.MonkeyPatch, agrees_in: int, tries: int, pauses: list[float]
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(together.time, "sleep", slept.append)
    grading: Any = Timed(agrees_in)
    assert together.grade_together([grading]) == ("verdict",)
    assert grading.asked == [False, *[True] * (tries - 1)]
    assert (slept, grading.kept, grading.finished) == (pauses, tries, True)
