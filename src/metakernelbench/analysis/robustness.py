"""How far the outcome rests on choices: what each rule decides, and which of two measurements a ratio comes from."""

from __future__ import annotations

import polars as pl

from metakernelbench.analysis.comparisons import MEASURED
from metakernelbench.analysis.frames import Frames
from metakernelbench.analysis.metrics import PASS_RATE, lift_metrics
from metakernelbench.analysis.outcome import judged, outcomes
from metakernelbench.analysis.tables import Column, Table, estimates, metric_columns

HELD = "all rules hold"


def rule_scopes(study: Frames) -> list[tuple[str, frozenset[str]]]:
    """Which rules' violations count as passes, and what that is called; the default, none of them, first."""
    codes = study.violations
    scopes = [(HELD, frozenset[str]()), *((f"without {code}", frozenset({code})) for code in codes)]
    return [*scopes, ("without all of these", frozenset(codes))] if len(codes) > 1 else scopes


def rules(study: Frames) -> Table:
    """The outcome with each rule's violations counted as passes, where the kernel was right and timed all the same."""
    metrics = lift_metrics(study.band)
    parts = []
    for name, forgiven in rule_scopes(study):
        freed = study.forgiving(forgiven)
        label = pl.lit(name).alias("rules")
        solo = freed.attempts.filter((pl.col("arm") == "solo") & (pl.col("state") != "unjudged"))
        passing = estimates(solo.with_columns(label), "speedup", [PASS_RATE], ["rules"]).drop("n", "problems")
        lifted = estimates(judged(freed.main).with_columns(label), "rho", metrics, ["rules"])
        counts = {
            "freed": int((freed.attempts["state"] != study.attempts["state"]).sum()),
            "changed": changed_by_rules(study, forgiven).height,
        }
        labels = [pl.lit(count, dtype=pl.Int64).alias(column) for column, count in counts.items()]
        parts.append(lifted.join(passing, on="rules", how="left").with_columns(labels))
    return Table(
        name="rules",
        title="What each rule decides",
        note="A violation counts as a failure. Final gradings measure on, so the outcome can be shown with a rule's "
        "violations as passes. Only rules that somebody broke with a right and timed kernel are listed.",
        columns=(
            Column(name="rules", title="counted"),
            Column(name="freed", title="attempts freed", kind="count"),
            Column(name="changed", title="ratios changed", kind="count"),
            *metric_columns([PASS_RATE]),
            Column(name="n", title="n", kind="count"),
            *metric_columns(metrics),
        ),
        frame=pl.concat(parts),
    )


def changed_by_rules(study: Frames, forgiven: frozenset[str]) -> pl.DataFrame:
    """The main comparisons whose ratio differs once these violations count as passes: `rho`, `change` before and
    `rho_after`, `change_after`."""
    keys = ["source", "baseline", "treatment"]
    after = study.forgiving(forgiven).main.select(*keys, rho_after="rho", change_after="change")
    both = study.main.join(after, on=keys, how="left", nulls_equal=True, maintain_order="left")
    return both.filter(pl.col("rho").ne_missing(pl.col("rho_after")))


def rule_changes(study: Frames) -> Table:
    """Every comparison whose ratio depends on whether a broken rule counts."""
    changed = changed_by_rules(study, frozenset(study.violations))
    before = outcomes(changed, study.band).alias("before")
    after = outcomes(changed.select(rho="rho_after"), study.band).alias("after")
    names = ("problem", "model", "direction", "before", "rho", "change", "after", "rho_after", "change_after")
    return Table(
        name="rule_changes",
        title="Comparisons that a rule decides",
        note="Each comparison that reads differently once violations of rules count as passes: before, with all rules "
        "held; after, with none.",
        columns=(
            Column(name="problem", title="problem"),
            Column(name="model", title="model"),
            Column(name="direction", title="direction"),
            Column(name="change", title="held: verdicts"),
            Column(name="rho", title="held: ρ", kind="number"),
            Column(name="before", title="held"),
            Column(name="change_after", title="freed: verdicts"),
            Column(name="rho_after", title="freed: ρ", kind="number"),
            Column(name="after", title="freed"),
        ),
        frame=changed.with_columns(before, after).select(names),
    )


def ratios_both_ways(study: Frames) -> Table:
    """The lift with ratios measured head to head where they were, and with the ratios of the two medians."""
    metrics = lift_metrics(study.band)
    main = judged(study.main)
    measured = main.filter(pl.col("rho_from") == MEASURED)
    rows = []
    for of, comparisons in (("all comparisons", main), ("those timed head to head", measured)):
        for how, column in (("head to head where measured", "rho"), ("two medians", "rho_medians")):
            labels = [pl.lit(of).alias("of"), pl.lit(how).alias("how")]
            rows.append(estimates(comparisons.with_columns(labels), column, metrics, ["of", "how"]))
    return Table(
        name="ratios_both_ways",
        title="Head to head or two medians",
        note="Two gradings differ by the drift of the machine between them; timing both kernels in one session does "
        "not. A ratio comes from the session where there was one. Verdicts (rescues, breaks) count the same in both.",
        columns=(
            Column(name="of", title="of"),
            Column(name="how", title="ratios from"),
            Column(name="n", title="n", kind="count"),
            *metric_columns(metrics),
        ),
        frame=pl.concat(rows),
    )


def ratio_changes(study: Frames) -> Table:
    """How many comparisons read differently when they are measured head to head."""
    measured = study.main.filter(pl.col("rho_from") == MEASURED)
    names = ("help", "neutral", "harm")
    medians = outcomes(measured.select(rho="rho_medians"), study.band).alias("medians")
    head = outcomes(measured, study.band).alias("head")
    counted = measured.select(medians, head).group_by("medians", "head").len()
    rows = [
        {"medians": name} | {other: _count(counted, name, other) for other in names}
        for name in names
        if measured.height
    ]
    return Table(
        name="ratio_changes",
        title="What measuring head to head changes",
        note="Rows: what the two medians say of a comparison. Columns: what the head-to-head measurement says of it.",
        columns=(
            Column(name="medians", title="two medians"),
            *(Column(name=name, title=f"head to head: {name}", kind="count") for name in names),
        ),
        frame=pl.DataFrame(rows, schema={"medians": pl.String} | dict.fromkeys(names, pl.Int64)),
    )


def _count(counted: pl.DataFrame, medians: str, head: str) -> int:
    return int(counted.filter((pl.col("medians") == medians) & (pl.col("head") == head))["len"].sum())
