"""Where the source stood against the baseline, whether the two directions go together, and whether a treatment follows
its source: the tables that say when a skill helps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl

from metakernelbench.analysis.comparisons import TIERS
from metakernelbench.analysis.metrics import BAND, FLOOR, Array, lift_metrics, mean_metric
from metakernelbench.analysis.outcome import ALL, judged, outcomes
from metakernelbench.analysis.resampling import RankTest, Tracked, sign_flip_test, spearman, swap_test
from metakernelbench.analysis.tables import Column, Table, estimates, metric_columns

STANDINGS = ("below", "at", "above")
"""The source's tier against the baseline's."""

_N = Column(name="n", title="n", kind="count", meaning="comparisons with a paired ratio")


def with_standing(comparisons: pl.DataFrame) -> pl.DataFrame:
    """Judged comparisons whose source was judged too, with the source's standing."""
    return judged(comparisons).filter(pl.col("source_tier").is_not_null()).with_columns(_standing())


def _standing() -> pl.Expr:
    step = (pl.col("source_tier") - pl.col("baseline_tier")).sign()
    names = pl.when(step < 0).then(pl.lit("below")).when(step > 0).then(pl.lit("above")).otherwise(pl.lit("at"))
    return names.alias("standing")


def standing(comparisons: pl.DataFrame, band: float = BAND) -> Table:
    """Lift by whether the source stood below, at or above the baseline's tier, by model and pooled."""
    rows = with_standing(comparisons)
    by = ["model", "standing"]
    metrics = lift_metrics(band)
    parts = [rows.with_columns(pl.lit(ALL).alias("model"))]
    if rows["model"].n_unique() > 1:
        parts.append(rows)
    order = pl.col("standing").replace_strict(dict(zip(STANDINGS, range(3), strict=True)), return_dtype=pl.Int64)
    frame = pl.concat([estimates(p.sort("model", order, maintain_order=True), "rho", metrics, by) for p in parts])
    chance = pl.concat([_by_chance(part, by) for part in parts])
    return Table(
        name="standing",
        title="Lift by the source's standing",
        note="Tiers are failed, below 2×, and 2× or better. Below: the source's tier was lower than the baseline's. "
        + _ON_CHANCE,
        columns=(
            Column(name="model", title="model"),
            Column(name="standing", title="source stood"),
            _N,
            *metric_columns(metrics),
            _CHANCE,
        ),
        frame=frame.join(chance, on=by, how="left", maintain_order="left"),
    )


_CHANCE = Column(name="chance", title="ΔGM by chance", kind="lift", meaning="of the same rows, arms swapped at random")
_ON_CHANCE = (
    "Rows are chosen by how the baseline did, and a baseline that did badly by chance is easily bettered: the last "
    "column is what the same comparisons give on average when the two arms of each are swapped at random."
)


