"""The pages between the overview and a comparison: a model, a family, a family with one model, a problem."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import polars as pl

from metakernelbench.analysis import figures
from metakernelbench.analysis.tables import MISSING, number
from metakernelbench.errors import MkbError
from metakernelbench.report import names
from metakernelbench.report.attempt_view import Badge, milliseconds, state_badge
from metakernelbench.report.comparison_view import Cell, Row, cell, outcome_badge
from metakernelbench.report.lifts import Lift, Lifts, Scale, scale_of
from metakernelbench.report.names import Link
from metakernelbench.report.study import Study


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Problems (rows) by model and direction (columns): a comparison or several in each cell."""

    heads: tuple[tuple[str, str], ...]
    """(model, direction) of every column."""
    rows: tuple[tuple[Link, tuple[tuple[Cell, ...], ...]], ...]


@dataclass(frozen=True, kw_only=True)
class ScopeView:
    """The page of a model, a family, or both."""

    anchor: str
    title: str
    above: tuple[Link, ...]
    whole: Lift
    lifts: tuple[tuple[str, tuple[Lift, ...]], ...]
    scale: Scale
    matrix: Matrix
    filter: str
    """The query that shows the same comparisons in the table of all."""


@dataclass(frozen=True, kw_only=True)
class TableCell:
    """One cell of a sortable table: what is shown, what it is sorted by, and perhaps where it leads."""

    text: str
    value: float | str
    anchor: str | None = None
    badge: Badge | None = None
    figure: bool = False


@dataclass(frozen=True, kw_only=True)
class ProblemView:
    """The page of a problem."""

    anchor: str
    title: str
    subject: str | None
    above: tuple[Link, ...]
    heads: tuple[str, ...]
    comparisons: tuple[tuple[TableCell, ...], ...]
    attempts: tuple[tuple[TableCell, ...], ...]


COMPARISON_HEADS = (
    "problem", "outcome", "ρ", "model", "direction", "verdict", "source", "baseline", "treatment", "family",
)  # fmt: skip
FIGURES = frozenset({"ρ", "source", "baseline", "treatment", "speedup", "time", "submissions", "turns", "minutes"})
"""Columns that are aligned to the right."""
ATTEMPT_HEADS = ("attempt", "model", "state", "speedup", "time", "submissions", "turns", "minutes", "skill")


def scopes(study: Study, lifts: Lifts, rows: list[Row]) -> Iterator[ScopeView]:
    """Every model, every family, and every family with every model, over the comparisons of the main question."""
    asked = {names.comparison(row) for row in study.main.iter_rows(named=True)}
    rows = [row for row in rows if names.comparison(row) in asked]
    families = figures.families_in_order(study.main)
    for model in [*study.models, None]:
        for family in [*families, None]:
            if model is None and family is None:
                continue
            mine = [row for row in rows if model in (None, row["model"]) and family in (None, row["family"])]
            if mine:
                yield _scope(study, lifts, model, family, mine)


def _scope(study: Study, lifts: Lifts, model: str | None, family: str | None, rows: list[Row]) -> ScopeView:
    group = {name: value for name, value in (("model", model), ("family", family)) if value is not None}
    whole = lifts.of("all of these", **group)
    groups = [("all", (whole,)), ("by direction", tuple(lifts.each("direction", study.directions, **group)))]
    if family is None:
        families = figures.families_in_order(study.main)
        found = [lifts.of(f, names.scope(model, f), family=f, **group) for f in families]
        groups.append(("by family", tuple(one for one in found if one.n)))
    if model is None and len(study.models) > 1:
        found = [lifts.of(m, names.scope(m, family), model=m, **group) for m in study.models]
        groups.append(("by model", tuple(one for one in found if one.n)))
    shown = tuple((title, group) for title, group in groups if group and whole.n)
    return ScopeView(
        anchor=names.scope(model, family),
        title=", ".join(name for name in (family, model) if name is not None),
        above=(Link(anchor=names.scope(model, None), text=model),) if model is not None and family is not None else (),
        whole=whole,
        lifts=shown,
        scale=scale_of(one for _, group in shown for one in group),
        matrix=_matrix(rows),
        filter=query(model=model, family=family),
    )


def query(**wanted: str | None) -> str:
    """The address of the table of comparisons with only these rows."""
    from urllib.parse import urlencode

    given = {name: value for name, value in wanted.items() if value is not None}
    return f"comparisons?{urlencode(given)}" if given else "comparisons"


