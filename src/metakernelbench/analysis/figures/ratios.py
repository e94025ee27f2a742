"""Paired ratios: every one of them as a mark in its problem's row."""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from metakernelbench.analysis.figures.theme import FAMILY_COLOURS, GREY, WIDTH
from metakernelbench.analysis.metrics import BAND, RATIO_LIMIT
from metakernelbench.analysis.outcome import judged

_SHAPES = {
    "both pass": "circle",
    "rescue": "triangle-up",
    "break": "triangle-down",
    "both fail": "cross",
    "skipped": "square",
}
_TICKS = (1 / RATIO_LIMIT, 0.5, 1, 2, RATIO_LIMIT)
_TICK_LABELS = "datum.value < 1 ? '1/' + round(1 / datum.value) : '' + datum.value"
_ROW, _ROW_OF_SEVERAL = 17, 18
"""Pixels of a problem's row, with one and with several models."""


def families_in_order(comparisons: pl.DataFrame) -> list[str]:
    """The families of a study, by their first problem."""
    return list(comparisons.sort("problem")["family"].unique(maintain_order=True))


def family_colour(families: list[str], *, legend: bool) -> alt.Color:
    """The same colour for a family in every picture of a study; `families` are all of the study's, in order."""
    return alt.Color(
        "family:N",
        scale=alt.Scale(domain=families, range=list(FAMILY_COLOURS[: len(families)])),
        legend=alt.Legend(orient="top", title=None, columns=3, symbolType="circle") if legend else None,
    )


def ratio_scale() -> dict[str, Any]:
    """The horizontal axis of every picture of paired ratios."""
    return {
        "scale": alt.Scale(type="log", domain=[0.23, 4.35], nice=False),
        "axis": alt.Axis(values=list(_TICKS), labelExpr=_TICK_LABELS, title="ρ: baseline time over treatment time"),
    }


def ratio_strip(comparisons: pl.DataFrame, families: list[str], *, band: float = BAND, legends: bool = False) -> Any:
    """Every paired ratio as a mark in its problem's row: right of the middle the skill helped, left of it it harmed.

    A column `link` makes the marks links. Rows are in the order of the problem numbers, the models one below the other
    within a row; `families` fixes the colours. With several marks in a row, an upright stroke shows their mean.
    """
    rows = judged(comparisons)
    problems = sorted(rows["problem"].unique())
    models = sorted(rows["model"].unique())
    several = rows.height > len(problems)
    columns = ["problem", "model", "family", "direction", "rho", "rho_from", "change"]
    base = alt.Chart(rows.select(*columns, *(["link"] if "link" in rows.columns else [])))
    y = alt.Y("problem:N", sort=problems, title=None, axis=alt.Axis(labelLimit=150), scale=alt.Scale(padding=0.04))
    colour = family_colour(families, legend=legends)
    shape = alt.Shape(
        "change:N",
        scale=alt.Scale(domain=list(_SHAPES), range=list(_SHAPES.values())),
        legend=alt.Legend(orient="top", title=None, columns=3, symbolFillColor=GREY) if legends else None,
    )
    words = {"problem": "problem", "model": "model", "direction": "direction", "change": "verdicts"}
    tooltip = [alt.Tooltip(f"{name}:N", title=title) for name, title in words.items()]
    marks = base.mark_point(filled=True, size=26 if several else 64, opacity=0.85).encode(
        x=alt.X("rho:Q", **ratio_scale()),
        y=y,
        color=colour,
        shape=shape,
        tooltip=[*tooltip, alt.Tooltip("rho:Q", format=".3f", title="ρ"), alt.Tooltip("rho_from:N", title="from")],
        **({"yOffset": alt.YOffset("model:N", sort=models)} if len(models) > 1 else {}),
        **({"href": alt.Href("link:N")} if "link" in rows.columns else {}),
    )
    if several:
        layers = [_stripes(problems, y), _neutral(band), _means(rows, y), marks]
    else:
        layers = [_neutral(band), _stems(base, y, colour), marks]
    height = max(2, len(problems)) * (_ROW_OF_SEVERAL if several else _ROW)
    return alt.layer(*layers).properties(width=WIDTH, height=height)


def _neutral(band: float) -> Any:
    """The indifference band, shaded."""
    edges = pl.DataFrame({"low": [1 / (1 + band)], "high": [1 + band]})
    return alt.Chart(edges).mark_rect(color=GREY, opacity=0.25).encode(x=alt.X("low:Q", **ratio_scale()), x2="high:Q")


def _stripes(problems: list[str], y: alt.Y) -> Any:
    """Every other row, shaded, so that the eye keeps to a row."""
    return alt.Chart(pl.DataFrame({"problem": problems[1::2]})).mark_rect(color=GREY, opacity=0.12).encode(y=y)


def _stems(base: Any, y: alt.Y, colour: alt.Color) -> Any:
    stems = base.transform_calculate(one="1").mark_rule(opacity=0.35)
    return stems.encode(x=alt.X("one:Q", **ratio_scale()), x2="rho:Q", y=y, color=colour)


def _means(rows: pl.DataFrame, y: alt.Y) -> Any:
    means = rows.group_by("problem").agg(pl.col("rho").log().mean().exp(), pl.len().alias("n"))
    strokes = alt.Chart(means).mark_tick(thickness=2, size=_ROW_OF_SEVERAL - 4, opacity=0.7)
    tooltip = [alt.Tooltip("problem:N"), alt.Tooltip("rho:Q", format=".3f", title="mean ρ"), alt.Tooltip("n:Q")]
    return strokes.encode(x=alt.X("rho:Q", **ratio_scale()), y=y, tooltip=tooltip)
