"""`mkb status`: how far experiments have come."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from metakernelbench.cli import output
from metakernelbench.cli.commands import run_command
from metakernelbench.cli.dry_run import last_line, shown_states
from metakernelbench.errors import UserError
from metakernelbench.text import harmless

if TYPE_CHECKING:
    from metakernelbench.experiments.status import ExperimentStatus

app = typer.Typer(add_completion=False)

_EVERY_S = 2.0
_SHOWN = 10


@app.command()
def status(
    target: Annotated[str, typer.Argument(metavar="SPEC|STORE", help="An experiment file, or a store.")] = "runs",
    store: Annotated[str | None, typer.Option(help="Another store than the file names: a folder.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every two seconds until all is finished.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document with the key `experiments`.")
    ] = False,
) -> None:
    """Show how far an experiment has come, or every experiment of a store; without SPEC, of the stores in `runs`."""
    if watch and as_json:
        raise UserError("--watch is for people, --json for programs: choose one")
    found = _look(target, store)
    for one in found:
        if one.otherwise is not None:
            output.warn(f"{one.otherwise}: {run_command(target, store=store)}")
    if as_json:
        output.print_json({"experiments": [dataclasses.asdict(one) for one in found]})
    elif watch:
        _watch(target, store)
    elif found:
        output.stdout.print(_picture(found))
    else:
        output.warn(f"no experiment has run in the store {target} yet")


def _watch(target: str, store: str | None) -> None:
    from rich.live import Live

    found = _look(target, store)
    with Live(_picture(found), console=output.stdout, auto_refresh=False) as live:
        while not all(one.complete for one in found):
            time.sleep(_EVERY_S)
            found = _look(target, store)
            live.update(_picture(found), refresh=True)


def _look(target: str, store: str | None) -> list[ExperimentStatus]:
    from metakernelbench.attempts.attempt import fingerprint
    from metakernelbench.experiments.loading import open_store, prepared
    from metakernelbench.experiments.status import status_of, status_of_file
    from metakernelbench.store.store import Store

    if target.endswith(".toml"):
        spec, _ = prepared(Path(target), store=store)
        with open_store(spec) as opened:
            return [status_of_file(opened, spec, fingerprint)]
    found = []
    for place in _stores_in(target):
        with Store.open(place) as opened:
            found += [status_of(opened, name, fingerprint) for name in opened.experiments()]
    return found


def _stores_in(target: str) -> list[str]:
    """The store at this place, or the stores in the folders of this folder."""
    inside = sorted(str(path.parent) for path in Path(target).glob("*/store.sqlite"))
    return inside or [target]


def _picture(found: list[ExperimentStatus]) -> Group:
    return Group(*(part for one in found for part in _one(one)))


def _one(one: ExperimentStatus) -> list[Text | Table]:
    states = shown_states(kind.states for kind in one.kinds.values())
    table = Table("attempts", "planned", *states, "passed", "running", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, kind in one.kinds.items():
        numbers = (kind.planned, *(kind.states[state] for state in states), kind.passed, kind.running)
        table.add_row(Text(harmless(name)), *(str(number) for number in numbers))
    lines = [f"running: {key} ({owner})" for key, owner in one.running.items()]
    lines += [f"waiting: {reason}" for reason in dict.fromkeys(one.waiting.values())]
    lines += [f"failed: {key}: {last_line(fault)}" for key, fault in one.failed.items()]
    if len(lines) > _SHOWN:
        lines = [*lines[:_SHOWN], f"... and {len(lines) - _SHOWN} more; --json lists them"]
    ended = "complete" if one.complete else "not complete"
    return [Text(harmless(f"{one.name} ({ended})"), style="bold"), table, *(Text(harmless(line)) for line in lines)]
