"""Tables of what skills contained, how they were used, what went wrong; `annotations.py` says in which comparisons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl

from metakernelbench.analysis.annotations import annotated, cells, uptakes
from metakernelbench.analysis.annotator_tables import agreement_table
from metakernelbench.analysis.metrics import BAND, Array, Metric
from metakernelbench.analysis.outcome import ALL
from metakernelbench.analysis.resampling import DRAWS, MIN_PROBLEMS, SEED, spearman
from metakernelbench.analysis.tables import Column, Table, estimates, metric_columns, problem_codes
from metakernelbench.annotation.agreement import agreements
from metakernelbench.annotation.format_check import check_format, check_structure
from metakernelbench.annotation.results import Results
from metakernelbench.annotation.rubric import NO_CAUSE, rubric, taxonomy
from metakernelbench.attempts.record import AttemptRecord
from metakernelbench.experiments.planned import Plan

OUTCOMES = ("help", "neutral", "harm")
_SHUFFLES = 10_000
_N = Column(name="n", title="n", kind="count", meaning="comparisons that are annotated")
_PROBLEMS = Column(name="problems", title="problems", kind="count", meaning="problems that they are from")


def _share(name: str, title: str, meaning: str) -> Metric:
    """The mean of a column of zeros and ones."""
    return Metric(
        name=name,
        title=title,
        meaning=meaning,
        numerator=lambda column: column,
        denominator=np.ones_like,
        proportion=True,
    )


def contents(results: Results) -> Table:
    """What the skills hold, whatever came of them: each text once."""
    found = list(results.skills.values())
    rows = []
    for category in rubric().ids:
        holding = [[s.supported for s in one.labels.statements if s.category == category] for one in found]
        present = [supported for supported in holding if supported]
        rows.append(
            {
                "category": rubric().titles[category],
                "n": len(found),
                "held": len(present),
                "statements": sum(map(len, present)),
                "supported": sum(map(sum, present)) / sum(map(len, present)) if present else None,
                "disputed": sum(category in one.disputed for one in found),
            }
        )
    schema = dict.fromkeys(("n", "held", "statements", "disputed"), pl.Int64)
    return Table(
        name="skill_contents",
        title="What the skills held",
        note="Of all annotated skills of the experiment, each text once. Supported: the skill states evidence for the "
        "statement. Disputed: annotators or passes differ on whether the category is there.",
        columns=(
            Column(name="category", title="category"),
            Column(name="n", title="n", kind="count", meaning="skills that are annotated"),
            Column(name="held", title="held by", kind="count", meaning="skills with at least one statement of it"),
            Column(name="statements", title="statements", kind="count"),
            Column(name="supported", title="supported", kind="share", meaning="statements with stated evidence"),
            Column(name="disputed", title="disputed", kind="count", optional=True),
        ),
        frame=pl.DataFrame(rows, schema={"category": pl.String, **schema, "supported": pl.Float64}).select(
            "category", "n", "held", "statements", "supported", "disputed"
        ),
    )


def prevalence(rows: pl.DataFrame) -> Table:
    """How often harmed and helped comparisons' skills hold each category, and the difference."""
    metric = _share("share", "share", "share of the comparisons whose skill holds the category")
    known = rows.filter(pl.col(rubric().ids[0]).is_not_null())
    frames = []
    for outcome in ("harm", "help"):
        part = known.filter(pl.col("outcome") == outcome)
        long = part.unpivot(on=list(rubric().ids), index="problem", variable_name="category", value_name="present")
        found = estimates(long, "present", [metric], ["category"])
        names = {name: f"{outcome}_{name}" for name in found.columns if name != "category"}
        frames.append(found.rename(names | {f"share{end}": f"{outcome}{end}" for end in ("", "_low", "_high")}))
    frame = pl.DataFrame({"category": rubric().ids}).join(frames[0], on="category", how="left", maintain_order="left")
    frame = frame.join(frames[1], on="category", how="left", maintain_order="left")
    counts = [pl.col(f"{outcome}_{name}").fill_null(0) for outcome in ("harm", "help") for name in ("n", "problems")]
    differences = [_difference(known, category) for category in rubric().ids]
    frame = frame.with_columns(counts).with_columns(
        pl.Series(f"difference{end}", [found[index] for found in differences], dtype=pl.Float64)
        for index, end in enumerate(("", "_low", "_high"))
    )
    titles = rubric().titles
    return Table(
        name="category_prevalence",
        title="What the skills held, harmed against helped",
        note="Share of harmed and of helped comparisons whose source skill holds at least one statement of the "
        "category, and harmed less helped.",
        columns=(
            Column(name="category", title="category"),
            Column(name="harm_n", title="n harmed", kind="count", meaning="harmed comparisons that are annotated"),
            Column(name="harm", title="harmed", kind="share", interval=True),
            Column(name="help_n", title="n helped", kind="count", meaning="helped comparisons that are annotated"),
            Column(name="help", title="helped", kind="share", interval=True),
            Column(name="difference", title="difference", kind="lift", interval=True, meaning="harmed less helped"),
        ),
        frame=frame.with_columns(pl.col("category").replace_strict(titles, return_dtype=pl.String)),
    )


