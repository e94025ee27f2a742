"""`mkb run`: an experiment file in, its missing attempts run, everything in its store."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from metakernelbench.cli import output
from metakernelbench.cli.commands import report_command, run_command
from metakernelbench.cli.dry_run import last_line, show_plan
from metakernelbench.cli.output import ExitCode
from metakernelbench.text import harmless

if TYPE_CHECKING:
    from metakernelbench.experiments.run import Outcome
    from metakernelbench.experiments.spec import ExperimentSpec

app = typer.Typer(add_completion=False)

_SHOWN = 5
"""Attempts listed by name where there may be very many."""


@app.command()
def run(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="The experiment, a TOML file.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run; start and write nothing.")] = False,
    store: Annotated[str | None, typer.Option(help="Another store than the file names: a folder.")] = None,
    model: Annotated[str | None, typer.Option(help="One model, in place of those in the file.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document (keys: experiment, planned, remaining, ...).")
    ] = False,
) -> None:
    """Run what is missing of an experiment; what is finished is kept. Interrupt and repeat at will.

    Exit code: 0 everything is finished, 2 wrong usage, 3 some attempts remain because of faults or of skills that are
    not annotated, 130 interrupted.
    """
    from metakernelbench.experiments.loading import prepared

    resolved, notes = prepared(spec, store=store, model=model)
    for note in notes:
        output.warn(note)
    if dry_run:
        show_plan(resolved, as_json=as_json)
        return
    resume = run_command(str(spec), store=store, model=model)
    outcome = asyncio.run(_run(resolved, resume))
    if as_json:
        output.print_json(_outcome_as_json(resolved, outcome, resume))
    else:
        read = report_command(str(spec), store=store)
        _show_outcome(resolved, outcome, then=resume if outcome.remaining else read)
    raise typer.Exit(_exit_code(outcome))


async def _run(spec: ExperimentSpec, resume: str) -> Outcome:
    from metakernelbench.experiments.interruption import Interruption
    from metakernelbench.experiments.loading import open_store
    from metakernelbench.experiments.progress import end_first, shown_on
    from metakernelbench.experiments.run import check_models, real_machinery, run_experiment
    from metakernelbench.experiments.stored_plan import loses
    from metakernelbench.judging.registry import open_judge

    machinery = real_machinery()
    check_models(spec, machinery)
    async with AsyncExitStack() as opened:
        store = opened.enter_context(open_store(spec, create=True))
        if (lost := loses(spec, store)) is not None:
            output.warn(lost)
        progress = opened.enter_context(shown_on(output.stderr))

        def requested(times: int) -> None:
            if times == 1:
                progress.note(f"Stopping: {end_first(len(progress.running))}, nothing new is started.")
                progress.note(f"Press Ctrl-C again to leave at once. To go on later: {resume}")

        interruption = Interruption(requested)
        opened.enter_context(interruption.on_signals())
        store.tell(progress.note)
        judge = open_judge(spec.judge, device=spec.attempt.device, options=spec.judge_options)
        opened.push_async_callback(judge.close)
        await judge.ready()
        return await run_experiment(
            spec,
            store,
            judge=judge,
            progress=progress,
            machinery=machinery,
            interruption=interruption,
        )


def _exit_code(outcome: Outcome) -> ExitCode:
    if outcome.remaining == 0:
        return ExitCode.OK
    return ExitCode.INTERRUPTED if outcome.interrupted else ExitCode.INFRASTRUCTURE


def _outcome_as_json(spec: ExperimentSpec, outcome: Outcome, resume: str) -> dict[str, Any]:
    return {
        "experiment": spec.name,
        "store": spec.store,
        "planned": outcome.planned,
        "finished": outcome.finished,
        "skipped": outcome.skipped,
        "failed": outcome.failed,
        "waiting": outcome.waiting,
        "remaining": outcome.remaining,
        "interrupted": outcome.interrupted,
        "resume": resume if outcome.remaining else None,
    }


def _show_outcome(spec: ExperimentSpec, outcome: Outcome, *, then: str) -> None:
    done = outcome.planned - outcome.remaining
    lines = [
        f"{spec.name}: {done} of {outcome.planned} attempts are in the store "
        f"({len(outcome.finished)} run now, {len(outcome.skipped)} recorded as skipped)"
    ]
    lines += [f"given up: {key}: {last_line(fault)}" for key, fault in list(outcome.failed.items())[:_SHOWN]]
    if len(outcome.failed) > _SHOWN:
        lines.append(f"... and {len(outcome.failed) - _SHOWN} more; `mkb status` lists them")
    if outcome.waiting:
        lines.append(f"waiting: {len(outcome.waiting)} attempts: {next(iter(outcome.waiting.values()))}")
    lines.append(f"to go on: {then}" if outcome.remaining else f"to read it: {then}")
    for line in lines:
        output.stdout.print(harmless(line), markup=False, soft_wrap=True)
