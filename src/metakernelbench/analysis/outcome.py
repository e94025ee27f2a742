"""The main tables of a study: how well attempts do alone, and what a skill from elsewhere changes.

Each function takes the frames of `comparisons.py` and returns one `Table`. The rows of the overall value carry the
group name `all`.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from metakernelbench.analysis.comparisons import MEASURED
from metakernelbench.analysis.metrics import BAND, SOLO_METRICS, harmed, helped, lift_metrics
from metakernelbench.analysis.tables import Column, Table, estimates, metric_columns

ALL = "all"
BANDS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""The bands at which help and harm are shown beside the default one."""

_N = Column(name="n", title="n", kind="count", meaning="comparisons with a paired ratio")
_PROBLEMS = Column(name="problems", title="problems", kind="count", meaning="problems that they are from")
_UNJUDGED = Column(
    name="unjudged", title="unjudged", kind="count", meaning="planned, without a record yet; left out", optional=True
)


def judged(comparisons: pl.DataFrame) -> pl.DataFrame:
    """The comparisons that have a paired ratio."""
    return comparisons.filter(pl.col("rho").is_not_null())


def outcomes(comparisons: pl.DataFrame, band: float = BAND) -> pl.Series:
    """`help`, `neutral` or `harm` for each comparison; null where unjudged."""
    rho = comparisons["rho"].cast(pl.Float64).fill_null(1.0).to_numpy()
    names = np.select([helped(rho, band), harmed(rho, band)], ["help", "harm"], "neutral")
    known = comparisons["rho"].is_not_null().to_numpy()
    return pl.Series("outcome", [str(n) if k else None for n, k in zip(names, known, strict=True)], dtype=pl.String)


def solo(attempts: pl.DataFrame) -> Table:
    """P, GM and R(2) of the solo attempts by model and DSL. Failures stay in the denominators of P and R(2)."""
    alone = attempts.filter(pl.col("arm") == "solo").sort("model", "dsl", "problem", "replicate")
    scopes = [alone]
    if alone["model"].n_unique() > 1:
        scopes.insert(0, alone.with_columns(pl.lit(ALL).alias("model")).sort("dsl", maintain_order=True))
    by = ["model", "dsl"]
    frame = pl.concat([_solo_rows(scope, by) for scope in scopes])
    return Table(
        name="solo",
        title="Attempts alone",
        note="P is the share of judged attempts that passed; GM the geometric mean speedup of the passing ones, each "
        "capped at 100; R(2) the share that passed at 2× or better. Failures stay in the denominators of P and R(2).",
        columns=(
            Column(name="model", title="model"),
            Column(name="dsl", title="DSL"),
            Column(name="n", title="n", kind="count", meaning="judged attempts"),
            Column(name="passed", title="passed", kind="count"),
            *metric_columns(SOLO_METRICS),
            _UNJUDGED,
        ),
        frame=frame,
    )