def _difference(rows: pl.DataFrame, category: str) -> tuple[float | None, float | None, float | None]:
    """Prevalence in harmed less prevalence in helped comparisons, with its interval by bootstrap over problems: both
    shares are of the same draw of problems."""
    problem = problem_codes(rows) - 1 if rows.height else np.zeros(0, dtype=np.int64)
    count = int(problem.max()) + 1 if len(problem) else 0
    present = rows[category].fill_null(False).to_numpy().astype(np.float64)
    sums = []
    for outcome in ("harm", "help"):
        of = (rows["outcome"] == outcome).to_numpy().astype(np.float64)
        sums += [np.bincount(problem, weights=of * present, minlength=count), np.bincount(problem, weights=of)]
    totals = [one.sum() for one in sums]
    if not totals[1] or not totals[3]:
        return None, None, None
    point = float(totals[0] / totals[1] - totals[2] / totals[3])
    if count < MIN_PROBLEMS:
        return point, None, None
    rng = np.random.default_rng([SEED, count, 3])
    weights = rng.multinomial(count, np.full(count, 1 / count), size=DRAWS).astype(np.float64)
    drawn = weights @ np.column_stack(sums)
    with np.errstate(invalid="ignore", divide="ignore"):
        values = drawn[:, 0] / drawn[:, 1] - drawn[:, 2] / drawn[:, 3]
    values = values[np.isfinite(values)]
    if len(values) < 0.95 * DRAWS or np.ptp(values) == 0:
        return point, None, None
    low, high = np.quantile(values, [0.025, 0.975])
    return point, float(low), float(high)


def uptake(rows: pl.DataFrame, results: Results, by: str = "outcome") -> Table:
    """What became of the categories of the attached skills, by outcome or by category."""
    pairs = uptakes(rows, results)
    metric = _share("share", "share", "share of the pairs")
    scopes = [pairs.with_columns(pl.lit(ALL).alias(by)), pairs]
    parts = []
    for word in taxonomy().uptake_ids:
        marked = [part.with_columns((pl.col("uptake") == word).cast(pl.Float64).alias("is")) for part in scopes]
        found = pl.concat([estimates(part, "is", [metric], [by]) for part in marked])
        parts.append(found.rename({f"share{end}": f"{word}{end}" for end in ("", "_low", "_high")}))
    frame = parts[0]
    for part in parts[1:]:
        frame = frame.join(part.drop("n", "problems"), on=by, how="left", maintain_order="left")
    if by == "category":
        frame = frame.with_columns(pl.col(by).replace(rubric().titles))
    return Table(
        name=f"uptake_by_{by}",
        title=f"What became of the skills' statements, by {by}",
        note="Of every pair of a treatment and a category of the skill that it was given, what the treatment did.",
        columns=(
            Column(name=by, title=by),
            Column(name="n", title="n", kind="count", meaning="pairs of a treatment and a category of its skill"),
            _PROBLEMS,
            *(Column(name=u.id, title=u.title, kind="share", interval=True) for u in taxonomy().uptake),
        ),
        frame=_in_order(frame, by),
    )


