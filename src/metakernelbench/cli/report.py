"""`mkb report`: an experiment's outcome as one HTML file, or its tables as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from metakernelbench.cli import output
from metakernelbench.cli.commands import run_command
from metakernelbench.cli.output import ExitCode
from metakernelbench.errors import UserError
from metakernelbench.files import write_whole, writing

if TYPE_CHECKING:
    from metakernelbench.report.study import Study
    from metakernelbench.store.store import Store

app = typer.Typer(add_completion=False)


@app.command()
def report(
    experiment: Annotated[str, typer.Argument(help="The experiment's TOML file, or its name in --store.")],
    store: Annotated[
        str | None, typer.Option(help="Folder or database URL of the store; by default the one the file names.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The HTML file to write; by default NAME.html here.")] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the tables instead (keys: experiment, rehearsal, tables, comparisons, attempts)."
        ),
    ] = False,
) -> None:
    """Write an experiment's outcome as one HTML file that needs nothing else."""
    study = _study(experiment, store)
    if as_json:
        from metakernelbench.report.tables import as_json as tables_as_json

        output.print_json(tables_as_json(study))
        raise typer.Exit(ExitCode.OK)
    from metakernelbench.report.page import render

    path = out or Path(f"{study.name}.html")
    with writing(path, hint="choose another place with --out"):
        _check_replaceable(path)
        with output.stderr.status("writing the report"):
            write_whole(path, render(study).encode())
    output.stdout.print(str(path), markup=False, soft_wrap=True)


def _check_replaceable(path: Path) -> None:
    """A report is replaced by a newer one, and no other file is."""
    from metakernelbench.report.page import is_report

    if path.is_file() and not is_report(path):
        raise UserError(f"{path} is no report of ours and is left as it is", hint="choose another place with --out")


def _study(experiment: str, location: str | None) -> Study:
    from metakernelbench.report.study import study_from_store

    store, name = opened(experiment, location)
    with store:
        return study_from_store(store, name)


def opened(experiment: str, location: str | None) -> tuple[Store, str]:
    """The store of an experiment, and the experiment's name in it. A file says where its store is; a name needs
    --store."""
    from metakernelbench.experiments.loading import open_store
    from metakernelbench.experiments.spec import load_spec
    from metakernelbench.experiments.stored_plan import asks_otherwise
    from metakernelbench.store.store import Store

    if experiment.endswith(".toml"):
        spec = load_spec(Path(experiment), store=location)
        found = open_store(spec)
        if (otherwise := asks_otherwise(spec, found)) is not None:
            output.warn(f"{otherwise}: {run_command(experiment, store=location)}")
        return found, spec.name
    if location is None:
        raise UserError(f"`{experiment}` is not a TOML file, so its store is not known", hint="give it with --store")
    return Store.open(location), experiment
