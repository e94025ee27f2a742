"""Pictures of what skills contained and how they were used, drawn from the frames of the tables about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import polars as pl

from metakernelbench.analysis.figures.ratios import families_in_order
from metakernelbench.analysis.figures.theme import (
    BLUE,
    FAMILY_COLOURS,
    GREY,
    INK,
    ORANGE,
    OUTCOME_COLOURS,
    SERIES,
    SKY,
    VERMILLION,
    WIDTH,
    Picture,
)
from metakernelbench.annotation.rubric import NO_CAUSE, taxonomy

_WORDS = {"harm": "harmed", "help": "helped"}
_PERCENT = "%"
_UPTAKE_COLOURS = (BLUE, SKY, ORANGE, VERMILLION, GREY)
"""From followed fully to no occasion, in the taxonomy's order."""
_DARK = (BLUE, VERMILLION, "#009E73")
"""Colours on which white reads better than ink."""


def category_prevalence(frame: pl.DataFrame) -> Picture:
    """Share of harmed and of helped comparisons whose skill holds a category, with intervals: two marks a row. `frame`
    is that of the table `category_prevalence`."""
    columns = ("harm", "harm_low", "harm_high", "help", "help_low", "help_high")
    parts = []
    for outcome in ("harm", "help"):
        names = {f"{outcome}{end}": f"share{end}" for end in ("", "_low", "_high")}
        part = frame.select("category", *(c for c in columns if c in names)).rename(names)
        parts.append(part.with_columns(pl.lit(_WORDS[outcome]).alias("outcome")))
    rows = pl.concat(parts).filter(pl.col("share").is_not_null())
    colour = alt.Color(
        "outcome:N",
        scale=alt.Scale(domain=list(_WORDS.values()), range=[OUTCOME_COLOURS[outcome] for outcome in _WORDS]),
        legend=alt.Legend(orient="top", title=None),
    )
    shape = alt.Shape("outcome:N", scale=alt.Scale(domain=list(_WORDS.values()), range=["diamond", "circle"]))
    axis = alt.Axis(format=_PERCENT, title="share of comparisons whose skill holds it")
    base = alt.Chart(rows).encode(
        y=alt.Y("category:N", sort=list(frame["category"]), title=None, axis=alt.Axis(labelLimit=200)),
        yOffset=alt.YOffset("outcome:N", sort=list(_WORDS.values())),
    )
    lines = base.mark_rule(opacity=0.6).encode(
        x=alt.X("share_low:Q", scale=alt.Scale(domain=[0, 1]), axis=axis), x2="share_high:Q", color=colour
    )  # fmt: skip
    marks = base.mark_point(filled=True, size=60, opacity=1).encode(
        x=alt.X("share:Q", scale=alt.Scale(domain=[0, 1]), axis=axis),
        color=colour,
        shape=shape,
        tooltip=[alt.Tooltip("category:N"), alt.Tooltip("outcome:N"), alt.Tooltip("share:Q", format=".1%")],
    )
    return Picture(
        name="category-prevalence",
        title="What the skills held, harmed against helped",
        note="Each row is a category: the share of harmed (diamond) and of helped (circle) comparisons whose source "
        "skill holds it. Lines are 95 % intervals over problems; without enough problems there are none.",
        chart=(lines + marks).properties(width=WIDTH, height=alt.Step(14)),
    )


def uptake_shares(frame: pl.DataFrame) -> Picture:
    """What became of the statements, as shares by outcome. `frame` is that of the table `uptake_by_outcome`."""
    titles = {one.id: one.title for one in taxonomy().uptake}
    rows = frame.filter(pl.col("n") > 0).with_columns(pl.format("{} (n = {})", "outcome", "n").alias("group"))
    return Picture(
        name="uptake-shares",
        title="What became of the skills' statements",
        note="Of every pair of a treatment and a category of the skill that it was given: followed, ignored, "
        "contradicted, or no occasion. Bars by what became of the comparison.",
        chart=_stacked(rows, titles, "uptake", _UPTAKE_COLOURS),
    )


def cause_shares(frame: pl.DataFrame) -> Picture:
    """What went wrong in the harmed comparisons, as shares by model. `frame` is that of the table `causes_by_model`."""
    titles = taxonomy().cause_titles | {NO_CAUSE: "none found"}
    known = frame.with_columns((pl.col("n") - pl.col("open")).alias("known")).filter(pl.col("known") > 0)
    rows = known.with_columns(
        pl.format("{} (n = {})", "model", "known").alias("group"),
        *(pl.col(word) / pl.col("known") for word in titles),
    )
    return Picture(
        name="cause-shares",
        title="What went wrong, by model",
        note="Harmed comparisons by the first cause on the target's side, in the order of precedence. n counts those "
        "whose cause is known.",
        chart=_stacked(rows, titles, "cause", SERIES),
    )


