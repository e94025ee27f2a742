"""`mkb compare`: two experiments, or two models of one, paired by variant."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from metakernelbench.cli import output
from metakernelbench.cli.studies import EXPERIMENT_HELP, RatiosOption, StoreOption, study
from metakernelbench.cli.tables import show, write
from metakernelbench.errors import UserError
from metakernelbench.text import harmless

if TYPE_CHECKING:
    from metakernelbench.analysis.compare import Sides

app = typer.Typer(add_completion=False)

_SHOWN = 20
"""Variants printed to a terminal; --csv and --json have all."""


@app.command()
def compare(
    left: Annotated[
        str, typer.Argument(metavar="A", help="An experiment, named as for `mkb tables`; with --of, a model.")
    ],
    right: Annotated[str, typer.Argument(metavar="B", help="What to compare it with.")],
    of: Annotated[str | None, typer.Option(help=f"A and B are two models of this. {EXPERIMENT_HELP}")] = None,
    store: StoreOption = None,
    other_store: Annotated[str | None, typer.Option(help="Store of B, where it is another than that of A.")] = None,
    ratios: RatiosOption = "measured",
    csv: Annotated[Path | None, typer.Option(help="Write each table as CSV to this folder, unrounded.")] = None,
    latex: Annotated[Path | None, typer.Option(help="Write each table as LaTeX to this folder.")] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON (keys: left, right, paired_by_model, notes, tables)."),
    ] = False,
) -> None:
    """Compare two experiments, or two models of one, variant by variant, with intervals for every difference."""
    from metakernelbench.analysis.compare import comparison, unlike

    sides = _sides(left, right, of, store, other_store, ratios)
    tables = comparison(sides)
    if as_json:
        return output.print_json(
            {
                "left": sides.left.name,
                "right": sides.right.name,
                "paired_by_model": sides.by_model,
                "notes": list(unlike(sides)),
                "tables": [table.to_dict() for table in tables],
            }
        )
    for note in unlike(sides):
        output.stderr.print(f"note: {harmless(note)}", markup=False)
    if csv or latex:
        return write(tables, csv=csv, latex=latex)
    return show([*tables[:-1], tables[-1].first(_SHOWN)])


def _sides(left: str, right: str, of: str | None, store: str | None, other: str | None, ratios: str) -> Sides:
    from metakernelbench.analysis.compare import two_models, two_studies

    if of is None:
        return two_studies(study(left, store, ratios=ratios), study(right, other or store, ratios=ratios))
    if other is not None:
        raise UserError("--other-store is for two experiments; --of names one", hint="leave --other-store out")
    return two_models(study(of, store, ratios=ratios), left, right)
