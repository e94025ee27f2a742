"""The tables and pictures about annotations as files: CSV and LaTeX, SVG, PNG, PDF and interactive HTML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from metakernelbench.analysis.annotations import annotated, cells
from metakernelbench.analysis.figures.annotations import annotation_pictures
from metakernelbench.analysis.figures.theme import INK, Picture, interactive, pdf, png, svg
from metakernelbench.analysis.tables import Table
from metakernelbench.annotation.results import Results
from metakernelbench.experiments.planned import Plan
from metakernelbench.files import write_whole, writing


def pictures(
    tables: Sequence[Table], plan: Plan, comparisons: pl.DataFrame, results: Results, band: float
) -> list[Picture]:
    """The pictures that these tables have the numbers for."""
    rows = annotated(plan, comparisons, results, band)
    return annotation_pictures({table.name: table.frame for table in tables}, cells(rows), comparisons)


def write_all(
    folder: Path,
    tables: Sequence[Table],
    plan: Plan,
    comparisons: pl.DataFrame,
    results: Results,
    band: float,
) -> None:
    """Write every table and picture. Raises `UserError` where the folder cannot be written."""
    files: dict[Path, bytes] = {}
    for table in tables:
        files[folder / "tables" / f"{table.name}.csv"] = table.to_csv().encode()
        files[folder / "tables" / f"{table.name}.tex"] = table.to_latex().encode()
    for picture in pictures(tables, plan, comparisons, results, band):
        path = folder / "pictures" / picture.name
        files[path.with_suffix(".svg")] = svg(picture.chart, ink=INK).encode()
        files[path.with_suffix(".png")] = png(picture.chart)
        files[path.with_suffix(".pdf")] = pdf(picture.chart)
        files[path.with_suffix(".html")] = interactive(picture).encode()
    with writing(folder, hint="choose another --out"):
        for path, data in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, data)
