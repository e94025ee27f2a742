"""`mkb redteam`: try to cheat the verifier in every way that we know, or to wrong an honest implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from metakernelbench.cli import output
from metakernelbench.cli.devices import check_device
from metakernelbench.cli.output import ExitCode
from metakernelbench.errors import UnknownName
from metakernelbench.text import harmless

if TYPE_CHECKING:
    from metakernelbench.grading.redteam import Outcome, Sample

app = typer.Typer(add_completion=False)


@app.command()
def redteam(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Files, by name; all of them when left out.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    honest: Annotated[
        bool, typer.Option("--honest", help="Grade the honest but unusual implementations, which must pass.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Grade every exploit: each must be refused with a code it expects. Exit code 1 where one is not."""
    from metakernelbench.grading.redteam import EXPLOITS, HONEST, attempts, samples

    check_device(device)
    found = _chosen(samples(HONEST if honest else EXPLOITS, device), names)
    outcomes = []
    for outcome in attempts(found, device):
        outcomes.append(outcome)
        _tell(outcome, len(outcomes), len(found))
    if as_json:
        output.print_json([_row(outcome) for outcome in outcomes])
    else:
        _print(outcomes)
    raise typer.Exit(ExitCode.OK if all(outcome.ok for outcome in outcomes) else ExitCode.FAILED)


def _chosen(found: list[Sample], names: list[str] | None) -> list[Sample]:
    known = {sample.path.stem: sample for sample in found}
    wanted = [name.removesuffix(".py") for name in names or known]
    if unknown := [name for name in wanted if name not in known]:
        raise UnknownName("file", unknown[0], known)
    return [known[name] for name in wanted]


def _tell(outcome: Outcome, number: int, of: int) -> None:
    state = "ok" if outcome.ok else "NOT OK"
    text = f"[{number}/{of}] {outcome.sample.path.stem}: {outcome.met}, {state} in {outcome.seconds:.1f} s"
    output.stderr.print(text, markup=False)
    if not outcome.ok:
        output.stderr.print(f"    {harmless(outcome.message)}", markup=False)


def _row(outcome: Outcome) -> dict[str, Any]:
    sample = outcome.sample
    return {
        "file": sample.path.name,
        "family": sample.family,
        "mechanism": sample.mechanism or sample.sentence,
        "expected": list(sample.expected),
        "met": outcome.met,
        "ok": outcome.ok,
        "seconds": round(outcome.seconds, 2),
    }


def _print(outcomes: list[Outcome]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("file", "family", "mechanism", "expected", "met", "ok"):
        table.add_column(column, no_wrap=column != "mechanism")
    for row in map(_row, outcomes):
        cells = (row["file"], row["family"], row["mechanism"], " ".join(row["expected"]), row["met"])
        table.add_row(*map(escape, cells), "[green]yes[/]" if row["ok"] else "[bold red]NO[/]")
    output.stdout.print(table)
    right = sum(outcome.ok for outcome in outcomes)
    output.stdout.print(f"\n{right} of {len(outcomes)} as expected")
