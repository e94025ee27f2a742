"""What skills contained and how they were used, joined with what came of them, as frames.

The unit is the comparison whose treatment was given another attempt's whole skill, against an attempt that was given
nothing. What nobody has annotated is null, never a no. `annotation_tables.py` makes tables of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from metakernelbench.analysis.frames import MAIN, frames_of
from metakernelbench.analysis.metrics import BAND, PAIRED_LIFT, harmed, value
from metakernelbench.analysis.outcome import judged, outcomes
from metakernelbench.annotation.results import Results
from metakernelbench.annotation.rubric import rubric, taxonomy
from metakernelbench.annotation.subjects import Subjects
from metakernelbench.attempts.record import AttemptRecord
from metakernelbench.experiments.planned import Plan
from metakernelbench.store.store import Store


def of_whole_skills(plan: Plan, comparisons: pl.DataFrame) -> pl.DataFrame:
    """The comparisons of an attempt that was given somebody's whole skill with one that was given nothing, of one
    question: a skill from another DSL where that is asked, else the first. A placebo's harm is no skill's harm."""
    given = [a.key for a in plan.attempts if a.source is not None and a.material == "skill" and a.without is None]
    alone = [a.key for a in plan.attempts if a.source is None]
    found = comparisons.filter(pl.col("treatment").is_in(given) & pl.col("baseline").is_in(alone))
    asked = list(found.select("design", "arm").unique(maintain_order=True).iter_rows())
    design, arm = MAIN if MAIN in asked or not asked else asked[0]
    return found.filter((pl.col("design") == design) & (pl.col("arm") == arm))


def harmed_treatments(plan: Plan, comparisons: pl.DataFrame, band: float = BAND) -> list[str]:
    """Keys of the treatments that a whole skill harmed, each once: of these a cause is asked."""
    rated = judged(of_whole_skills(plan, comparisons))
    found = rated.filter(pl.Series(harmed(rated["rho"].to_numpy(), band), dtype=pl.Boolean))
    return found["treatment"].unique(maintain_order=True).to_list()


def annotated(plan: Plan, comparisons: pl.DataFrame, results: Results, band: float = BAND) -> pl.DataFrame:
    """One row a judged comparison whose treatment ran with a whole skill: the comparison's columns, and

    outcome           help, neutral, harm
    <category>        whether the skill holds it; null where nobody has annotated the skill
    used, occasions   of the skill's categories, how many were followed (fully or in part), and how many could have been
    propagated        whether a claim was handed on; null where nobody has annotated the attempt
    cause             what went wrong; null where that is not known or was not asked
    """
    rated = judged(of_whole_skills(plan, comparisons)).filter(pl.col("treatment_state") != "skipped")
    rated = rated.with_columns(outcomes(rated, band).alias("outcome"))
    rows = [_facts(source, key, results) for source, key in rated.select("source", "treatment").iter_rows()]
    return pl.concat([rated, pl.DataFrame(rows, schema=_FACTS)], how="horizontal")


_FACTS: dict[str, type[pl.DataType]] = {
    **dict.fromkeys(rubric().ids, pl.Boolean),
    "used": pl.Int64,
    "occasions": pl.Int64,
    "propagated": pl.Boolean,
    "cause": pl.String,
    "cause_from": pl.String,
}


def _facts(source: str, treatment: str, results: Results) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(_FACTS)
    labels = results.skill_labels(source)
    if labels is not None:
        row |= {category: category in labels.categories for category in rubric().ids}
    uptake = results.uptakes.get(treatment)
    if uptake is not None:
        words = [label.uptake for label in uptake.labels.uptake if label.uptake != "not_applicable"]
        row |= {"used": sum(word in taxonomy().used for word in words), "occasions": len(words)}
        row["propagated"] = bool(uptake.labels.propagated)
    cause = results.causes.get(treatment)
    if cause is not None and cause.labels is not None:
        row |= {"cause": cause.labels.cause, "cause_from": cause.labels.decided_by}
    return row


def uptakes(rows: pl.DataFrame, results: Results) -> pl.DataFrame:
    """One row a comparison and category of its skill: what became of it."""
    found = []
    for row in rows.select("problem", "model", "family", "outcome", "treatment").iter_rows(named=True):
        consensus = results.uptakes.get(row["treatment"])
        for label in consensus.labels.uptake if consensus is not None else ():
            found.append(row | {"category": label.category, "uptake": label.uptake})
    names = ("problem", "model", "family", "outcome", "treatment", "category", "uptake")
    return pl.DataFrame(found, schema=dict.fromkeys(names, pl.String))


def cells(rows: pl.DataFrame) -> pl.DataFrame:
    """One row a model and family: the share of occasions that were taken up, and the lift."""
    known = rows.filter(pl.col("occasions") > 0)
    found = []
    for (model, family), part in known.partition_by(["model", "family"], as_dict=True, maintain_order=True).items():
        found.append(
            {
                "model": model,
                "family": family,
                "n": part.height,
                "uptake": int(part["used"].sum()) / int(part["occasions"].sum()),
                "lift": value(PAIRED_LIFT, part["rho"].to_numpy().astype(np.float64)),
            }
        )
    schema = {"model": pl.String, "family": pl.String, "n": pl.Int64, "uptake": pl.Float64, "lift": pl.Float64}
    return pl.DataFrame(found, schema=schema)


def subjects_of(store: Store, name: str) -> tuple[Subjects, pl.DataFrame]:
    """What of an experiment in a store is annotated, and its comparisons. Raises `UnknownName`."""
    experiment = store.experiment(name)
    given = {attempt.key for attempt in experiment.plan.attempts if attempt.source is not None}
    records = {key: record if key in given else _light(record) for key, record in store.attempts(name)}
    rematches = store.rematches.of(name).values()
    frames = frames_of(experiment.plan, records, rematches=rematches, band=experiment.spec.indifference_band)
    subjects = Subjects(
        plan=experiment.plan,
        records=records,
        harmed=harmed_treatments(experiment.plan, frames.comparisons, frames.band),
        max_submissions=experiment.spec.attempt.max_submissions,
    )
    return subjects, frames.comparisons


def _light(record: AttemptRecord) -> AttemptRecord:
    """The record without its trajectory, which is most of its weight and is read of treatments only."""
    return record.model_copy(update={"trajectory": None})
