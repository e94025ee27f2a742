"""Attempts: submissions over time, the best speedup so far, and how near passing kernels come to the roofline."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import polars as pl

from metakernelbench.analysis.figures.ratios import family_colour
from metakernelbench.analysis.figures.theme import ARM_COLOURS, GREY, OUTCOME_COLOURS, PERCENT, WIDTH

_MINUTE = 60.0
MOST_LINES = 150
"""With more attempts than this their lines would hide each other, and only quartiles are drawn."""
_SENT = {"passed": OUTCOME_COLOURS["help"], "failed": OUTCOME_COLOURS["harm"], "not counted": GREY}


def submissions_over_time(submissions: pl.DataFrame) -> Any:
    """How many submissions were sent in each two minutes, by what came of them."""
    kind = (
        pl.when(pl.col("number").is_null() | pl.col("passed").is_null())
        .then(pl.lit("not counted"))
        .when(pl.col("passed"))
        .then(pl.lit("passed"))
        .otherwise(pl.lit("failed"))
    )
    start = (pl.col("requested_s") / (2 * _MINUTE)).floor() * 2
    rows = submissions.with_columns(kind.alias("kind"), start.alias("start"))
    order = pl.DataFrame({"kind": list(_SENT), "order": range(len(_SENT))})
    counts = rows.group_by("start", "kind").len("count").join(order, on="kind").sort("start", "order")
    counts = counts.with_columns(
        end=pl.col("start") + 2, top=pl.col("count").cum_sum().over("start"), order=pl.col("order").cast(pl.Int64)
    ).with_columns(bottom=pl.col("top") - pl.col("count"))
    kinds = [name for name in _SENT if name in set(counts["kind"])]
    scale = alt.Scale(domain=kinds, range=[_SENT[name] for name in kinds])
    return (
        alt.Chart(counts)
        .mark_bar(stroke="white", strokeWidth=0.5)
        .encode(
            x=alt.X("start:Q", title="minutes since the attempt began", axis=alt.Axis(format="d")),
            x2="end:Q",
            y=alt.Y("bottom:Q", title="submissions"),
            y2="top:Q",
            color=alt.Color("kind:N", scale=scale, legend=alt.Legend(orient="top", title=None)),
            tooltip=[alt.Tooltip("start:Q", title="from minute"), alt.Tooltip("kind:N"), alt.Tooltip("count:Q")],
        )
        .properties(width=WIDTH, height=150)
    )


def best_so_far(attempts: pl.DataFrame, submissions: pl.DataFrame) -> pl.DataFrame:
    """One row a passing submission that is faster than all before it in its attempt: `key`, `arm`, `minute`, `best`."""
    arms = attempts.select("key", "arm", "problem", "dsl", "model")
    passing = submissions.filter(pl.col("speedup").is_not_null()).join(arms, on="key").sort("key", "requested_s")
    passing = passing.with_columns(best=pl.col("speedup").cum_max().over("key"))
    earlier = pl.col("best").shift(1).over("key")
    better = passing.filter(earlier.is_null() | (pl.col("best") > earlier))
    return better.with_columns(minute=pl.col("requested_s") / _MINUTE)


def best_over_time(attempts: pl.DataFrame, submissions: pl.DataFrame) -> Any:
    """The best speedup so far over the time of an attempt: quartiles by arm, and every attempt's line where they are
    few. An attempt without a passing submission yet stands below all others."""
    ran = attempts.filter(pl.col("state").is_in(["passed", "failed"]))
    steps = best_so_far(ran, submissions)
    end = float(submissions["requested_s"].max() or 0) / _MINUTE  # type: ignore[arg-type]
    layers = _quartiles(ran, steps, end)
    if ran.height <= MOST_LINES:
        layers = [_lines(steps, end), layers[-1]]
    return alt.layer(*layers).properties(width=WIDTH, height=220)


def _time(end: float) -> alt.X:
    title = "minutes since the attempt began"
    return alt.X("minute:Q", title=title, axis=alt.Axis(format="d"), scale=alt.Scale(domain=[0, end], nice=False))


def _best(name: str) -> alt.Y:
    scale = alt.Scale(type="log", nice=False, zero=False)
    return alt.Y(f"{name}:Q", title="best speedup so far", scale=scale, axis=speedup_axis())


def speedup_axis() -> alt.Axis:
    """Of a logarithmic scale of speedups."""
    return alt.Axis(values=[0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100], format="~g", labelExpr="datum.label + '×'")


def _arm() -> alt.Color:
    scale = alt.Scale(domain=list(ARM_COLOURS), range=list(ARM_COLOURS.values()))
    return alt.Color("arm:N", scale=scale, legend=alt.Legend(orient="top", title=None, symbolType="stroke"))


def _lines(steps: pl.DataFrame, end: float) -> Any:
    """Every attempt as a staircase, drawn on to the end of time."""
    last = steps.group_by("key", maintain_order=True).last().with_columns(minute=pl.lit(end))
    rows = pl.concat([steps, last.select(steps.columns)])
    return (
        alt.Chart(rows.select("key", "arm", "minute", "best"))
        .mark_line(interpolate="step-after", strokeWidth=1, opacity=0.35)
        .encode(
            x=_time(end),
            y=_best("best"),
            color=_arm(),
            detail="key:N",
            tooltip=[alt.Tooltip("key:N", title="attempt"), alt.Tooltip("best:Q", format=".2f")],
        )
    )


def _quartiles(ran: pl.DataFrame, steps: pl.DataFrame, end: float) -> list[Any]:
    """Quartiles over all attempts of an arm, from when they are of attempts that have passed; the median last."""
    rows = pl.concat([_quartiles_of(ran, steps, arm, end) for arm in ARM_COLOURS])
    dashes = alt.StrokeDash(
        "arm:N",
        scale=alt.Scale(domain=list(ARM_COLOURS), range=[[5, 3], [1, 0]]),
        legend=alt.Legend(orient="top", title=None),
    )
    layers = []
    for name, width in (("low", 1), ("high", 1), ("middle", 3)):
        known = alt.Chart(rows.filter(pl.col(name).is_not_null()).select("arm", "minute", name))
        lines = known.mark_line(interpolate="step-after", strokeWidth=width)
        layers.append(lines.encode(x=_time(end), y=_best(name), color=_arm(), strokeDash=dashes))
    return layers


def _quartiles_of(ran: pl.DataFrame, steps: pl.DataFrame, arm: str, end: float) -> pl.DataFrame:
    """Quartiles of one arm minute by minute; null where a quartile is of attempts that have not passed yet."""
    keys = ran.filter(pl.col("arm") == arm)["key"]
    place = {key: at for at, key in enumerate(keys)}
    minutes = np.append(np.arange(0, end), end)
    best = np.zeros((len(keys), len(minutes)))  # zero while nothing has passed
    for key, minute, speedup in steps.filter(pl.col("arm") == arm).select("key", "minute", "best").iter_rows():
        best[place[key], minutes >= minute] = speedup
    names = ("low", "middle", "high")
    schema = {"arm": pl.String, "minute": pl.Float64} | dict.fromkeys(names, pl.Float64)
    if not len(keys):
        return pl.DataFrame(schema=schema)
    quartiles = np.quantile(best, [0.25, 0.5, 0.75], axis=0, method="inverted_cdf")
    found = dict(zip(names, quartiles, strict=True))
    frame = pl.DataFrame({"arm": [arm] * len(minutes), "minute": minutes, **found}, schema=schema)
    return frame.with_columns(pl.when(pl.col(name) > 0).then(name).alias(name) for name in names)


def roofline(attempts: pl.DataFrame, families: list[str]) -> Any:
    """Every passing attempt: its speedup against the share of the roofline bound that its kernel reaches."""
    rows = attempts.filter((pl.col("state") == "passed") & pl.col("roofline").is_not_null())
    columns = ["problem", "family", "dsl", "model", "arm", "speedup", "roofline"]
    dsls = sorted(rows["dsl"].unique())
    shapes = alt.Scale(domain=dsls, range=["circle", "diamond", "triangle-up", "square"][: len(dsls)])
    shares = alt.Axis(values=[0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1], labelExpr=PERCENT)
    reached = alt.X(
        "roofline:Q",
        title="roofline bound over measured time",
        scale=alt.Scale(type="log", nice=False, padding=6),
        axis=shares,
    )
    faster = alt.Y(
        "speedup:Q",
        title="speedup over eager",
        scale=alt.Scale(type="log", nice=False, padding=6),
        axis=speedup_axis(),
    )
    words = [alt.Tooltip(f"{name}:N") for name in ("problem", "dsl", "model", "arm")]
    return (
        alt.Chart(rows.select(columns))
        .mark_point(filled=True, size=28, opacity=0.6, aria=False)  # a description a mark would double the file
        .encode(
            x=reached,
            y=faster,
            color=family_colour(families, legend=True),
            shape=alt.Shape("dsl:N", scale=shapes, legend=alt.Legend(orient="top", title=None, symbolFillColor=GREY)),
            tooltip=[*words, alt.Tooltip("speedup:Q", format=".2f"), alt.Tooltip("roofline:Q", format=".0%")],
        )
        .properties(width=WIDTH, height=WIDTH)
    )
