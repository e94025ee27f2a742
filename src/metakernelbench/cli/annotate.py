"""`mkb annotate`: what skills contain, how they were used, what went wrong; by models, by people, and held to a gold
set."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from metakernelbench.cli import output
from metakernelbench.cli.output import ExitCode
from metakernelbench.errors import UserError
from metakernelbench.text import harmless

if TYPE_CHECKING:
    from metakernelbench.analysis.tables import Table
    from metakernelbench.annotation.annotator import Annotator
    from metakernelbench.annotation.run import Outcome
    from metakernelbench.annotation.stages import Stage
    from metakernelbench.annotation.subjects import Subjects
    from metakernelbench.store.store import Store

app = typer.Typer(add_completion=False)

_PERSON = r"[\w.@ -]{1,100}"
_SHOWN = 5
"""Failures listed by name where there may be very many."""


@app.command()
def annotate(
    experiment: Annotated[
        str | None, typer.Argument(help="The experiment's TOML file, or its name in --store.")
    ] = None,
    store: Annotated[str | None, typer.Option(help="Folder or URL of the store; by default the file's own.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="An annotator, as LiteLLM names models; may be given several times.")
    ] = None,
    passes: Annotated[int, typer.Option(help="How often each model looks at each text.")] = 1,
    temperature: Annotated[float, typer.Option(help="What models are asked with, where they take one.")] = 0.0,
    at_once: Annotated[int, typer.Option(min=1, max=64, help="Questions with providers at the same time.")] = 4,
    replies: Annotated[Path | None, typer.Option(help="Prepared replies of a model called scripted/....")] = None,
    gold: Annotated[bool, typer.Option("--gold", help="Measure the models on the gold set instead.")] = False,
    export: Annotated[Path | None, typer.Option(help="Write a spreadsheet (.xlsx) for a person to fill in.")] = None,
    import_: Annotated[
        Path | None, typer.Option("--import", help="Read a spreadsheet that a person filled in.")
    ] = None,
    annotator: Annotated[str | None, typer.Option(help="The person's name, for --export and --import.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the tables and pictures to this folder.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be asked and what it could cost; ask nothing.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document (keys: experiment, answered, tables, ...).")
    ] = False,
) -> None:
    """Annotate an experiment's skills and attempts; what is answered is kept. Without --model: show what is known.

    Exit code: 0 all is answered, 2 wrong usage, 3 some questions have no answer, 130 interrupted.
    """
    models = model or []
    _check_together(experiment, gold=gold, models=models, export=export, import_=import_, annotator=annotator)
    if dry_run and not models:
        raise UserError("--dry-run says what a model would be asked, and none is given", hint="add --model")
    from metakernelbench.annotation.stages import check_annotators
    from metakernelbench.cli.report import opened as open_experiment

    check_annotators(models, passes, temperature, replies, will_ask=not dry_run)
    asking = _Asking(models, passes, temperature, at_once, replies)
    if gold:
        _gold(asking, store, dry_run=dry_run, as_json=as_json)
        return
    assert experiment is not None
    opened, name = open_experiment(experiment, store)
    with opened:
        if export or import_:
            _spreadsheet(opened, name, export, import_, annotator or "", as_json=as_json)
            return
        from metakernelbench.analysis.annotations import subjects_of
        from metakernelbench.annotation.stages import stages_of

        subjects, comparisons = subjects_of(opened, name)
        if dry_run:
            _show_plan(name, subjects, opened, asking, as_json=as_json)
            return
        resume = shlex.join(["mkb", "annotate", experiment, *_flags(store, asking)])
        outcome = None
        if models:
            by = opened.annotations
            outcome = _asked(asking, opened, lambda who: stages_of(subjects, by, who, passes), resume)
        tables = _tables(subjects, comparisons, opened, name, out)
    _show(name, outcome, tables, resume if models else None, as_json=as_json)
    raise typer.Exit(ExitCode.INFRASTRUCTURE if outcome and outcome.failed else ExitCode.OK)


def _check_together(
    experiment: str | None,
    *,
    gold: bool,
    models: list[str],
    export: Path | None,
    import_: Path | None,
    annotator: str | None,
) -> None:
    """Which options go together, each said in a sentence."""
    if gold == (experiment is not None):
        raise UserError("name an experiment, or ask for --gold, and not both")
    if gold and (export or import_):
        raise UserError("the gold set is labelled already: --export and --import are for experiments")
    if gold and not models:
        raise UserError("--gold measures models, and none is given", hint="mkb annotate --gold --model provider/name")
    if export and import_:
        raise UserError("--export and --import are two steps: do one, fill the file in, do the other")
    if (export or import_) and models:
        raise UserError("a spreadsheet is for a person, --model for a model: choose one")
    if (export or import_) and not annotator:
        raise UserError("a person's labels are kept under a name", hint="add --annotator NAME")
    if annotator and not re.fullmatch(_PERSON, annotator):
        raise UserError(f"--annotator is `{annotator}`; allowed: up to 100 letters, digits, spaces, `.`, `_`, `@`, `-`")
    if annotator and not (export or import_):
        raise UserError("--annotator names the person of --export and --import; a model is named with --model")


class _Asking:
    """Who is asked, and how."""

    def __init__(self, models: list[str], passes: int, temperature: float, at_once: int, replies: Path | None) -> None:
        self.models = models
        self.passes = passes
        self.temperature = temperature
        self.at_once = at_once
        self.replies = replies


def _flags(store: str | None, asking: _Asking) -> list[str]:
    """The options that lead to the same questions again."""
    found = [] if store is None else ["--store", store]
    for name in asking.models:
        found += ["--model", name]
    if asking.passes != 1:
        found += ["--passes", str(asking.passes)]
    if asking.temperature:
        found += ["--temperature", f"{asking.temperature:g}"]
    return found if asking.replies is None else [*found, "--replies", str(asking.replies)]


def _asked(
    asking: _Asking, store: Store, to_ask: Callable[[Sequence[Annotator]], Iterable[Stage]], resume: str
) -> Outcome:
    """Ask, showing how far it is. Ctrl-C leaves at once: every answer so far is kept."""
    from metakernelbench.annotation.stages import annotators, ask_stages
    from metakernelbench.cli.annotation_progress import Shown

    async def run() -> Outcome:
        async with annotators(asking.models, asking.temperature, asking.replies) as asked_by:
            with Shown(output.stderr) as shown:
                return await ask_stages(
                    to_ask(asked_by), store.annotations, at_once=asking.at_once, begun=shown.begin, done=shown.done
                )

    try:
        return asyncio.run(run())
    except KeyboardInterrupt:
        output.stderr.print(f"Interrupted; what was answered is kept. To go on: {resume}", markup=False, soft_wrap=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def _tables(subjects: Subjects, comparisons: Any, store: Store, name: str, out: Path | None) -> tuple[Table, ...]:
    from metakernelbench.analysis.annotation_tables import annotation_tables
    from metakernelbench.annotation.results import results_of

    results = results_of(subjects, store.annotations)
    band = store.experiment(name).spec.indifference_band
    tables = annotation_tables(subjects.plan, comparisons, results, band)
    if out is not None:
        from metakernelbench.analysis.annotation_files import write_all

        write_all(out, tables, subjects.plan, comparisons, results, band)
    return tables


def _show(name: str, outcome: Outcome | None, tables: tuple[Table, ...], resume: str | None, *, as_json: bool) -> None:
    if as_json:
        asked = {} if outcome is None else _outcome_as_json(outcome, resume)
        output.print_json({"experiment": name, **asked, "tables": [table.to_dict() for table in tables]})
        return
    for table in tables:
        show_table(table)
    if outcome is None:
        if len(tables) == 1:
            _line(f"{name} has no annotations yet; `mkb annotate ... --model provider/name` asks for some")
        return
    spent = "" if outcome.cost_usd is None else f", ${outcome.cost_usd:.4f}"
    _line(
        f"{name}: {outcome.answered} questions answered now, {outcome.kept} before; "
        f"{outcome.input_tokens:,} tokens sent, {outcome.output_tokens:,} received{spent}"
    )
    reasons = list(outcome.failed.values())
    for reason in reasons[:_SHOWN]:
        _line(f"no answer: {reason}")
    if len(reasons) > _SHOWN:
        _line(f"... and {len(reasons) - _SHOWN} more")
    if reasons:
        _line(f"to ask these again: {resume}")


def _outcome_as_json(outcome: Outcome, resume: str | None) -> dict[str, Any]:
    return {
        "answered": outcome.answered,
        "kept": outcome.kept,
        "failed": list(outcome.failed.values()),
        "input_tokens": outcome.input_tokens,
        "output_tokens": outcome.output_tokens,
        "cost_usd": outcome.cost_usd,
        "resume": resume if outcome.failed else None,
    }


def _line(text: str) -> None:
    output.stdout.print(harmless(text), markup=False, soft_wrap=True)


def show_table(table: Table) -> None:
    """A table at the terminal: title, rows, and what it is of. One that is too wide loses its intervals, and is turned
    on its side where that helps; --json and --out have all of it."""
    from rich.measure import Measurement
    from rich.text import Text

    plain, unlimited = _without_intervals(table), output.stdout.options.update(max_width=10_000)
    for one, turned in ((table, False), (plain, False), (plain, True)):
        grid = _grid(one, turned=turned)
        if Measurement.get(output.stdout, unlimited, grid).maximum <= output.stdout.width:
            break
    else:
        grid = _grid(plain, turned=table.frame.height < len(table.shown), narrow=True)
    output.stdout.print(Text(table.title, style="bold"))
    output.stdout.print(grid)
    output.stdout.print(Text(table.note, style="dim"))
    output.stdout.print()


def _without_intervals(table: Table) -> Table:
    return replace(table, columns=tuple(replace(column, interval=False) for column in table.columns))


def _grid(table: Table, *, turned: bool, narrow: bool = False) -> Any:
    """`narrow` breaks the heads of numbers at every word, and texts where they must be."""
    from rich.table import Table as Grid
    from rich.text import Text

    lines = [[column.title for column in table.shown], *table.cells()]
    if turned:
        lines = [list(line) for line in zip(*lines, strict=True)]
    grid = Grid(box=None, pad_edge=False)
    for place, title in enumerate(lines[0]):
        text = place == 0 if turned else table.shown[place].kind == "text"
        head = harmless(title).replace(" ", "\n") if narrow and not text else harmless(title)
        grid.add_column(Text(head), justify="left" if text else "right", no_wrap=text != narrow)
    for line in lines[1:]:
        grid.add_row(*(Text(harmless(cell)) for cell in line))
    return grid


def _show_plan(name: str, subjects: Subjects, store: Store, asking: _Asking, *, as_json: bool) -> None:
    """What would be asked, and at most for how much."""
    from metakernelbench.annotation.results import skill_consensuses
    from metakernelbench.annotation.stages import planned_annotators, stages_of

    asked_by = planned_annotators(asking.models, asking.temperature)
    to_ask = list(stages_of(subjects, store.annotations, asked_by, asking.passes))
    waiting = subjects.unlabelled(skill_consensuses(subjects, store.annotations)[0])
    _show_costs(name, to_ask, waiting, as_json=as_json)


def _show_costs(name: str, to_ask: list[Stage], waiting: int, *, as_json: bool) -> None:
    from metakernelbench.annotation.run import cost_of

    costs = [(stage, cost_of(stage.items)) for stage in to_ask]
    if as_json:
        stages = [{"stage": stage.name, "needed": stage.needed, **asdict(cost)} for stage, cost in costs]
        output.print_json({"experiment": name, "stages": stages, "attempts_waiting_for_skills": waiting})
        return
    for stage, cost in costs:
        price = "no price is known" if cost.usd is None else f"at most ${cost.usd:.2f}"
        _line(
            f"{stage.name}: {cost.requests} questions to ask, {stage.needed - cost.requests} answered; at most "
            f"{cost.input_tokens:,} tokens sent and {cost.output_tokens:,} received: {price}"
        )
    if waiting:
        _line(f"{waiting} attempts come on top once the skills that they were given are labelled")
    _line("Nothing was asked. A malformed answer is asked for again, up to twice, which comes on top.")


def _spreadsheet(
    store: Store, name: str, export: Path | None, import_: Path | None, annotator: str, *, as_json: bool
) -> None:
    from metakernelbench.analysis.annotations import subjects_of
    from metakernelbench.annotation.spreadsheet_reading import overtaken, read_sheet
    from metakernelbench.annotation.spreadsheet_writing import write_sheet

    subjects, _ = subjects_of(store, name)
    if export is not None:
        written = write_sheet(export, subjects, store.annotations, annotator)
        result: dict[str, Any] = {"experiment": name, "written": str(export), **written}
        text = f"{export}: {written['skills']} skills and {written['attempts']} attempts to label"
    else:
        assert import_ is not None
        answers = read_sheet(import_, subjects, store.annotations, annotator)
        store.annotations.save(answers)
        gone = overtaken(answers, subjects, store.annotations)
        result = {"experiment": name, "read": str(import_), "answers": len(answers), "overtaken": gone}
        text = f"{len(answers)} texts labelled by {annotator} are in the store"
        if gone:
            text += f"\n{gone} of them are about questions that the new labels of skills have changed: export again"
    if as_json:
        output.print_json(result)
    else:
        _line(text)


def _gold(asking: _Asking, location: str | None, *, dry_run: bool, as_json: bool) -> None:
    """Measure the models on the gold set. Answers are kept in --store, or in runs/gold."""
    from metakernelbench.analysis.annotator_tables import gold_table
    from metakernelbench.annotation.gold_measure import all_questions, measure
    from metakernelbench.annotation.gold_set import gold_set
    from metakernelbench.annotation.stages import planned_annotators, stage
    from metakernelbench.store.database import NoStore
    from metakernelbench.store.store import Store

    gold, passes, place = gold_set(), asking.passes, location or "runs/gold"
    questions = all_questions(gold)
    try:
        store = Store.open(place, create=not dry_run)
    except NoStore:  # a dry run makes none
        planned = planned_annotators(asking.models, asking.temperature)
        _show_costs("gold", [stage("gold", questions, None, planned, passes)], 0, as_json=as_json)
        return
    with store:
        kept = store.annotations
        if dry_run:
            planned = planned_annotators(asking.models, asking.temperature)
            _show_costs("gold", [stage("gold", questions, kept, planned, passes)], 0, as_json=as_json)
            return
        resume = shlex.join(["mkb", "annotate", "--gold", *_flags(location, asking)])
        outcome = _asked(asking, store, lambda who: [stage("gold", questions, kept, who, passes)], resume)
        table = gold_table(measure(gold, kept, asking.models, passes))
    _show("gold", outcome, (table,), resume, as_json=as_json)
    raise typer.Exit(ExitCode.INFRASTRUCTURE if outcome.failed else ExitCode.OK)
