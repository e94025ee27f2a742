"""`mkb rematch`: the kernels of every comparison timed head to head, in place of two gradings made apart."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from metakernelbench.cli import output
from metakernelbench.cli.output import ExitCode
from metakernelbench.cli.report import opened as opened_store
from metakernelbench.text import harmless

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from metakernelbench.experiments.matches import Match
    from metakernelbench.experiments.rematch import Outcome
    from metakernelbench.experiments.spec import ExperimentSpec
    from metakernelbench.store.rematches import Rematch
    from metakernelbench.store.store import Store

app = typer.Typer(add_completion=False)

_SHOWN = 5


@app.command()
def rematch(
    experiment: Annotated[
        str, typer.Argument(metavar="EXPERIMENT", help="The experiment's TOML file, or its name in --store.")
    ],
    store: Annotated[
        str | None, typer.Option(help="Folder or database URL of the store; by default the one the file names.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be timed; start and write nothing.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document (keys: experiment, counts, measured, ...).")
    ] = False,
) -> None:
    """Time each comparison's baseline and treatment head to head and keep the ratio beside their verdicts. What is
    measured is kept: interrupt and repeat at will.

    Exit code: 0 everything is measured, 2 wrong usage, 3 some remain because of faults, 130 interrupted.
    """
    from metakernelbench.experiments.matches import matches_of

    found, name = opened_store(experiment, store)
    with found:
        stored = found.experiment(name)
        spec = _spec(experiment, store) or stored.spec
        matches = matches_of(stored.plan, found, name)
        if dry_run:
            _show_plan(spec, matches, as_json=as_json)
            return
        resume = shlex.join(["mkb", "rematch", experiment, *([] if store is None else ["--store", store])])
        outcome = asyncio.run(_run(spec, found, resume))
        if as_json:
            output.print_json(_as_json(spec, matches_of(stored.plan, found, name), outcome, resume))
        else:
            _show(spec, outcome, resume)
    if outcome.remaining:
        raise typer.Exit(ExitCode.INTERRUPTED if outcome.interrupted else ExitCode.INFRASTRUCTURE)


def _spec(experiment: str, store: str | None) -> ExperimentSpec | None:
    """The experiment's file, which may name another judge than it ran with; None where it is called by its name."""
    from metakernelbench.experiments.spec import load_spec

    return load_spec(Path(experiment), store=store) if experiment.endswith(".toml") else None


async def _run(spec: ExperimentSpec, store: Store, resume: str) -> Outcome:
    from metakernelbench.experiments.interruption import Interruption
    from metakernelbench.experiments.rematch import run_rematches
    from metakernelbench.judging.registry import open_judge

    async with AsyncExitStack() as opened:
        progress = opened.enter_context(_shown())
        store.tell(progress.note)

        def requested(times: int) -> None:
            if times == 1:
                progress.note("Stopping: what is being timed ends first, nothing new is started.")
                progress.note(f"Press Ctrl-C again to leave at once. To go on later: {resume}")

        interruption = Interruption(requested)
        opened.enter_context(interruption.on_signals())
        judge = open_judge(spec.judge, device=spec.attempt.device, options=spec.judge_options)
        opened.push_async_callback(judge.close)
        await judge.ready()
        return await run_rematches(spec, store, judge=judge, progress=progress, interruption=interruption)


class _Shown:
    """Progress: a line a rematch, and on a terminal a bar below."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._task = bar.add_task("rematches", total=None)
        self._done = self._total = 0

    def begin(self, matches: int, kept: int) -> None:
        self._done, self._total = kept, matches
        self._bar.update(self._task, total=matches, completed=kept)
        self.note(f"{matches} comparisons of two kernels that passed; {kept} already timed head to head")

    def measured(self, match: Match, rematch: Rematch) -> None:
        self._done += 1
        self._bar.update(self._task, completed=self._done)
        self.note(f"[{self._done}/{self._total}] {match.treatment.key}  {sentence_of(rematch)}")

    def fault(self, match: Match, message: str) -> None:
        self.note(f"{match.treatment.key}  lost for a reason of ours: {message}")

    def note(self, message: str) -> None:
        self._bar.console.print(escape(harmless(message)), soft_wrap=True, highlight=False)


@contextmanager
def _shown() -> Iterator[_Shown]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = output.stderr
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield _Shown(bar)


def sentence_of(rematch: Rematch) -> str:
    """What was measured, in words."""
    if rematch.ratio is None:
        return f"no ratio: {rematch.reason}"
    return f"baseline over treatment {rematch.ratio:.3f} ({rematch.low:.3f} to {rematch.high:.3f})"


def _counts(matches: Sequence[Match]) -> dict[str, int]:
    from metakernelbench.experiments.matches import State, counts

    found = counts(matches)
    return {state.value: found[state] for state in State}


def _show_plan(spec: ExperimentSpec, matches: Sequence[Match], *, as_json: bool) -> None:
    reasons = [(match.treatment.key, match.state.value, match.reason) for match in matches if match.reason is not None]
    counted = _counts(matches)
    left = counted["missing"] + counted["stale"]
    if as_json:
        listed = [{"treatment": key, "state": state, "reason": reason} for key, state, reason in reasons]
        output.print_json({"experiment": spec.name, "counts": counted, "to_measure": left, "reasons": listed})
        return
    words = ", ".join(f"{number} {state}" for state, number in counted.items())
    output.stdout.print(f"{spec.name}: {len(matches)} comparisons: {words}", markup=False, soft_wrap=True)
    for key, state, reason in reasons[:_SHOWN]:
        output.stdout.print(harmless(f"{state}: {key}: {reason}"), markup=False, soft_wrap=True)
    if len(reasons) > _SHOWN:
        output.stdout.print(f"... and {len(reasons) - _SHOWN} more; --json lists them", markup=False)
    output.stdout.print(f"still to time head to head: {left}, on {spec.attempt.device} by the judge `{spec.judge}`")


def _as_json(spec: ExperimentSpec, matches: Sequence[Match], outcome: Outcome, resume: str) -> dict[str, Any]:
    names = ("baseline", "treatment", "ratio", "low", "high", "reason", "device", "judge")
    return {
        "experiment": spec.name,
        "counts": _counts(matches),
        "measured": [{name: getattr(one, name) for name in names} for one in outcome.measured],
        "failed": outcome.failed,
        "remaining": outcome.remaining,
        "interrupted": outcome.interrupted,
        "resume": resume if outcome.remaining else None,
    }


def _show(spec: ExperimentSpec, outcome: Outcome, resume: str) -> None:
    done = outcome.planned - outcome.remaining
    lines = [f"{spec.name}: {done} of {outcome.planned} timed head to head ({len(outcome.measured)} now)"]
    lines += [f"lost: {key}: {fault}" for key, fault in list(outcome.failed.items())[:_SHOWN]]
    if outcome.remaining:
        lines.append(f"to go on: {resume}")
    for line in lines:
        output.stdout.print(harmless(line), markup=False, soft_wrap=True)
