"""How a run shows what it is doing: plain lines anywhere, and on a terminal a live picture below them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from metakernelbench.attempts.record import AttemptRecord
from metakernelbench.experiments.plan import RunPlan, idle_designs
from metakernelbench.experiments.planned import PlannedAttempt
from metakernelbench.grading.verdict import Verdict
from metakernelbench.judging.judge import GradingRequest

_ROOM_FOR_THE_REST = 6
"""Lines of a terminal that the running attempts leave for the bar and for what is printed above."""


class Progress(Protocol):
    """What a run reports, as it happens."""

    def begin(self, plan: RunPlan) -> None: ...
    def started(self, attempt: PlannedAttempt, number: int) -> None: ...
    def graded(self, attempt: PlannedAttempt, request: GradingRequest, verdict: Verdict) -> None: ...
    def stopped(self, attempt: PlannedAttempt) -> None: ...
    def finished(self, attempt: PlannedAttempt, record: AttemptRecord) -> None: ...
    def skipped(self, attempt: PlannedAttempt) -> None: ...
    def kept(self, attempt: PlannedAttempt) -> None: ...
    def fault(self, attempt: PlannedAttempt, number: int, message: str, *, gave_up: bool) -> None: ...
    def note(self, message: str) -> None: ...
    def end(self) -> None: ...


def end_first(running: int) -> str:
    """What is said of the attempts that a run lets come to their end."""
    return "1 running attempt ends first" if running == 1 else f"{running} running attempts end first"


@dataclass
class _Running:
    """One attempt that is going on."""

    number: int
    since: float
    doing: str = "working"
    submissions: int = 0


@dataclass
class Lines:
    """Progress as plain lines. The base of the live picture, which prints the same lines above itself."""

    console: Console
    clock: Callable[[], float] = time.monotonic
    plan: RunPlan | None = None
    settled: int = 0
    outcomes: Counter[str] = field(default_factory=Counter[str])
    running: dict[PlannedAttempt, _Running] = field(default_factory=dict[PlannedAttempt, _Running])

    def begin(self, plan: RunPlan) -> None:
        self.plan = plan
        self.settled = sum(item.settled for item in plan.items)
        kept = f"; {self.settled} already in the store" if self.settled else ""
        self.note(f"{plan.spec.name}: {len(plan.items)} attempts planned{kept}")
        if (idle := idle_designs(plan.spec, plan.plan)) is not None:
            self.note(idle)

    def started(self, attempt: PlannedAttempt, number: int) -> None:
        self.running[attempt] = _Running(number, self.clock())

    def graded(self, attempt: PlannedAttempt, request: GradingRequest, verdict: Verdict) -> None:
        running = self.running.get(attempt)
        if running is not None:
            running.submissions += not request.final
            what = "final grading" if request.final else f"submission {running.submissions}"
            running.doing = f"{what}: {outcome_of(verdict)}"

    def stopped(self, attempt: PlannedAttempt) -> None:
        self.running.pop(attempt, None)

    def finished(self, attempt: PlannedAttempt, record: AttemptRecord) -> None:
        passed = record.final is not None and record.final.passed
        self._settle(attempt, "passed" if passed else "did not pass", _sentence_of(record))

    def skipped(self, attempt: PlannedAttempt) -> None:
        self._settle(attempt, "skipped", f"skipped: its source kept no {attempt.material}{_to_take_out(attempt)}")

    def kept(self, attempt: PlannedAttempt) -> None:
        self._settle(attempt, "elsewhere", "finished by another runner")

    def _settle(self, attempt: PlannedAttempt, outcome: str, sentence: str) -> None:
        self.settled += 1
        self.outcomes[outcome] += 1
        total = len(self.plan.items) if self.plan else 0
        self.note(f"[{self.settled}/{total}] {self.name_of(attempt)}  {sentence}")

    def fault(self, attempt: PlannedAttempt, number: int, message: str, *, gave_up: bool) -> None:
        self.outcomes["given up"] += gave_up
        then = "given up for this run" if gave_up else "trying again"
        self.note(f"{self.name_of(attempt)}  try {number} failed for a reason of ours, {then}: {message}")

    def note(self, message: str) -> None:
        self.console.print(Text(message), soft_wrap=True)

    def end(self) -> None:
        """Nothing is left to show."""

    def name_of(self, attempt: PlannedAttempt) -> str:
        """`p28 tirx`, `p28 tirx→cute`, `p28 cute (again)`; with the model and the replicate where there are several."""
        source = attempt.source.split("/")[1] if attempt.source else None
        name = f"{attempt.problem} {source}→{attempt.dsl}" if source else f"{attempt.problem} {attempt.dsl}"
        if attempt.label not in ("solo", f"from-{source}"):
            name += f" ({attempt.label})"
        if self.plan and len(self.plan.spec.models) > 1:
            name += f" {attempt.model}"
        return f"{name} #{attempt.replicate}" if self.plan and self.plan.spec.replicates > 1 else name


class LivePicture(Lines):
    """The lines, and below them a bar and what is running now."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Bar(*columns, console=console)
        self._task = self._bar.add_task("attempts", total=None)
        self._live = Live(get_renderable=self._picture, console=console, refresh_per_second=4, transient=True)

    def begin(self, plan: RunPlan) -> None:
        super().begin(plan)
        self._live.start()

    def end(self) -> None:
        self._live.stop()

    def _picture(self) -> Group:
        total = len(self.plan.items) if self.plan else None
        counts = ", ".join(f"{number} {outcome}" for outcome, number in sorted(self.outcomes.items()))
        self._bar.update(self._task, completed=self.settled, total=total, description=counts or "attempts")
        table = Table.grid(padding=(0, 2))
        shown, room = list(self.running.items()), max(self.console.height - _ROOM_FOR_THE_REST, 1)
        for attempt, running in shown[:room]:
            seconds = int(self.clock() - running.since)
            again = f" (try {running.number})" if running.number > 1 else ""
            table.add_row(
                f"  {self.name_of(attempt)}{again}", f"{seconds // 60:02}:{seconds % 60:02}", Text(running.doing)
            )
        if len(shown) > room:
            table.add_row(f"  ... and {len(shown) - room} more")
        return Group(table, self._bar)


def _to_take_out(attempt: PlannedAttempt) -> str:
    return f", or one without anything of `{attempt.without}`" if attempt.without else ""


@contextmanager
def shown_on(console: Console) -> Iterator[Lines]:
    """The progress that suits a console; whatever ends the run, the terminal is left as it was."""
    progress = LivePicture(console) if console.is_terminal else Lines(console)
    try:
        yield progress
    finally:
        progress.end()


def outcome_of(verdict: Verdict) -> str:
    """A verdict in a few words."""
    if verdict.speedup is not None:
        return f"passed, {verdict.speedup:.3g}× eager"
    return f"did not pass ({verdict.ended_at}: {verdict.code})"


def _sentence_of(record: AttemptRecord) -> str:
    counted = sum(submission.number is not None for submission in record.submissions)
    final = "no kernel" if record.final is None else outcome_of(record.final)
    skill = "" if record.skill is not None else ", no skill"
    return f"{final}; {counted} submission{'' if counted == 1 else 's'}{skill}"
