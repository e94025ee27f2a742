"""Tables of how far annotators can be trusted: their agreement with each other, and with the gold set."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from metakernelbench.analysis.tables import Column, Table
from metakernelbench.annotation.agreement import Agreed, Agreement
from metakernelbench.annotation.gold_measure import Scores
from metakernelbench.annotation.rubric import rubric, taxonomy


def agreement_table(found: Sequence[Agreement]) -> Table:
    """How far the annotators agree."""
    titles = rubric().titles
    rows = [
        {"what": titles.get(one.name, one.name), "units": one.units, "raters": one.raters, "identical": one.identical}
        | _flat("cohen", one.cohen)
        | _flat("fleiss", one.fleiss)
        | _flat("alpha", one.alpha)
        for one in found
    ]
    numbers = [f"{name}{end}" for name in ("cohen", "fleiss", "alpha") for end in ("", "_low", "_high")]
    schema = {"what": pl.String, "units": pl.Int64, "raters": pl.Int64, "identical": pl.Float64}
    return Table(
        name="agreement",
        title="Agreement between annotators",
        note="Beyond chance: 1 is perfect, 0 what chance gives. Undefined where all labels are equal. A rater is an "
        "annotator in one pass; the intervals come from drawing the texts anew.",
        columns=(
            Column(name="what", title="label"),
            Column(name="units", title="n", kind="count", meaning="what two raters or more have labelled"),
            Column(name="raters", title="raters", kind="count"),
            Column(name="identical", title="identical", kind="share"),
            Column(name="cohen", title="Cohen's κ", kind="correlation", interval=True),
            Column(name="fleiss", title="Fleiss' κ", kind="correlation", interval=True),
            Column(name="alpha", title="Krippendorff's α", kind="correlation", interval=True),
        ),
        frame=pl.DataFrame(rows, schema=schema | dict.fromkeys(numbers, pl.Float64)),
    )


def _flat(name: str, one: Agreed) -> dict[str, float | None]:
    return {name: one.value, f"{name}_low": one.low, f"{name}_high": one.high}


def gold_table(found: Sequence[Scores]) -> Table:
    """How well annotators find what the gold set holds."""
    titles = rubric().titles | {one.id: one.title for one in taxonomy().uptake} | taxonomy().cause_titles
    numbers = ("precision", "recall", "f1", "kappa")
    rows = [
        {"annotator": one.annotator, "label": titles.get(one.label, one.label), "n": one.n, "gold": one.gold}
        | {"found": one.found}
        | {name: getattr(one, name) for name in numbers}
        for one in found
    ]
    schema = {"annotator": pl.String, "label": pl.String, "n": pl.Int64, "gold": pl.Int64, "found": pl.Int64}
    return Table(
        name="gold",
        title="Annotators on the gold set",
        note="Each label against the rest. Categories by skill, uptakes by attempt and category, claims handed on by "
        "attempt, causes by the harmed attempts whose records do not decide. A dash is a ratio without anything below "
        "it, or a kappa of labels that do not vary.",
        columns=(
            Column(name="annotator", title="annotator"),
            Column(name="label", title="label"),
            Column(name="n", title="n", kind="count", meaning="gold items that were answered"),
            Column(name="gold", title="gold", kind="count", meaning="items that hold it"),
            Column(name="found", title="found", kind="count", meaning="items in which the annotator finds it"),
            Column(name="precision", title="precision", kind="share"),
            Column(name="recall", title="recall", kind="share"),
            Column(name="f1", title="F1", kind="share"),
            Column(name="kappa", title="κ", kind="correlation"),
        ),
        frame=pl.DataFrame(rows, schema=schema | dict.fromkeys(numbers, pl.Float64)),
    )
