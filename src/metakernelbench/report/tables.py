"""Which tables and pictures a report has, in the order in which a reader needs them."""

from __future__ import annotations

from typing import Any

from metakernelbench.analysis import outcome, registry
from metakernelbench.analysis.figures import Picture
from metakernelbench.analysis.tables import Table
from metakernelbench.report.study import Study


def main_tables(study: Study) -> list[Table]:
    """The tables that everybody reads."""
    return registry.tables(study.frames, main=True)


def further_tables(study: Study) -> list[Table]:
    """The tables that say when, why and how surely."""
    return registry.tables(study.frames, main=False)


def annotation_tables(study: Study) -> list[Table]:
    """The tables about what skills held and how they were used, where somebody has annotated that."""
    from metakernelbench.analysis.annotation_tables import annotation_tables as made

    known = study.annotations
    if known is None or not known.answers:
        return []
    return list(made(study.plan, study.comparisons, known, study.band))


def annotation_pictures(study: Study) -> list[Picture]:
    """The pictures of the same."""
    from metakernelbench.analysis.annotation_files import pictures

    tables = annotation_tables(study)
    if study.annotations is None or not tables:
        return []
    return pictures(tables, study.plan, study.comparisons, study.annotations, study.band)


def as_json(study: Study) -> dict[str, Any]:
    """Every table, unrounded, and the comparisons with the keys of their attempts."""
    return {
        "experiment": study.name,
        "rehearsal": study.rehearsal(),
        "tables": [table.to_dict() for table in _all(study)],
        "comparisons": study.comparisons.with_columns(outcome.outcomes(study.comparisons, study.band)).to_dicts(),
        "attempts": study.attempts.to_dicts(),
    }


def _all(study: Study) -> list[Table]:
    return [*main_tables(study), *further_tables(study), *annotation_tables(study)]
