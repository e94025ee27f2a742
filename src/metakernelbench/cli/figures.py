"""`mkb figures`: every picture of an experiment's outcome as files."""

from __future__ import annotations

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
from metakernelbench.errors import UnknownName, UserError
from metakernelbench.files import write_whole, writing

if TYPE_CHECKING:
    from metakernelbench.analysis.figures import Picture

app = typer.Typer(add_completion=False)

_FORMATS = ("svg", "png", "pdf", "html")


@app.command()
def figures(
    experiment: Annotated[str, typer.Argument(help=EXPERIMENT_HELP)],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write; made where it is missing.")],
    names: Annotated[list[str] | None, typer.Argument(metavar="PICTURE", help="Which; by default all.")] = None,
    formats: Annotated[
        str, typer.Option("--format", help="Some of svg, png, pdf and html (interactive), with commas between.")
    ] = "svg,png,pdf,html",
    store: StoreOption = None,
    design: DesignOption = None,
    ratios: RatiosOption = "measured",
    forgive: ForgiveOption = None,
) -> None:
    """Write an experiment's outcome as pictures; neither a browser nor a network is needed."""
    from metakernelbench.analysis.figures import pictures

    wanted = formats.split(",")
    for name in wanted:
        if name not in _FORMATS:
            raise UnknownName("format", name, _FORMATS)
    drawn = pictures(study(experiment, store, design=design, ratios=ratios, forgive=forgive))
    if not drawn:
        raise UserError(f"{experiment} has nothing to draw yet: no attempt has finished", hint="`mkb status` says more")
    for name in names or []:
        if name not in {picture.name for picture in drawn}:
            raise UnknownName("picture", name, [picture.name for picture in drawn])
    for picture in drawn:
        if not names or picture.name in names:
            _write(picture, folder, wanted)
            output.stdout.print(str(folder / picture.name), markup=False, soft_wrap=True)


def _write(picture: Picture, folder: Path, formats: list[str]) -> None:
    from metakernelbench.analysis.figures import INK, interactive, pdf, png, svg

    makers = {
        "svg": lambda: svg(picture.chart, ink=INK).encode(),
        "png": lambda: png(picture.chart),
        "pdf": lambda: pdf(picture.chart),
        "html": lambda: interactive(picture).encode(),
    }
    with writing(folder, hint="choose another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        for name in formats:
            write_whole(folder / f"{picture.name}.{name}", makers[name]())
