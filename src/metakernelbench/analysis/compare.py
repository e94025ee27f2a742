"""Two studies, or two models of one, side by side: paired by variant, so that hard problems weigh on both alike.

A variant counts where both sides judged it. Sides are compared by speedup over eager and not by time, because they may
have been graded on different days. Intervals are by bootstrap over problems, as everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from metakernelbench.analysis.frames import Frames
from metakernelbench.analysis.metrics import FAST, SPEEDUP_CAP, Array, Metric, harmed, helped, mean_metric, paired_ratio
from metakernelbench.analysis.outcome import ALL, judged
from metakernelbench.analysis.tables import Column, Table, estimates
from metakernelbench.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Sides:
    """What is compared with what."""

    left: Frames
    right: Frames
    by_model: bool
    """Whether rows are paired within each model; else each side is one model, and they are paired across."""


def two_models(study: Frames, left: str, right: str) -> Sides:
    """Two models of one study. Raises `UserError` for a model that has no attempt."""
    known = sorted(study.attempts["model"].unique())
    for model in (left, right):
        if model not in known:
            raise UserError(f"{study.name} has no model `{model}`", hint=f"it has {', '.join(f'`{m}`' for m in known)}")
    sides = [replace(study.of_model(model), name=model) for model in (left, right)]
    return Sides(left=sides[0], right=sides[1], by_model=False)


def two_studies(left: Frames, right: Frames) -> Sides:
    """Two studies, within the models that they share, or of one model each. Raises `UserError` for anything else."""
    models = [set(side.attempts["model"].unique()) for side in (left, right)]
    if left.name == right.name:
        left, right = replace(left, name=f"{left.name} (1)"), replace(right, name=f"{right.name} (2)")
    if models[0] & models[1]:
        return Sides(left=left, right=right, by_model=True)
    if len(models[0]) == len(models[1]) == 1:
        return Sides(left=left, right=right, by_model=False)
    raise UserError(
        f"{left.name} and {right.name} share no model, and one of them has several",
        hint="compare two models of one experiment: `mkb compare MODEL MODEL --of EXPERIMENT`",
    )


def comparison(sides: Sides) -> list[Table]:
    """The tables of a comparison: attempts alone, then the lift, then every variant. Raises `UserError` where nothing
    can be paired."""
    variants = solo_pairs(sides)
    if not variants.height:
        raise UserError(
            f"no variant is judged in both {sides.left.name} and {sides.right.name}",
            hint="they need a problem, a DSL and a replicate in common",
        )
    return [_solo(sides, variants), _lift(sides, lift_pairs(sides)), _variants(sides, variants)]


def unlike(sides: Sides) -> tuple[str, ...]:
    """In what the sides differ apart from what is compared, one sentence each: what a reader has to know first."""
    found = []
    for column, what in (("device", "devices"), ("workload", "workloads")):
        kinds = [sorted(side.attempts[column].drop_nulls().unique()) for side in (sides.left, sides.right)]
        if kinds[0] != kinds[1]:
            named = " and ".join(", ".join(some) or "none yet" for some in kinds)
            found.append(f"They were graded on different {what} ({named}): speedups do not compare.")
    questions = [side.contrasts[:1] for side in (sides.left, sides.right)]
    if questions[0] != questions[1]:
        named = " and ".join(":".join(some[0]) if some else "none" for some in questions)
        found.append(f"Their lifts answer different questions ({named}).")
    if sides.left.band != sides.right.band:
        found.append(
            f"Their indifference bands differ ({sides.left.band:g} and {sides.right.band:g}); "
            f"{sides.left.band:g} is used for both."
        )
    return tuple(found)


_PAIRED = ("problem", "replicate")


def solo_pairs(sides: Sides) -> pl.DataFrame:
    """One row a variant and replicate that both sides judged: what each reached, and ρ of the right over the left."""
    keys = [*_PAIRED, "dsl", *(["model"] if sides.by_model else [])]
    left, right = (
        _alone(study).select(*keys, "family", pl.col("speedup").alias(side), pl.col("key").alias(f"{side}_key"))
        for study, side in ((sides.left, "left"), (sides.right, "right"))
    )
    pairs = left.join(right.drop("family"), on=keys, how="inner").sort(keys)
    base, treat = (1 / pairs[side].cast(pl.Float64).fill_null(float("nan")).to_numpy() for side in ("left", "right"))
    rho = paired_ratio(base, treat, np.zeros(pairs.height, dtype=np.bool_))
    return pairs.with_columns(pl.Series("rho", rho, dtype=pl.Float64))


def _alone(study: Frames) -> pl.DataFrame:
    """The judged first solo attempts."""
    return study.attempts.filter((pl.col("label") == "solo") & (pl.col("state") != "unjudged"))


def lift_pairs(sides: Sides) -> pl.DataFrame:
    """One row a comparison of the main question that both sides judged, with both paired ratios."""
    keys = [*_PAIRED, "direction", *(["model"] if sides.by_model else [])]
    left, right = (
        judged(study.main).select(*keys, "family", pl.col("rho").alias(side))
        for study, side in ((sides.left, "left"), (sides.right, "right"))
    )
    return left.join(right.drop("family"), on=keys, how="inner").sort(keys)


def _both(rows: pl.DataFrame, **measures: tuple[pl.Expr, pl.Expr]) -> pl.DataFrame:
    """Columns `<name>_left`, `<name>_right` and `<name>_gap`, the right less the left."""
    for name, (left, right) in measures.items():
        columns = {f"{name}_left": left.cast(pl.Float64), f"{name}_right": right.cast(pl.Float64)}
        rows = rows.with_columns(**columns)
        rows = rows.with_columns((pl.col(f"{name}_right") - pl.col(f"{name}_left")).alias(f"{name}_gap"))
    return rows


def _table(rows: pl.DataFrame, by: Sequence[str], metrics: Sequence[Metric]) -> pl.DataFrame:
    """Each metric of the column of its own name, over all and for each group of each of `by`."""
    scopes = [rows.with_columns(pl.lit(ALL).alias("scope"))]
    for name in by:
        order = pl.col("problem").min().over(name) if name == "family" else pl.col(name)
        scopes.append(rows.sort(order, maintain_order=True).with_columns(pl.col(name).alias("scope")))
    parts = []
    for scope in scopes:
        frame = estimates(scope, metrics[0].name, metrics[:1], ["scope"])
        for metric in metrics[1:]:
            found = estimates(scope, metric.name, [metric], ["scope"]).drop("n", "problems")
            frame = frame.join(found, on="scope", maintain_order="left")
        parts.append(frame)
    return pl.concat(parts)


def _known_mean(name: str, meaning: str) -> Metric:
    """exp of the mean of the values that are known."""

    def known(column: Array) -> Array:
        return (~np.isnan(column)).astype(np.float64)

    return Metric(name=name, title=name, meaning=meaning, numerator=np.nan_to_num, denominator=known, transform=np.exp)


def _solo(sides: Sides, pairs: pl.DataFrame) -> Table:
    left, right = pl.col("left"), pl.col("right")
    rows = _both(
        pairs,
        passed=(left.is_not_null(), right.is_not_null()),
        fast=(left.fill_null(0) >= FAST, right.fill_null(0) >= FAST),
    ).with_columns(faster=(right.clip(upper_bound=SPEEDUP_CAP) / left.clip(upper_bound=SPEEDUP_CAP)).log())
    means = [
        mean_metric(f"{name}_{part}", what, proportion=part != "gap")
        for name, what in (("passed", "P"), ("fast", "R(2)"))
        for part in ("left", "right", "gap")
    ]
    frame = _table(rows, ["dsl", "family"], [*means, _known_mean("faster", "speedups, right over left")])
    counts = [
        (left.is_not_null() & right.is_not_null()).sum().alias("both"),
        (left.is_not_null() & right.is_null()).sum().alias("only_left"),
        (left.is_null() & right.is_not_null()).sum().alias("only_right"),
    ]
    counted = pl.concat(
        [pairs.select(pl.lit(ALL).alias("scope"), *counts)]
        + [pairs.group_by(pl.col(name).alias("scope")).agg(counts) for name in ("dsl", "family")]
    )
    names = sides.left.name, sides.right.name
    return Table(
        name="compare_solo",
        title=f"Attempts alone: {names[1]} against {names[0]}",
        note=f"Over variants that both judged{_left_out(sides, pairs)}. Differences are right less left. The last "
        "column is the geometric mean of the right speedup over the left one, where both passed, each capped at 100.",
        columns=(
            Column(name="scope", title="variants"),
            Column(name="n", title="n", kind="count"),
            *_trio("passed", "P", names),
            *_trio("fast", "R(2)", names),
            Column(name="both", title="both pass", kind="count"),
            Column(name="only_left", title=f"only {names[0]}", kind="count"),
            Column(name="only_right", title=f"only {names[1]}", kind="count"),
            Column(name="faster", title="speedup ratio", kind="factor", interval=True),
        ),
        frame=frame.join(counted, on="scope", maintain_order="left").with_columns(
            pl.col("both", "only_left", "only_right").cast(pl.Int64)
        ),
    )


def _left_out(sides: Sides, pairs: pl.DataFrame) -> str:
    counts = [_alone(study).height - pairs.height for study in (sides.left, sides.right)]
    if not any(counts):
        return ""
    return (
        f" (left out: {counts[0]:,} of {sides.left.name} and {counts[1]:,} of {sides.right.name} without a counterpart)"
    )


def _trio(name: str, title: str, names: tuple[str, str]) -> tuple[Column, ...]:
    return (
        Column(name=f"{name}_left", title=f"{title}, {names[0]}", kind="share"),
        Column(name=f"{name}_right", title=f"{title}, {names[1]}", kind="share"),
        Column(name=f"{name}_gap", title=f"{title}, difference", kind="lift", interval=True),
    )


def _lift(sides: Sides, pairs: pl.DataFrame) -> Table:
    band = sides.left.band
    for name, test in (("helped", helped), ("harmed", harmed)):
        columns = [pl.Series(f"{name}_{side}", test(pairs[side].to_numpy(), band)) for side in ("left", "right")]
        pairs = _both(pairs, **{name: (pl.lit(columns[0]), pl.lit(columns[1]))})
    rows = _both(pairs, log=(pl.col("left").log(), pl.col("right").log()))
    lifts = [_log_mean(f"log_{part}", "ΔGM") for part in ("left", "right", "gap")]
    shares = [
        mean_metric(f"{name}_{part}", name, proportion=part != "gap")
        for name in ("helped", "harmed")
        for part in ("left", "right", "gap")
    ]
    names = sides.left.name, sides.right.name
    return Table(
        name="compare_lift",
        title=f"Lift: {names[1]} against {names[0]}",
        note="Over comparisons that both judged. The difference of ΔGM is that of the geometric means, right over "
        f"left, less one; T and H count ratios above {1 + band:g} and below 1/{1 + band:g}, and their differences are "
        "right less left.",
        columns=(
            Column(name="scope", title="comparisons"),
            Column(name="n", title="n", kind="count"),
            Column(name="log_left", title=f"ΔGM, {names[0]}", kind="lift"),
            Column(name="log_right", title=f"ΔGM, {names[1]}", kind="lift"),
            Column(name="log_gap", title="ΔGM, difference", kind="lift", interval=True),
            *_trio("helped", "T", names),
            *_trio("harmed", "H", names),
        ),
        frame=_table(rows, ["direction", "family"], [*lifts, *shares]),
    )


def _log_mean(name: str, meaning: str) -> Metric:
    return replace(mean_metric(name, meaning), transform=np.expm1)


def _variants(sides: Sides, pairs: pl.DataFrame) -> Table:
    names = sides.left.name, sides.right.name
    return Table(
        name="compare_variants",
        title=f"Every variant: {names[1]} against {names[0]}",
        note="Speedups over eager; a dash is an attempt that did not pass. The ratio is right over left, kept between "
        "1/4 and 4, which also stand for a pass against a failure. The widest apart come first.",
        columns=(
            Column(name="problem", title="problem"),
            Column(name="dsl", title="DSL"),
            *([Column(name="model", title="model")] if sides.by_model else []),
            Column(name="replicate", title="replicate", kind="count", optional=True),
            Column(name="left", title=names[0], kind="factor"),
            Column(name="right", title=names[1], kind="factor"),
            Column(name="rho", title="ratio", kind="factor"),
        ),
        frame=pairs.sort(pl.col("rho").log().abs(), descending=True, maintain_order=True),
    )