def _stacked(rows: pl.DataFrame, titles: dict[str, str], what: str, colours: Sequence[str]) -> Any:
    """A bar of shares for each `group`: the columns that `titles` names, in its order, with a number where it fits."""
    order = {word: place for place, word in enumerate(titles)}
    inks = {word: "white" if colour in _DARK else INK for word, colour in zip(titles, colours, strict=False)}
    shares = rows.unpivot(on=list(titles), index="group", variable_name="word", value_name="share")
    shares = shares.filter(pl.col("share") > 0).with_columns(
        pl.col("word").replace_strict(titles, return_dtype=pl.String).alias(what),
        pl.col("word").replace_strict(order, return_dtype=pl.Int64).alias("order"),
        pl.col("word").replace_strict(inks, return_dtype=pl.String).alias("ink"),
    )
    base = alt.Chart(shares).encode(
        y=alt.Y("group:N", sort=list(rows["group"]), title=None, axis=alt.Axis(labelLimit=200)),
        x=alt.X("share:Q", stack="zero", title=None, scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format=_PERCENT)),
        order=alt.Order("order:Q"),
    )
    bars = base.mark_bar(height=20, stroke="white", strokeWidth=1).encode(
        color=alt.Color(
            f"{what}:N",
            scale=alt.Scale(domain=list(titles.values()), range=list(colours[: len(titles)])),
            legend=alt.Legend(orient="top", title=None, columns=2, labelLimit=240),
        ),
        tooltip=[alt.Tooltip("group:N"), alt.Tooltip(f"{what}:N"), alt.Tooltip("share:Q", format=".1%")],
    )
    numbers = base.mark_text(fontWeight="bold").encode(
        x=alt.X("share:Q", stack="zero", bandPosition=0.5),
        text=alt.Text("label:N"),
        color=alt.Color("ink:N", scale=None),
    )  # fmt: skip
    labelled = numbers.transform_calculate(label="datum.share >= 0.08 ? format(datum.share, '.0%') : ''")
    return (bars + labelled).properties(width=WIDTH, height=alt.Step(30))


def uptake_against_lift(cells: pl.DataFrame, comparisons: pl.DataFrame) -> Picture:
    """A mark for every model and family: the share of its skills that was taken up, and its lift. `cells` is what
    `analysis.annotations.cells` gives."""
    families = families_in_order(comparisons)
    models = sorted(cells["model"].unique())
    colour = alt.Color(
        "family:N",
        scale=alt.Scale(domain=families, range=list(FAMILY_COLOURS[: len(families)])),
        legend=alt.Legend(orient="right", title="family"),
    )
    shape = alt.Shape("model:N", scale=alt.Scale(domain=models), legend=alt.Legend(orient="right", title="model"))
    marks = alt.Chart(cells).mark_point(filled=True, opacity=0.85).encode(
        x=alt.X("uptake:Q", title="share of the skills' categories that was taken up", axis=alt.Axis(format=_PERCENT),
                scale=alt.Scale(domain=[0, 1])),
        y=alt.Y("lift:Q", title="ΔGM", axis=alt.Axis(format="+.0%")),
        size=alt.Size("n:Q", legend=None, scale=alt.Scale(range=[50, 240])),
        color=colour,
        shape=shape,
        tooltip=[alt.Tooltip("model:N"), alt.Tooltip("family:N"), alt.Tooltip("n:Q"),
                 alt.Tooltip("uptake:Q", format=".1%"), alt.Tooltip("lift:Q", format="+.1%")],
    )  # fmt: skip
    zero = alt.Chart(pl.DataFrame({"lift": [0.0]})).mark_rule(strokeDash=[4, 3], opacity=0.6).encode(y="lift:Q")
    return Picture(
        name="uptake-against-lift",
        title="Uptake against lift",
        note="Each mark is a model and family: how much of the attached skills was taken up, against the lift of the "
        "same comparisons. Larger marks stand for more comparisons; the dashed line is no lift.",
        chart=(zero + marks).properties(width=WIDTH, height=260),
    )


def annotation_pictures(
    tables: Mapping[str, pl.DataFrame], cells: pl.DataFrame, comparisons: pl.DataFrame
) -> list[Picture]:
    """The pictures for which there are tables: name → frame, as `annotation_tables` made them."""
    drawn = []
    if "category_prevalence" in tables and tables["category_prevalence"]["harm"].count():
        drawn.append(category_prevalence(tables["category_prevalence"]))
    if "uptake_by_outcome" in tables and tables["uptake_by_outcome"]["n"].sum():
        drawn.append(uptake_shares(tables["uptake_by_outcome"]))
    if "causes_by_model" in tables and tables["causes_by_model"].height:
        drawn.append(cause_shares(tables["causes_by_model"]))
    if cells.height:
        drawn.append(uptake_against_lift(cells, comparisons))
    return drawn
