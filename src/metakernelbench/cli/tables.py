"""`mkb tables`: every table of an experiment's outcome, for a terminal, a spreadsheet, a paper and a program."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from metakernelbench.cli import output
from metakernelbench.cli.studies import (
    EXPERIMENT_HELP,
    DesignOption,
    ForgiveOption,
    RatiosOption,
    StoreOption,
    study,
)
from metakernelbench.errors import UserError
from metakernelbench.files import read_text, why_unread, write_whole, writing
from metakernelbench.text import harmless

if TYPE_CHECKING:
    from metakernelbench.analysis.frames import Frames
    from metakernelbench.analysis.tables import Table
    from metakernelbench.grading.verdict import Verdict

app = typer.Typer(add_completion=False)

_VERDICTS = 200_000_000
"""Characters of a file of verdicts that are read."""


@app.command()
def tables(
    experiment: Annotated[str | None, typer.Argument(help=EXPERIMENT_HELP)] = None,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="TABLE", help="Which; by default those that everybody reads.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Say what tables there are and what each shows.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Every table that has something to show.")] = False,
    store: StoreOption = None,
    design: DesignOption = None,
    ratios: RatiosOption = "measured",
    forgive: ForgiveOption = None,
    gradings: Annotated[
        Path | None, typer.Option(help="A file of verdicts, one a line, some of one kernel: for the table `noise`.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write tables (all, if none is named) as CSV to this folder, unrounded.")
    ] = None,
    latex: Annotated[Path | None, typer.Option(help="Write tables as LaTeX to this folder.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document (keys: experiment, caveats, tables).")
    ] = False,
) -> None:
    """Show an experiment's outcome as tables, or write them to files."""
    if listing:
        return _list(as_json)
    if experiment is None:
        raise UserError("no experiment was named", hint="mkb tables EXPERIMENT, or mkb tables --list")
    found = study(experiment, store, design=design, ratios=ratios, forgive=forgive)
    verdicts = _verdicts(gradings)
    made = _made(found, names or [], every=every or bool(csv or latex), gradings=verdicts)
    if csv or latex:
        return write(made, csv=csv, latex=latex)
    return _print(found, made, verdicts, as_json)


def _list(as_json: bool) -> None:
    from rich.table import Table as RichTable

    from metakernelbench.analysis.registry import TABLES

    if as_json:
        return output.print_json([{"name": kind.name, "shows": kind.shows} for kind in TABLES.values()])
    shown = RichTable("table", "shows", box=None, pad_edge=False, header_style="bold")
    for kind in TABLES.values():
        shown.add_row(kind.name, kind.shows)
    return output.stdout.print(shown)


def _made(found: Frames, names: list[str], *, every: bool, gradings: list[Verdict]) -> list[Table]:
    from metakernelbench.analysis.noise import noise
    from metakernelbench.analysis.registry import table, tables

    made = [table(found, name) for name in names] if names else tables(found, main=None if every else True)
    return [noise(found, gradings) if each.name == "noise" else each for each in made]


def _verdicts(path: Path | None) -> list[Verdict]:
    if path is None:
        return []
    try:
        lines = read_text(path, most=_VERDICTS).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {why_unread(error, path)}") from error
    return [_verdict(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _verdict(line: str, place: str) -> Verdict:
    from metakernelbench.grading.verdict import Verdict

    try:
        return Verdict.from_json(line)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{place}, is no verdict: {error}", hint="`mkb grade --json` writes verdicts") from error


def _print(found: Frames, made: list[Table], gradings: list[Verdict], as_json: bool) -> None:
    from metakernelbench.analysis.caveats import caveats

    notes = caveats(found, gradings)
    if as_json:
        return output.print_json(
            {
                "experiment": found.name,
                "caveats": {note.name: note.text for note in notes},
                "tables": [table.to_dict() for table in made],
            }
        )
    show(made)
    for note in notes:
        output.stderr.print(f"note: {harmless(note.text)}", markup=False)
    return None


def show(made: list[Table]) -> None:
    """Print tables: within the width of a terminal, and without wrapped lines into a pipe or a file."""
    console = output.stdout
    for table in made:
        console.print(table.to_rich(console.width if console.is_terminal else None), soft_wrap=not console.is_terminal)
        console.print()


def write(made: list[Table], *, csv: Path | None, latex: Path | None) -> None:
    """Write each table to the folders that are given, and print their names."""
    if csv is not None:
        _write(csv, {f"{table.name}.csv": table.to_csv() for table in made})
    if latex is not None:
        _write(latex, {f"{table.name}.tex": table.to_latex() for table in made})


def _write(folder: Path, texts: Mapping[str, str]) -> None:
    with writing(folder, hint="choose another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_whole(folder / name, text.encode())
    output.stdout.print(str(folder), markup=False, soft_wrap=True)
