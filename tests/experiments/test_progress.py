"""What a run shows: a line for everything that is settled, and on a terminal what is going on."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import cast

from rich.console import Console

from metakernelbench.experiments.plan import plan_missing, plan_of
from metakernelbench.experiments.progress import Lines, LivePicture, end_first, shown_on
from metakernelbench.judging.judge import GradingRequest
from tests.experiments.support import fingerprint, record_of, spec_of, verdict_of

SPEC = spec_of(Path(), problems=("p28",))
PLAN = plan_missing(SPEC, plan_of(SPEC), None, fingerprint)
SOLO, OTHER, TREATMENT, _ = (item.attempt for item in PLAN.items)
REQUEST = GradingRequest(problem="p28", dsl="tirx", source=b"")


def play(progress: Lines) -> None:
    progress.begin(PLAN)
    progress.started(SOLO, 1)
    progress.fault(SOLO, 1, "the sandbox was lost", gave_up=False)
    progress.stopped(SOLO)
    progress.started(SOLO, 2)
    progress.graded(SOLO, REQUEST, verdict_of(SOLO, passed=True))
    progress.stopped(SOLO)
    record = record_of(SOLO, SPEC.attempt, None)
    record = record.model_copy(update={"final": verdict_of(SOLO, passed=True), "skill": "Something."})
    progress.finished(SOLO, record)
    progress.finished(OTHER, record.model_copy(update={"final": None, "skill": None}))
    progress.skipped(TREATMENT)


def test_what_still_runs_is_counted_in_words() -> None:
    assert end_first(1) == "1 running attempt ends first"
    assert end_first(2) == "2 running attempts end first"


def test_without_a_terminal_there_are_plain_lines() -> None:
    console = Console(file=StringIO(), width=40)
    with shown_on(console) as progress:
        play(progress)
    assert cast(StringIO, console.file).getvalue().splitlines() == [
        "small: 4 attempts planned",
        "p28 tirx  try 1 failed for a reason of ours, trying again: the sandbox was lost",
        "[1/4] p28 tirx  passed, 2× eager; 0 submissions",
        "[2/4] p28 triton  no kernel; 0 submissions, no skill",
        "[3/4] p28 tirx→triton  skipped: its source kept no skill",
    ]


def test_a_design_that_compares_nothing_is_named() -> None:
    alone = spec_of(Path(), problems=("p28",), dsls=("tirx",))
    console = Console(file=StringIO(), width=40)
    with shown_on(console) as progress:
        progress.begin(plan_missing(alone, plan_of(alone), None, fingerprint))
    assert cast(StringIO, console.file).getvalue().splitlines() == [
        "small: 1 attempts planned",
        "cross-dsl: no comparison comes of this; `mkb designs show cross-dsl` says what it needs",
    ]


def test_on_a_terminal_the_picture_shows_what_is_running_and_how_far_it_is() -> None:
    console = Console(file=StringIO(), width=100, force_terminal=True, color_system=None)
    seconds = iter(range(0, 1000, 65))
    picture = LivePicture(console)
    picture.clock = lambda: next(seconds)
    picture.plan = PLAN
    picture.started(SOLO, 2)
    picture.graded(SOLO, REQUEST, verdict_of(SOLO, passed=False))
    picture.outcomes.update(["passed", "skipped", "passed"])
    picture.settled = 3
    plain = Console(file=StringIO(), width=100)
    plain.print(picture._picture())
    first, second = cast(StringIO, plain.file).getvalue().splitlines()
    assert " ".join(first.split()) == "p28 tirx (try 2) 01:05 submission 1: did not pass (correctness: values)"
    assert second.startswith("2 passed, 1 skipped") and "3/4" in second


def test_names_show_the_model_and_the_replicate_where_there_are_several() -> None:
    spec = spec_of(Path(), problems=("p28",), models=("a/x", "b/y"), replicates=2)
    progress = Lines(Console(file=StringIO()))
    progress.begin(plan_missing(spec, plan_of(spec), None, fingerprint))
    assert progress.name_of(plan_of(spec).attempts[2]) == "p28 tirx→triton a/x #0"


def test_more_running_attempts_than_lines_of_the_terminal_are_counted() -> None:
    console = Console(file=StringIO(), width=100, height=8, force_terminal=True, color_system=None)
    picture = LivePicture(console)
    picture.plan = PLAN
    for item in PLAN.items:
        picture.started(item.attempt, 1)
    plain = Console(file=StringIO(), width=100)
    plain.print(picture._picture())
    shown = [" ".join(line.split()) for line in cast(StringIO, plain.file).getvalue().splitlines()]
    assert len(shown) == 4
    assert shown[2] == "... and 2 more"
