"""Lifts: what share of comparisons was helped and harmed, and ΔGM with its interval by group, standing and tiers."""

from __future__ import annotations

from math import ceil, log1p
from typing import Any

import altair as alt
import polars as pl

from metakernelbench.analysis.comparisons import TIERS
from metakernelbench.analysis.figures.theme import INK, OUTCOME_COLOURS, PERCENT, STEPS, WIDTH
from metakernelbench.analysis.outcome import ALL
from metakernelbench.analysis.standing import STANDINGS
from metakernelbench.analysis.tables import number

_LEAST_LABELLED = 0.08
"""A share below this has no room for its number."""


def outcome_bars(lift: pl.DataFrame, by: str) -> Any:
    """Help, neutral and harm as shares of each group's comparisons: the frame of a `lift` table."""
    rows = lift.filter(pl.col("n") > 0).with_columns(pl.format("{} (n = {})", by, "n").alias("group"))
    shares = pl.DataFrame(
        [share for row in rows.iter_rows(named=True) for share in _shares(row)],
        schema={"group": pl.String, "outcome": pl.String, "share": pl.Float64, "start": pl.Float64, "end": pl.Float64},
    )
    shown = pl.format("{} %", (100 * pl.col("share")).round().cast(pl.Int64))
    middle = (pl.col("start") + pl.col("end")) / 2
    base = alt.Chart(shares.filter(pl.col("share") > 0).with_columns(middle=middle, shown=shown))
    y = alt.Y("group:N", sort=list(rows["group"]), title=None, axis=alt.Axis(labelLimit=200))
    axis = alt.Axis(labelExpr=PERCENT, values=[0, 0.25, 0.5, 0.75, 1])
    colours = alt.Scale(domain=list(OUTCOME_COLOURS), range=list(OUTCOME_COLOURS.values()))
    bars = base.mark_bar(height=20, stroke="white", strokeWidth=1).encode(
        y=y,
        x=alt.X("start:Q", title=None, axis=axis, scale=alt.Scale(domain=[0, 1])),
        x2="end:Q",
        color=alt.Color("outcome:N", scale=colours, legend=alt.Legend(orient="top", title=None)),
        tooltip=[alt.Tooltip("group:N"), alt.Tooltip("outcome:N"), alt.Tooltip("share:Q", format=".1%")],
    )
    inks = alt.Scale(domain=list(OUTCOME_COLOURS), range=["white", INK, "white"])
    labels = base.transform_filter(alt.datum.share >= _LEAST_LABELLED).mark_text(fontSize=11)
    labels = labels.encode(y=y, x="middle:Q", text="shown:N", color=alt.Color("outcome:N", scale=inks, legend=None))
    return alt.layer(bars, labels).resolve_scale(color="independent").properties(width=WIDTH, height=alt.Step(28))