def _solo_rows(alone: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    found = estimates(alone.filter(pl.col("state") != "unjudged"), "speedup", SOLO_METRICS, by)
    counts = alone.group_by(by, maintain_order=True).agg(
        (pl.col("state") == "passed").sum().cast(pl.Int64).alias("passed"),
        (pl.col("state") == "unjudged").sum().cast(pl.Int64).alias("unjudged"),
    )
    return counts.join(found, on=by, how="left", maintain_order="left").with_columns(pl.col("n").fill_null(0))


def lift(comparisons: pl.DataFrame, by: str | tuple[str, ...], band: float = BAND) -> Table:
    """ΔGM, T, neutral and H over all and for each group: by `direction`, `family`, `model`, or several of them.

    The title of a column `family` and `direction` is their name; groups that are not there have no row.
    """
    by = (by,) if isinstance(by, str) else by
    metrics = lift_metrics(band)
    pooled = comparisons.with_columns(pl.lit(ALL).alias(name) for name in by)
    parted = comparisons.sort(*map(_group_order, by), maintain_order=True)
    rows = [_with_counts(pooled, by, band), _with_counts(parted, by, band)]
    return Table(
        name=f"lift_by_{'_and_'.join(by)}",
        title=f"Lift by {' and '.join(by)}",
        note=f"ΔGM is the geometric mean of the paired ratios, less one. T and H are the shares of comparisons with a "
        f"ratio above {1 + band:g} and below 1/{1 + band:g}; neutral is the rest. Skipped treatments count as ratio 1.",
        columns=(
            *(Column(name=name, title=name) for name in by),
            _N,
            _PROBLEMS,
            *metric_columns(metrics),
            MEASURED_COLUMN,
            _UNJUDGED,
        ),
        frame=pl.concat(rows).unique(by, keep="first", maintain_order=True),
    )


MEASURED_COLUMN = Column(
    name="measured", title="head to head", kind="count", meaning="ratios that one session measured", optional=True
)


def _group_order(by: str) -> pl.Expr:
    """Families in the order of the problem numbers, anything else by name."""
    return pl.col("problem").min().over(by) if by == "family" else pl.col(by)


def _with_counts(comparisons: pl.DataFrame, by: tuple[str, ...], band: float) -> pl.DataFrame:
    counts = comparisons.group_by(by, maintain_order=True).agg(
        (pl.col("rho_from") == MEASURED).sum().cast(pl.Int64).alias("measured"),
        pl.col("rho").is_null().sum().cast(pl.Int64).alias("unjudged"),
    )
    found = estimates(judged(comparisons), "rho", lift_metrics(band), by)
    frame = counts.join(found, on=by, how="left", maintain_order="left")
    return frame.with_columns(pl.col("n", "problems").fill_null(0)).select(*found.columns, "measured", "unjudged")


def questions(comparisons: pl.DataFrame, band: float = BAND) -> Table:
    """The lift of every question that the experiment asks: one row a design and arm."""
    asked = comparisons.sort(pl.col("design") != "cross-dsl", "design", "arm", maintain_order=True)
    metrics = lift_metrics(band)
    by = ("design", "arm")
    return Table(
        name="questions",
        title="Every question asked",
        note="A design's arms are its kinds of treatment. `retry` gives nothing to the second attempt: its rows are "
        "what chance alone does, and a lift means something only beside them.",
        columns=(
            *(Column(name=name, title=name) for name in by),
            _N,
            _PROBLEMS,
            *metric_columns(metrics),
            MEASURED_COLUMN,
            _UNJUDGED,
        ),
        frame=_with_counts(asked, by, band),
    )


def leave_best_family_out(comparisons: pl.DataFrame, band: float = BAND) -> Table:
    """The lift without the family that gains most, over all and in each direction: does it rest on one family?"""
    rated = judged(comparisons).sort("direction", maintain_order=True)
    metrics = lift_metrics(band)
    parts = [rated.with_columns(pl.lit(ALL).alias("direction"))]
    if rated["direction"].n_unique() > 1:
        parts += rated.partition_by("direction", maintain_order=True)
    scopes = [scope for part in parts for scope in _with_and_without_best(part)]
    return Table(
        name="leave_best_family_out",
        title="Without the best family",
        note="The same numbers without the family with the highest ΔGM: what remains does not rest on that family.",
        columns=(
            Column(name="direction", title="direction"),
            Column(name="scope", title="comparisons"),
            _N,
            _PROBLEMS,
            *metric_columns(metrics),
        ),
        frame=pl.concat([estimates(scope, "rho", metrics, ["direction", "scope"]) for scope in scopes]),
    )


def _with_and_without_best(rated: pl.DataFrame) -> list[pl.DataFrame]:
    """All comparisons, and those without the best family where there are several."""
    whole = rated.with_columns(pl.lit(ALL).alias("scope"))
    means = rated.group_by("family").agg(pl.col("rho").log().mean()).sort("rho", "family", descending=[True, False])
    if means.height < 2:
        return [whole]
    best = means["family"][0]
    return [whole, rated.filter(pl.col("family") != best).with_columns(pl.lit(f"without {best}").alias("scope"))]


def verdict_changes(comparisons: pl.DataFrame, band: float = BAND) -> Table:
    """How many of the helped and the harmed changed their verdict, rather than their time."""
    rated = judged(comparisons)
    rated = rated.with_columns(outcomes(rated, band))
    changes = ("both pass", "rescue", "break", "both fail", "skipped")
    frame = pl.DataFrame({"outcome": ["help", "neutral", "harm"]}).join(
        rated.group_by("outcome").agg(
            pl.len().cast(pl.Int64).alias("n"),
            *((pl.col("change") == change).sum().cast(pl.Int64).alias(change) for change in changes),
        ),
        on="outcome",
        how="left",
        maintain_order="left",
    )
    return Table(
        name="verdict_changes",
        title="Verdict changes",
        note="A rescue is a treatment that passed where the baseline failed; a break is the reverse.",
        columns=(
            Column(name="outcome", title="outcome"),
            _N,
            *(Column(name=change, title=change, kind="count") for change in changes),
        ),
        frame=frame.fill_null(0),
    )


def bands(comparisons: pl.DataFrame, retries: pl.DataFrame | None = None) -> Table:
    """T, neutral and H at several indifference bands, and beside them what chance alone gives, where `retries` (the
    comparisons of the design `retry`) tell."""
    frame = _at_bands(judged(comparisons))
    columns = list(metric_columns(lift_metrics()[1:]))
    if retries is not None and judged(retries).height:
        chance = _at_bands(judged(retries)).select("band", help_again="help", harm_again="harm", pairs_again="n")
        frame = frame.join(chance, on="band", maintain_order="left")
        columns += [
            Column(name="help_again", title="T of retries", kind="share"),
            Column(name="harm_again", title="H of retries", kind="share"),
            Column(name="pairs_again", title="retries", kind="count"),
        ]
    return Table(
        name="bands",
        title="Sensitivity to the indifference band",
        note=f"T and H depend on how small a change is called none. The default band is {BAND:g}. Under `retries` "
        "stands what a second attempt without a skill does, where the experiment has such.",
        columns=(Column(name="band", title="band b"), _N, *columns),
        frame=frame,
    )


def _at_bands(rated: pl.DataFrame) -> pl.DataFrame:
    parts = [
        estimates(rated.with_columns(pl.lit(f"{band:g}").alias("band")), "rho", lift_metrics(band)[1:], ["band"])
        for band in sorted({*BANDS, BAND})
    ]
    return pl.concat(parts)
