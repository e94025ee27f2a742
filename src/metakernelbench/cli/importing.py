"""`mkb import`: experiments of one store brought into another."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from metakernelbench.cli import output
from metakernelbench.cli.output import ExitCode
from metakernelbench.errors import UserError
from metakernelbench.text import harmless

if TYPE_CHECKING:
    from metakernelbench.store.merge import Merge
    from metakernelbench.store.store import Store

app = typer.Typer(add_completion=False)

_SHOWN = 20
_PLACE = "a store's folder, or an experiment's TOML file, which names its store"


@app.command(name="import")
def import_(
    source: Annotated[str, typer.Argument(metavar="STORE", help=f"Where to bring them from: {_PLACE}.")],
    into: Annotated[str, typer.Option("--into", help=f"Where to: {_PLACE}; made where there is none.")],
    experiment: Annotated[
        list[str] | None, typer.Option("--experiment", help="Only this one; may be repeated. By default all.")
    ] = None,
    new_name: Annotated[str | None, typer.Option("--as", help="Another name for it there; for one experiment.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would come over; write nothing.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document with the key `experiments`.")
    ] = False,
) -> None:
    """Bring experiments of another store into one. What is there stays as it is; what differs is listed and nothing is
    brought over. Exit code: 0 done, 1 conflicts (in a dry run), 2 wrong usage or conflicts."""
    from metakernelbench.experiments.spec import EXPERIMENT_NAME, EXPERIMENT_NAME_IS
    from metakernelbench.store.merge import chosen, merge, plan_merge

    if Path(source).resolve() == Path(into).resolve():
        raise UserError("a store cannot be brought into itself", hint="name another with --into")
    if new_name is not None and not re.search(EXPERIMENT_NAME, new_name):
        raise UserError(f"--as is `{new_name}`; allowed: {EXPERIMENT_NAME_IS}")
    with ExitStack() as opened:
        theirs = opened.enter_context(_opened(source))
        names = chosen(theirs, experiment or [])
        if new_name is not None and len(names) > 1:
            raise UserError(f"--as is for one experiment, not {len(names)}", hint="choose it with --experiment")
        ours = opened.enter_context(_target(into, dry_run=dry_run))
        plans = [plan_merge(theirs, ours, name, name=new_name) for name in names]
        if not dry_run:
            merge(theirs, ours, plans)
        if as_json:
            output.print_json({"experiments": [_as_json(plan) for plan in plans]})
        else:
            _show(plans, dry_run=dry_run)
    if any(plan.conflicts for plan in plans):
        raise typer.Exit(ExitCode.FAILED)


@contextmanager
def _target(place: str, *, dry_run: bool) -> Iterator[Store]:
    """The store to bring them into. A dry run makes none: an empty one stands in for one that does not exist."""
    from metakernelbench.store.database import NoStore
    from metakernelbench.store.store import Store

    with ExitStack() as opened:
        try:
            store = opened.enter_context(_opened(place, create=not dry_run))
        except NoStore:
            folder = opened.enter_context(tempfile.TemporaryDirectory())
            store = opened.enter_context(Store.open(folder, create=True))
        yield store


def _opened(place: str, *, create: bool = False) -> Store:
    from metakernelbench.experiments.loading import open_store
    from metakernelbench.experiments.spec import load_spec
    from metakernelbench.store.store import Store

    if place.endswith(".toml"):
        return open_store(load_spec(Path(place)), create=create)
    return Store.open(place, create=create)


def _as_json(plan: Merge) -> dict[str, object]:
    return {
        "experiment": plan.source,
        "as": plan.name,
        "new": list(plan.new),
        "present": plan.present,
        "conflicts": list(plan.conflicts),
    }


def _show(plans: list[Merge], *, dry_run: bool) -> None:
    for plan in plans:
        name = plan.source if plan.name == plan.source else f"{plan.source} as {plan.name}"
        come = "would come over" if dry_run else "have come over"
        lines = [f"{name}: {len(plan.new)} attempts {come}, {plan.present} are there already"]
        lines += [f"conflict: {conflict}" for conflict in plan.conflicts[:_SHOWN]]
        if len(plan.conflicts) > _SHOWN:
            lines.append(f"... and {len(plan.conflicts) - _SHOWN} more; --json lists them")
        for line in lines:
            output.stdout.print(harmless(line), markup=False, soft_wrap=True)