def _matrix(rows: list[Row]) -> Matrix:
    heads = sorted({(row["model"], row["direction"]) for row in rows})
    cells: dict[str, dict[tuple[str, str], list[Cell]]] = {}
    for row in rows:
        place = cells.setdefault(row["problem"], {}).setdefault((row["model"], row["direction"]), [])
        place.append(cell(row))
    return Matrix(
        heads=tuple(heads),
        rows=tuple(
            (Link(anchor=names.problem(p), text=p), tuple(tuple(found.get(head, ())) for head in heads))
            for p, found in sorted(cells.items())
        ),
    )


def problem_view(study: Study, problem: str, rows: list[Row]) -> ProblemView:
    """The page of one problem; `rows` are its comparisons."""
    attempts = study.attempts.filter(pl.col("problem") == problem)
    family = attempts["family"][0]
    heads, cells = comparison_table(rows, several=len({row["question"] for row in rows}) > 1)
    return ProblemView(
        anchor=names.problem(problem),
        title=problem,
        subject=_subject(study, problem),
        above=(Link(anchor=names.scope(None, family), text=family),),
        heads=heads,
        comparisons=cells,
        attempts=tuple(_attempt_cells(row, study) for row in attempts.iter_rows(named=True)),
    )


def _subject(study: Study, problem: str) -> str | None:
    """What the problem computes; None for one that the catalogue does not know."""
    try:
        return study.subject_of(problem)
    except MkbError:
        return None


def comparison_table(rows: list[Row], *, several: bool) -> tuple[tuple[str, ...], tuple[tuple[TableCell, ...], ...]]:
    """Heads and rows of a table of comparisons; `several` adds a column that says what a comparison asks."""
    heads = (*COMPARISON_HEADS, *(["question"] if several else []))
    return heads, tuple(
        (*_comparison_cells(row), *([TableCell(text=row["question"], value=row["question"])] if several else []))
        for row in rows
    )


def _comparison_cells(row: Row) -> tuple[TableCell, ...]:
    """A comparison as a row of `COMPARISON_HEADS`."""
    outcome = outcome_badge(row)
    first = TableCell(text=row["problem"], value=row["problem"], anchor=names.comparison(row))
    states = tuple(_state(row, role) for role in ("source", "baseline", "treatment"))
    rho = TableCell(text=number(row["rho"], "number"), value=_or_blank(row["rho"]), figure=True)
    return (
        first,
        TableCell(text=outcome.text, value=outcome.text, badge=outcome),
        rho,
        *(TableCell(text=row[name], value=row[name]) for name in ("model", "direction", "change")),
        *states,
        TableCell(text=row["family"], value=row["family"]),
    )


def _state(row: Row, role: str) -> TableCell:
    state, speedup = row[f"{role}_state"], row[f"{role}_speedup"]
    if state == "none":
        return TableCell(text=MISSING, value="", figure=True)
    text = number(speedup, "factor") if state == "passed" else state
    return TableCell(text=text, value=speedup if state == "passed" else 0.0, figure=True)


def _or_blank(value: float | None) -> float | str:
    return "" if value is None else value


def _attempt_cells(row: dict[str, Any], study: Study) -> tuple[TableCell, ...]:
    planned = study.planned[row["key"]]
    running = study.running.get(planned.key)
    badge = Badge(kind="running", text="running") if running else state_badge(row["state"], None)
    if row["state"] == "passed":
        badge = Badge(kind="passed", text="passed")
    turns = running.turns if running else row["turns"]
    skill = MISSING if row["has_skill"] is None else "yes" if row["has_skill"] else "no"
    minutes = None if row["agent_s"] is None else row["agent_s"] / 60
    name = f"{planned.dsl}, {planned.label}"
    return (
        TableCell(text=name, value=name, anchor=names.attempt(planned)),
        TableCell(text=planned.model, value=planned.model),
        TableCell(text=badge.text, value=badge.text, badge=badge),
        TableCell(text=number(row["speedup"], "factor"), value=_or_blank(row["speedup"]), figure=True),
        TableCell(text=milliseconds(row["ms"]), value=_or_blank(row["ms"]), figure=True),
        *(
            TableCell(text=number(count, "count"), value=_or_blank(count), figure=True)
            for count in (row["submissions"], turns)
        ),
        TableCell(text=number(minutes, "number"), value=_or_blank(minutes), figure=True),
        TableCell(text=skill, value=skill),
    )