def _shares(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The three shares of a group, one behind the other."""
    found, start = [], 0.0
    for outcome in OUTCOME_COLOURS:
        end = min(1.0, start + row[outcome])
        found.append({"group": row["group"], "outcome": outcome, "share": row[outcome], "start": start, "end": end})
        start = end
    return found


def lift_axis(frame: pl.DataFrame) -> dict[str, Any]:
    """A logarithmic axis of 1 + ΔGM, symmetric about no lift, on which every interval of the frame fits."""
    columns = [name for name in ("lift", "lift_low", "lift_high", "chance") if name in frame.columns]
    known = [value for name in columns for value in frame[name].drop_nulls() if value > -1]
    most = max((abs(log1p(value)) for value in known), default=0.1)
    limit = 2 ** (ceil(4 * most / 0.6931 + 0.2) / 4)
    ticks = next(ticks for least, ticks in _TICKS if limit >= least)
    shown = [tick for tick in ticks if 1 / limit <= tick <= limit]
    return {
        "scale": alt.Scale(type="log", domain=[1 / limit, limit], nice=False),
        "axis": alt.Axis(values=shown, labelExpr=_LIFT_LABELS, title="ΔGM, paired lift"),
    }


_TICKS = (
    (3.5, (0.1, 0.25, 0.5, 1, 2, 4, 10)),
    (2.0, (0.35, 0.5, 0.7, 1, 1.4, 2, 2.8)),
    (1.4, (0.5, 0.6, 0.8, 1, 1.25, 1.6, 2)),
    (1.0, (0.8, 0.9, 1, 1.1, 1.25)),
)
"""From which ratio at the end of an axis on, which ratios have a label: few enough for a phone, and always 1."""
_LIFT_LABELS = "(datum.value > 1 ? '+' : datum.value < 1 ? '−' : '') + round(abs(datum.value - 1) * 100) + ' %'"


def _as_ratios(frame: pl.DataFrame) -> pl.DataFrame:
    """ΔGM + 1, for a logarithmic axis, with what the pointer shows."""
    names = [name for name in ("lift", "lift_low", "lift_high", "chance") if name in frame.columns]
    shown = [
        f"{number(row['lift'], 'lift')} [{number(row['lift_low'], 'lift')}, {number(row['lift_high'], 'lift')}]"
        for row in frame.iter_rows(named=True)
    ]
    return frame.with_columns(*(pl.col(name) + 1 for name in names), pl.Series("shown", shown, dtype=pl.String))


def _dots(base: Any, y: Any, x: dict[str, Any], group: str) -> tuple[Any, Any, Any]:
    """A line at no lift, intervals, and marks."""
    tooltip = [alt.Tooltip(f"{group}:N"), alt.Tooltip("shown:N", title="ΔGM"), alt.Tooltip("n:Q")]
    zero = base.transform_calculate(one="1").mark_rule(opacity=0.5, strokeDash=[3, 3]).encode(x=alt.X("one:Q", **x))
    lines = base.mark_rule(strokeWidth=1.5).encode(x=alt.X("lift_low:Q", **x), x2="lift_high:Q", y=y)
    lines = lines.transform_filter("isValid(datum.lift_low)")
    marks = base.mark_point(filled=True, size=70, opacity=1).encode(x=alt.X("lift:Q", **x), y=y, tooltip=tooltip)
    kinds = alt.Color(
        "sign:N",
        scale=alt.Scale(domain=list(OUTCOME_COLOURS), range=list(OUTCOME_COLOURS.values())),
        legend=None,
    )
    return zero, lines.encode(color=kinds), marks.encode(color=kinds)


def _with_sign(frame: pl.DataFrame) -> pl.DataFrame:
    """`help` or `harm` where the whole interval lies on that side of no lift."""
    sign = pl.when(pl.col("lift_low") > 0).then(pl.lit("help")).when(pl.col("lift_high") < 0).then(pl.lit("harm"))
    return frame.with_columns(sign.otherwise(pl.lit("neutral")).alias("sign"))


def lift_dots(parts: list[tuple[str, pl.DataFrame]]) -> Any:
    """ΔGM with its interval for every group of several lift tables, given as (name of the column, frame)."""
    columns = ["group", "kind", "n", "lift", "lift_low", "lift_high"]
    frames = [
        frame.with_columns(group=pl.col(by), kind=pl.lit(by)).select(columns).filter(pl.col("n") > 0)
        for by, frame in parts
    ]
    rows = pl.concat(frames).unique("group", keep="first", maintain_order=True)
    rows = rows.with_columns(kind=pl.when(pl.col("group") == ALL).then(pl.lit("")).otherwise("kind"))
    chart = alt.Chart(_as_ratios(_with_sign(rows)))
    y = alt.Y("group:N", sort=list(rows["group"]), title=None, axis=alt.Axis(labelLimit=200))
    return alt.layer(*_dots(chart, y, lift_axis(rows), "group")).properties(width=WIDTH, height=alt.Step(20))


def standing_panels(standing: pl.DataFrame) -> Any:
    """ΔGM by model where the source stood below, at and above the baseline's tier, one panel each; the upright strokes
    are what choosing rows by their baseline gives by chance. Takes the frame of the table `standing`."""
    x = lift_axis(standing)
    models = list(standing["model"].unique(maintain_order=True))
    panels = []
    for name in STANDINGS:
        rows = _as_ratios(_with_sign(standing.filter(pl.col("standing") == name)))
        if not rows.height:
            continue
        base = alt.Chart(rows)
        last = name == standing["standing"].unique(maintain_order=True).to_list()[-1]
        here = x if last else x | {"axis": alt.Axis(values=x["axis"].values, labels=False, title=None)}
        y = alt.Y("model:N", sort=models, title=None, axis=alt.Axis(labelLimit=200))
        chance = base.mark_tick(thickness=2, size=15, opacity=1).encode(
            x=alt.X("chance:Q", **here), y=y, tooltip=[alt.Tooltip("model:N"), alt.Tooltip("chance:Q", format=".2f")]
        )
        title = f"source {name} the baseline's tier (n = {_pooled(rows)})"
        panel = alt.layer(chance, *_dots(base, y, here, "model")).properties(
            width=WIDTH, height=alt.Step(18), title=title
        )
        panels.append(panel)
    return alt.vconcat(*panels, spacing=8)


def _pooled(rows: pl.DataFrame) -> int:
    return int(rows.filter(pl.col("model") == ALL)["n"].sum())


def tier_map(tier_pairs: pl.DataFrame) -> Any:
    """ΔGM for each tier of the solo attempt and of the source as a map, each field with its number, what chance gives,
    and how many comparisons it is from. Takes the frame of the table `tier_pairs`."""
    by_chance = [f"chance {number(value, 'lift')}" for value in tier_pairs["chance"]]
    rows = tier_pairs.with_columns(
        pl.col("lift").log1p().alias("ratio"),
        pl.Series("shown", [number(value, "lift") for value in tier_pairs["lift"]], dtype=pl.String),
        pl.Series("by_chance", by_chance, dtype=pl.String),
        pl.format("n = {}", "n").alias("count"),
    )
    limit = max((abs(value) for value in rows["ratio"].drop_nulls()), default=1.0)
    order = list(TIERS)
    base = alt.Chart(rows).encode(
        x=alt.X("source_tier:N", sort=order, title="tier of the source", axis=alt.Axis(labelAngle=0, ticks=False)),
        y=alt.Y("baseline_tier:N", sort=order[::-1], title="tier of the solo attempt", axis=alt.Axis(ticks=False)),
    )
    scale = alt.Scale(domain=[-limit, -limit / 2, 0, limit / 2, limit], range=list(STEPS))
    fields = base.mark_rect(stroke="white", strokeWidth=2).encode(
        color=alt.Color("ratio:Q", scale=scale, legend=None),
        tooltip=[alt.Tooltip(f"{name}:N") for name in ("baseline_tier", "source_tier", "shown", "by_chance", "count")],
    )
    dark = f"abs(datum.ratio) > {0.75 * limit}"
    ink = alt.condition(dark, alt.value("white"), alt.value(INK))
    lines = (("shown", 15, -16), ("by_chance", 10.5, 4), ("count", 10.5, 19))
    texts = [base.mark_text(fontSize=size, dy=down).encode(text=f"{name}:N", color=ink) for name, size, down in lines]
    return alt.layer(fields, *texts).properties(width=WIDTH, height=210)