def _in_order(frame: pl.DataFrame, by: str) -> pl.DataFrame:
    order = [ALL, *(OUTCOMES if by == "outcome" else rubric().titles.values())]
    places = {name: place for place, name in enumerate(order)}
    return frame.sort(pl.col(by).replace_strict(places, default=len(places), return_dtype=pl.Int64))


def propagation(rows: pl.DataFrame) -> Table:
    """How often a false or unverified claim of the source came back in the treatment's own skill."""
    known = rows.filter(pl.col("propagated").is_not_null())
    metric = _share("propagated", "handed on", "share of comparisons in which a claim was handed on unverified")
    scopes = [known.with_columns(pl.lit(ALL).alias("outcome")), known]
    frame = pl.concat([estimates(part, "propagated", [metric], ["outcome"]) for part in scopes])
    return Table(
        name="propagation",
        title="Claims handed on",
        note="Share of treatments whose own skill repeats a claim of the skill they were given that is false or that "
        "nobody verified. A treatment without a skill of its own hands on nothing.",
        columns=(Column(name="outcome", title="outcome"), _N, _PROBLEMS, *metric_columns([metric])),
        frame=_in_order(frame, "outcome"),
    )


def causes(rows: pl.DataFrame) -> Table:
    """What went wrong on the target's side of the harmed comparisons, by model."""
    wrong = rows.filter(pl.col("outcome") == "harm")
    words = (*taxonomy().cause_ids, NO_CAUSE)
    counts = [
        pl.len().cast(pl.Int64).alias("n"),
        pl.col("cause").is_null().sum().cast(pl.Int64).alias("open"),
        (pl.col("cause_from") == "records").sum().cast(pl.Int64).alias("by_records"),
        *((pl.col("cause") == word).sum().cast(pl.Int64).alias(word) for word in words),
    ]
    scopes = [wrong.with_columns(pl.lit(ALL).alias("model")), wrong.sort("model")]
    frame = pl.concat([part.group_by("model", maintain_order=True).agg(counts) for part in scopes])
    titles = taxonomy().cause_titles | {NO_CAUSE: "none found"}
    return Table(
        name="causes_by_model",
        title="What went wrong, by model",
        note="Harmed comparisons by the first cause, in the order of precedence, that the records establish or the "
        "annotators find on the target's side.",
        columns=(
            Column(name="model", title="model"),
            Column(name="n", title="n", kind="count", meaning="harmed comparisons"),
            *(Column(name=word, title=titles[word], kind="count") for word in words),
            Column(name="open", title="open", kind="count", meaning="not annotated, or annotators disagree"),
            Column(name="by_records", title="by records", kind="count", meaning="decided without an annotator"),
        ),
        frame=frame,
    )


def uptake_and_lift(rows: pl.DataFrame) -> Table:
    """Do the models and families that take up more of their skills gain more? Spearman's correlation over cells."""
    found = cells(rows)
    taken, lift = found["uptake"].to_numpy(), found["lift"].to_numpy()
    observed = spearman(taken, lift)
    return Table(
        name="uptake_and_lift",
        title="Uptake against lift",
        note="Spearman's rank correlation of uptake share and ΔGM over cells of model and family; p against shuffling "
        "the cells. Uptake share: of the categories of the attached skills for which there was an occasion, those "
        "followed fully or in part.",
        columns=(
            Column(name="cells", title="cells", kind="count", meaning="cells of model and family with annotations"),
            Column(name="correlation", title="correlation", kind="correlation"),
            Column(name="p", title="p", kind="p", meaning="two-sided, by shuffling"),
        ),
        frame=pl.DataFrame(
            {
                "cells": [found.height],
                "correlation": [observed],
                "p": [None if observed is None else _shuffled(taken, lift, observed)],
            },
            schema={"cells": pl.Int64, "correlation": pl.Float64, "p": pl.Float64},
        ),
    )


