"""Where the time of a session went."""

from __future__ import annotations

import json

import pytest

from metakernelbench.grading import profile
from metakernelbench.grading.profile import DEPENDENCE, MANDATED, STARTS, WAITING, Profile, Stopwatch
from metakernelbench.grading.report import render_profile
from tests.grading.support import HONEST, QUICK, Grader


class Clock:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(profile, "time", made)
    return made


def test_inner_spans_count_for_themselves(clock: Clock) -> None:
    watch = Stopwatch()
    with watch.span("outer"):
        clock.now += 1
        with watch.span("inner"):
            clock.now += 2
        clock.now += 4
    clock.now += 8
    with watch.span("inner"):
        clock.now += 16
    assert watch.seconds == {"outer": 5, "inner": 18}


def test_a_part_of_a_span_can_be_counted_elsewhere(clock: Clock) -> None:
    watch = Stopwatch()
    with watch.span("carrying"):
        clock.now += 3
        watch.move(2, "implementation")
    assert watch.seconds == {"carrying": 1, "implementation": 2}


def test_what_dependence_does_is_dependence_but_for_starts(clock: Clock) -> None:
    watch = Stopwatch()
    with watch.span(DEPENDENCE):
        with watch.span("inputs"):
            clock.now += 1
            watch.move(1, "implementation")
        with watch.span("kernel.py"):
            clock.now += 2
    assert watch.seconds == {DEPENDENCE: 1, "kernel.py": 2}


def test_a_span_that_raises_is_closed(clock: Clock) -> None:
    watch = Stopwatch()
    with pytest.raises(ValueError, match="no"), watch.span("a"):
        clock.now += 1
        raise ValueError("no")
    with watch.span("b"):
        clock.now += 2
    assert watch.seconds == {"a": 1, "b": 2}


def test_a_grading_is_profiled_from_the_asking_on(grade: Grader) -> None:
    assert grade(HONEST).passed
    found = grade.process.profile
    assert found is not None
    assert sum(not draw.repeated for draw in found.draws) == QUICK.warmup_calls + QUICK.timed_calls
    assert all(sorted(draw.order) == ["control 0", "eager", "worker 0"] for draw in found.draws)
    assert {*MANDATED, "workers", "kernel.py", DEPENDENCE, "control", "carrying"} <= found.seconds.keys()
    assert sum(found.seconds.values()) <= found.all_s
    assert Profile.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    grade("")
    assert grade.process.profile is None, "nothing was started"


def test_report_sums_up_by_purpose() -> None:
    seconds = {STARTS[0]: 1.0, STARTS[1]: 2.0, MANDATED[0]: 0.5, "control": 0.25, WAITING: 3.0}
    text = render_profile(Profile(seconds=seconds, all_s=7.0))
    lines = {line[:24].strip(): float(line[24:].split()[0]) for line in text.splitlines()[1:]}
    assert lines["Starts and imports"] == 3.0
    assert lines["Mandated work"] == 0.5
    assert lines["Verification"] == 0.5 and lines["other"] == 0.25
    assert lines[WAITING] == 3.0