def _by_chance(rows: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    """The lift that choosing rows by their baseline gives alone: of every comparison as it is and with its arms
    swapped, sorted into groups by whichever arm is then the baseline.

    Of (solo 2× or better, source failed, ρ 1/4 by a break), the swap is (solo failed, source failed, ρ 4): it counts
    under `at` as 4 and under `below` as 1/4.
    """
    swapped = rows.with_columns(rho=1 / pl.col("rho"), baseline_tier="treatment_tier", treatment_tier="baseline_tier")
    both = pl.concat([rows, swapped]).with_columns(_standing())
    return both.group_by(by).agg(chance=pl.col("rho").log().mean().exp() - 1)


def tier_pairs(comparisons: pl.DataFrame, band: float = BAND) -> Table:
    """Lift for each pair of the baseline's and the source's tier."""
    rows = with_standing(comparisons).sort("baseline_tier", "source_tier", maintain_order=True)
    by = ["baseline_tier", "source_tier"]
    names = {role: pl.col(role).replace_strict(dict(enumerate(TIERS)), return_dtype=pl.String) for role in by}
    metrics = lift_metrics(band)
    chance = _by_chance(rows, by).with_columns(**names)
    frame = estimates(rows.with_columns(**names), "rho", metrics, by)
    return Table(
        name="tier_pairs",
        title="Lift by solo tier and source tier",
        note="Solo is the baseline in the target DSL. A failed baseline can only gain; compare within a tier. "
        + _ON_CHANCE,
        columns=(
            Column(name="baseline_tier", title="solo"),
            Column(name="source_tier", title="source"),
            _N,
            *metric_columns(metrics),
            _CHANCE,
        ),
        frame=frame.join(chance, on=by, how="left", maintain_order="left"),
    )


def source_verdicts(comparisons: pl.DataFrame) -> Table:
    """Pass rates of baseline and treatment, and their difference, given whether the source passed."""
    rows = judged(comparisons).filter(pl.col("source_state").is_in(["passed", "failed"]))
    arms = ("baseline", "treatment")
    passes = [pl.col(f"{arm}_speedup").is_not_null().cast(pl.Float64).alias(arm) for arm in arms]
    rows = rows.with_columns(passes).with_columns(difference=pl.col("treatment") - pl.col("baseline"))
    rows = rows.sort("source_state", descending=True, maintain_order=True)
    parts = [estimates(rows, metric.name, [metric], ["source_state"]) for metric in _PASS_RATES]
    frame = parts[0]
    for part in parts[1:]:
        frame = frame.join(part.drop("n", "problems"), on="source_state", maintain_order="left")
    return Table(
        name="source_verdicts",
        title="Pass rates given the source's verdict",
        note="A skipped treatment counts with its baseline's verdict. The difference is treatment less baseline.",
        columns=(
            Column(name="source_state", title="source"),
            _N,
            *(Column(name=arm, title=f"P of {arm}", kind="share", interval=True) for arm in arms),
            Column(name="difference", title="difference", kind="lift", interval=True),
        ),
        frame=frame,
    )


_PASS_RATES = tuple(
    mean_metric(name, f"pass rate, {name}", proportion=name != "difference")
    for name in ("baseline", "treatment", "difference")
)


def both_directions(comparisons: pl.DataFrame) -> pl.DataFrame:
    """One row a (model, problem, replicate, DSL pair) with the ratios of both directions, where both are judged."""
    rows = judged(comparisons).select("problem", "model", "replicate", "source_dsl", "target_dsl", "rho")
    back = rows.rename({"source_dsl": "target_dsl", "target_dsl": "source_dsl", "rho": "rho_back"})
    return (
        rows.filter(pl.col("source_dsl") < pl.col("target_dsl"))
        .join(back, on=["problem", "model", "replicate", "source_dsl", "target_dsl"], maintain_order="left")
        .with_columns(pl.format("{} ⇄ {}", "source_dsl", "target_dsl").alias("pair"))
    )


def reverse_directions(comparisons: pl.DataFrame) -> Table:
    """Spearman of the two directions' ln ρ per (model, problem), against sign flips."""

    def test(rows: pl.DataFrame) -> dict[str, Any]:
        result = sign_flip_test(_column(rows, "rho", np.log), _column(rows, "rho_back", np.log))
        return {"correlation": result.value, "p": result.p, "pairs": result.pairs}

    return Table(
        name="reverse_directions",
        title="Do the two directions go together?",
        note="Spearman's rank correlation of ln ρ in one direction with ln ρ in the other, against "
        "random signs (two-sided).",
        columns=(*_SCOPE, *_RANK),
        frame=_by_scope(both_directions(comparisons), test, ("correlation", "p")),
    )


def help_against_help(comparisons: pl.DataFrame, band: float = BAND) -> Table:
    """What one direction did against what the other did."""
    rows = both_directions(comparisons)
    forth = outcomes(rows, band).alias("forth")
    back = outcomes(rows.select(pl.col("rho_back").alias("rho")), band).alias("back")
    counted = rows.with_columns(forth, back).group_by("pair", "forth", "back").len()
    wide = counted.pivot(on="back", index=["pair", "forth"], values="len") if counted.height else counted
    names = ("help", "neutral", "harm")
    absent = [pl.lit(0, dtype=pl.UInt32).alias(name) for name in names if name not in wide.columns]
    order = pl.col("forth").replace_strict(dict(zip(names, range(3), strict=True)), return_dtype=pl.Int64)
    frame = wide.with_columns(absent).with_columns(pl.col(names).fill_null(0).cast(pl.Int64)).sort("pair", order)
    return Table(
        name="help_against_help",
        title="One direction against the other",
        note="Rows: the direction from the first DSL to the second. Columns: what the reverse direction did on the "
        "same problem, model and replicate.",
        columns=(
            Column(name="pair", title="DSLs"),
            Column(name="forth", title="first → second"),
            *(Column(name=name, title=f"reverse: {name}", kind="count") for name in names),
        ),
        frame=frame.select("pair", "forth", *names),
    )


def tracking(comparisons: pl.DataFrame) -> Table:
    """Spearman of the source's speedup with the solo and with the conditioned speedups, against swaps of attempts."""

    def test(rows: pl.DataFrame) -> dict[str, Any]:
        source, alone, after = (_column(rows, f"{r}_speedup", _floored) for r in ("source", "baseline", "treatment"))
        result: RankTest = swap_test(tracked(rows))
        return {
            "solo": spearman(source, alone),
            "conditioned": spearman(source, after),
            "correlation": result.value,
            "p": result.p,
            "pairs": result.pairs,
        }

    rows = with_standing(comparisons).with_columns(pl.col("direction").alias("pair"))
    return Table(
        name="tracking",
        title="Do treatments follow their source?",
        note=f"Rank correlation of the source's speedup with the solo and with the conditioned one ({FLOOR:g} where "
        "not passing); the difference is tested against swapping attempts that only their skill distinguishes "
        "(two-sided).",
        columns=(
            Column(name="model", title="model"),
            Column(name="pair", title="direction"),
            Column(name="pairs", title="n", kind="count"),
            Column(name="solo", title="with solo", kind="correlation"),
            Column(name="conditioned", title="with conditioned", kind="correlation"),
            Column(name="correlation", title="difference", kind="correlation"),
            Column(name="p", title="p", kind="p"),
        ),
        frame=_by_scope(rows, test, ("solo", "conditioned", "correlation", "p")),
    )


def tracked(rows: pl.DataFrame) -> Tracked:
    """Comparisons as places in the list of their attempts. A key without its last part is what attempts share that
    only their skill distinguishes."""
    given = pl.when(pl.col("treatment_state") == "skipped").then("baseline").otherwise("treatment").alias("treatment")
    keys = rows.select("source", "baseline", given)
    speedups = [
        rows.select(keys[role].alias("key"), pl.col(f"{role}_speedup").fill_null(FLOOR).alias("speedup"))
        for role in ("source", "baseline", "treatment")
    ]
    attempts = pl.concat(speedups).unique("key", keep="first").sort("key")
    place = dict(zip(attempts["key"], range(attempts.height), strict=True))
    groups = attempts["key"].str.replace(r"/[^/]*$", "").rank("dense").cast(pl.Int64)
    return Tracked(
        speedup=_floored(attempts["speedup"].to_numpy()),
        group=groups.to_numpy(),
        **{
            name: keys[role].replace_strict(place, return_dtype=pl.Int64).to_numpy()
            for name, role in (("source", "source"), ("solo", "baseline"), ("conditioned", "treatment"))
        },
    )


_SCOPE = (Column(name="model", title="model"), Column(name="pair", title="DSLs"))
_RANK = (
    Column(name="pairs", title="pairs", kind="count"),
    Column(name="correlation", title="Spearman", kind="correlation"),
    Column(name="p", title="p", kind="p"),
)


def _by_scope(
    rows: pl.DataFrame, test: Callable[[pl.DataFrame], dict[str, Any]], numbers: tuple[str, ...]
) -> pl.DataFrame:
    """Run a test on all rows, on each pair or direction, and on each model, where there is more than one."""
    scopes = [(ALL, ALL, rows)]
    pairs, models = (sorted(rows[name].unique()) for name in ("pair", "model"))
    if len(pairs) > 1:
        scopes += [(ALL, pair, rows.filter(pl.col("pair") == pair)) for pair in pairs]
    if len(models) > 1:
        scopes += [(model, ALL, rows.filter(pl.col("model") == model)) for model in models]
    found = [{"model": model, "pair": pair} | test(part) for model, pair, part in scopes]
    schema: dict[str, type[pl.DataType]] = {"model": pl.String, "pair": pl.String, "pairs": pl.Int64}
    return pl.DataFrame(found, schema=schema | dict.fromkeys(numbers, pl.Float64))


def _floored(speedup: Array) -> Array:
    return np.maximum(speedup, FLOOR)


def _column(rows: pl.DataFrame, name: str, transform: Callable[[Array], Array]) -> Array:
    """A column as numbers; what did not pass stands at the floor."""
    return np.asarray(transform(rows[name].cast(pl.Float64).fill_null(FLOOR).to_numpy()))