def _shuffled(x: Array, y: Array, observed: float) -> float:
    """Two-sided p of a rank correlation: (1 + shuffles at least as extreme) / (1 + shuffles)."""
    ranks = [pl.Series(column).rank("average").to_numpy() for column in (x, y)]
    a, b = (column - column.mean() for column in ranks)
    rng = np.random.default_rng([SEED, len(x), 4])
    shuffled = rng.permuted(np.broadcast_to(b, (_SHUFFLES, len(b))), axis=1)
    null = shuffled @ a / np.sqrt((a @ a) * (b @ b))
    return (1 + int(np.count_nonzero(np.abs(null) >= abs(observed) - 1e-9))) / (1 + _SHUFFLES)


def forms(plan: Plan, records: Mapping[str, AttemptRecord]) -> Table:
    """How well attempts keep the form that was asked for in their skills, by model."""
    checks: list[dict[str, Any]] = []
    for attempt in plan.attempts:
        record = records.get(attempt.key)
        if record is not None and record.skill is not None:
            checks.append({"model": attempt.model, "problem": attempt.problem} | _form(record))
    schema = {"model": pl.String, "problem": pl.String} | dict.fromkeys(_FORM, pl.Float64)
    frame = pl.DataFrame(checks, schema=schema)
    scopes = [frame.with_columns(pl.lit(ALL).alias("model")), frame.sort("model")]
    metric = _share("kept", "kept", "share of skills without code, commands and names of a programming interface")
    shares = pl.concat([estimates(part, "kept", [metric], ["model"]) for part in scopes])
    means = pl.concat([part.group_by("model", maintain_order=True).agg(pl.col(_FORM[1:]).mean()) for part in scopes])
    return Table(
        name="skill_form",
        title="Form of the skills, by model",
        note="The instruction asks for prose without code, commands, and instructions for a programming interface. "
        "Counted by rule; means per skill.",
        columns=(
            Column(name="model", title="model"),
            Column(name="n", title="n", kind="count", meaning="skills"),
            _PROBLEMS,
            *metric_columns([metric]),
            Column(name="words", title="words", kind="number"),
            Column(name="headings", title="headings", kind="number"),
            Column(name="code_lines", title="lines of code", kind="number"),
            Column(name="commands", title="commands", kind="number"),
            Column(name="api_names", title="API names", kind="number"),
            *(_STRUCTURED if checks and frame["structured"].sum() else ()),
        ),
        frame=shares.join(means, on="model", how="left", maintain_order="left"),
    )


_FORM = ("kept", "words", "headings", "code_lines", "commands", "api_names", "structured", "structure_kept")


_STRUCTURED = (
    Column(name="structured", title="structured", kind="share", meaning="skills that were asked to be structured"),
    Column(
        name="structure_kept",
        title="of these kept",
        kind="share",
        meaning="of those, with all sections in order and evidence with every item",
    ),
)


def _form(record: AttemptRecord) -> dict[str, float | None]:
    skill, asked = record.skill or "", record.skill_form == "structured"
    found = check_format(skill)
    return {
        "kept": float(found.kept),
        "words": found.words,
        "headings": found.headings,
        "code_lines": found.code_lines,
        "commands": found.commands,
        "api_names": len(found.api_names),
        "structured": float(asked),
        "structure_kept": float(check_structure(skill).kept) if asked else None,
    }


def annotation_tables(plan: Plan, comparisons: pl.DataFrame, results: Results, band: float = BAND) -> tuple[Table, ...]:
    """All tables about annotations; those about what nobody has annotated are left out."""
    rows = annotated(plan, comparisons, results, band)
    found = [forms(plan, results.subjects.records)]
    if results.skills:
        found += [contents(results), prevalence(rows)]
    if results.uptakes:
        found += [uptake(rows, results), uptake(rows, results, "category"), propagation(rows), uptake_and_lift(rows)]
    if results.causes:
        found.append(causes(rows))
    if agreed := agreements(results.answers):
        found.append(agreement_table(agreed))
    return tuple(found)
