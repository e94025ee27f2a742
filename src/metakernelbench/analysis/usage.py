"""What the attempts used and what that cost."""

from __future__ import annotations

import polars as pl

from metakernelbench.analysis.outcome import ALL
from metakernelbench.analysis.tables import Column, Kind, Table

_MEANS: tuple[tuple[str, str, Kind], ...] = (
    ("submissions", "submissions", "number"),
    ("turns", "turns", "number"),
    ("input_tokens", "input tokens", "number"),
    ("cached_tokens", "of them cached", "number"),
    ("output_tokens", "output tokens", "number"),
    ("minutes", "minutes", "number"),
    ("cost_each", "cost each, $", "number"),
)


def usage(attempts: pl.DataFrame) -> Table:
    """Means per attempt that ran, and total cost, by model and arm; over all models first."""
    ran = attempts.filter(pl.col("state").is_in(["passed", "failed"])).with_columns(
        minutes=pl.col("agent_s") / 60, cost_each=pl.col("cost_usd")
    )
    scopes = [ran.with_columns(pl.lit(ALL).alias("model"))]
    if ran["model"].n_unique() > 1:
        scopes.append(ran)
    cost = pl.when(pl.col("cost_usd").count() > 0).then(pl.col("cost_usd").sum())
    parts = [
        scope.group_by("model", "arm")
        .agg(
            pl.len().cast(pl.Int64).alias("n"),
            (pl.col("state") == "passed").sum().cast(pl.Int64).alias("passed"),
            *(pl.col(name).mean() for name, _, _ in _MEANS),
            cost.alias("cost_usd"),
        )
        .sort("model", "arm", descending=[False, True])
        for scope in scopes
    ]
    per_pass = pl.when(pl.col("passed") > 0).then(pl.col("cost_usd") / pl.col("passed"))
    return Table(
        name="usage",
        title="Usage and cost by arm",
        note="Means per attempt that ran, over those of which the provider said so; costs are in US dollars. A dash "
        "means that nobody said. Cost per pass is the cost of all attempts over the number that passed.",
        columns=(
            Column(name="model", title="model"),
            Column(name="arm", title="arm"),
            Column(name="n", title="n", kind="count", meaning="attempts that ran"),
            Column(name="passed", title="passed", kind="count"),
            *(Column(name=name, title=title, kind=kind, optional=True) for name, title, kind in _MEANS),
            Column(name="cost_usd", title="cost, $", kind="number", optional=True),
            Column(name="cost_per_pass", title="per pass, $", kind="number", optional=True),
        ),
        frame=pl.concat(parts).with_columns(per_pass.alias("cost_per_pass")),
    )
