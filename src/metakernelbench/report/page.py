"""The report: one HTML file that needs nothing else, or the same page in parts for whoever serves it.

The file has the overview as plain HTML, and every other page packed, by part: see `names.py` for which part holds what.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from metakernelbench import __version__
from metakernelbench.analysis import figures
from metakernelbench.analysis.figures.gallery import pictures
from metakernelbench.analysis.outcome import outcomes
from metakernelbench.experiments.designs import PlannedAttempt
from metakernelbench.report import names
from metakernelbench.report.attempt_view import attempt_view
from metakernelbench.report.comparison_view import Row, comparison_view
from metakernelbench.report.lifts import Lifts
from metakernelbench.report.overview import overview
from metakernelbench.report.packing import DETAILS, Detail, as_json, packed_all, richest
from metakernelbench.report.scopes import (
    ATTEMPT_HEADS,
    FIGURES,
    ScopeView,
    comparison_table,
    problem_view,
    scopes,
)
from metakernelbench.report.study import Study
from metakernelbench.report.tables import annotation_pictures, annotation_tables, further_tables, main_tables
from metakernelbench.report.texts import plain
from metakernelbench.report.timeline import axes_of
from metakernelbench.text import harmless

_TEMPLATES = Path(__file__).parent / "templates"
_SCRIPTS = ("unpack.js", "pages.js", "tables.js", "code.js", "comparison.js", "start.js")
_HEAD = 4096
"""Bytes within which the title of a report ends."""
_TITLE = " · MetaKernelBench</title>".encode()
"""How it ends: `templates/shell.html.j2`."""

SIZE_LIMIT = 14_800_000
"""Bytes that a report may take: it shows as much of what agents did as fits."""


def render(study: Study) -> str:
    """The report as one HTML file."""
    report = Report(study)
    shared = packed_all(report.shared, report.part)
    room = SIZE_LIMIT - sum(map(len, shared.values())) - len(report.shell(report.overview(), parts=Markup("")))
    detail, cells = richest(report.cells, report.cell, room)
    return report.shell(report.overview(left_out=detail.left_out), parts=as_json(shared | cells))


def is_report(path: Path) -> bool:
    """Whether a file is a report, known by its title, or empty."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    return not head or (head.startswith(b"<!doctype html>") and _TITLE in head)


class Report:
    """The pages of one study, each made when it is asked for."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self._lifts = Lifts(study.main, study.band)

    @cached_property
    def rows(self) -> list[Row]:
        """The comparisons, in the order in which one leads to the next."""
        frame = self.study.comparisons.with_columns(outcomes(self.study.comparisons, self.study.band))
        running = self.study.running
        return [
            row | {"running": row["treatment"] in running, "question": f"{row['design']}: {row['arm']}"}
            for row in frame.iter_rows(named=True)
        ]

    @cached_property
    def shared(self) -> dict[str, Callable[[], str]]:
        """Part → its HTML, for all parts that are not cells."""
        parts: dict[str, Callable[[], str]] = {
            "comparisons": self._comparisons,
            "tables": self._tables,
            "pictures": self._pictures,
            "search": self._search,
        }
        for view in scopes(self.study, self._lifts, self.rows):
            parts[view.anchor] = lambda view=view: self._scope(view)  # type: ignore[misc]
        for problem in self.study.attempts["problem"].unique(maintain_order=True):
            parts[names.problem(problem)] = lambda problem=problem: self._problem(problem)  # type: ignore[misc]
        for variant, text in self._told.items():
            parts[names.variant(*variant)] = lambda v=variant, t=text: self._variant(v, t)  # type: ignore[misc]
        return parts

    @cached_property
    def _attempts_by_cell(self) -> dict[str, list[PlannedAttempt]]:
        found: dict[str, list[PlannedAttempt]] = {}
        for key in self.study.attempts["key"]:
            attempt = self.study.planned[key]
            found.setdefault(names.cell(attempt.problem, attempt.model, attempt.replicate), []).append(attempt)
        return found

    @cached_property
    def _rows_by_cell(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for index, row in enumerate(self.rows):
            found.setdefault(names.part_of(names.comparison(row)), []).append(index)
        return found

    @cached_property
    def _told(self) -> dict[tuple[str, str], str]:
        """(problem, DSL) → what every attempt at the variant was told: the instruction of a solo attempt."""
        found: dict[tuple[str, str], str] = {}
        for attempt in self.study.plan.attempts:
            record = self.study.records.get(attempt.key)
            if attempt.source is None and record is not None and record.instruction:
                found.setdefault((attempt.problem, attempt.dsl), record.instruction)
        return found

    @property
    def cells(self) -> list[str]:
        """The parts that hold attempts and comparisons."""
        return list(self._attempts_by_cell)

    def part(self, name: str) -> str:
        """The HTML of a part, at full detail. Raises `KeyError` for an unknown one."""
        if name == "overview":
            return self.overview()
        if name in self.shared:
            return self.shared[name]()
        return self.cell(name, DETAILS[0])

    def cell(self, name: str, detail: Detail) -> str:
        """The pages of one cell: its comparisons and its attempts. Raises `KeyError` for an unknown one."""
        attempts = self._attempts_by_cell[name]
        records = [self.study.records[a.key] for a in attempts if a.key in self.study.records]
        axes = axes_of(records)
        base = self._told
        views = [attempt_view(a, self.study, axes, detail, base.get((a.problem, a.dsl))) for a in attempts]
        rows = self.rows
        comparisons = [
            comparison_view(
                rows[index],
                self.study,
                rows[index - 1] if index else None,
                rows[index + 1] if index + 1 < len(rows) else None,
            )
            for index in self._rows_by_cell.get(name, ())
        ]
        return _html("cell.html.j2", attempts=views, comparisons=comparisons)

    def overview(self, *, left_out: str | None = None) -> str:
        """The first page."""
        found = overview(self.study, self._lifts, left_out=left_out)
        return _html("overview.html.j2", study=self.study, overview=found)

    def _scope(self, view: ScopeView) -> str:
        return _html("scope.html.j2", view=view)

    def _problem(self, problem: str) -> str:
        rows = [row for row in self.rows if row["problem"] == problem]
        view = problem_view(self.study, problem, rows)
        return _html("problem.html.j2", view=view, attempt_heads=ATTEMPT_HEADS)

    def _variant(self, variant: tuple[str, str], text: str) -> str:
        problem = names.Link(anchor=names.problem(variant[0]), text=variant[0])
        title = f"What every attempt at {variant[0]} in {variant[1]} was told"
        return _html("variant.html.j2", anchor=names.variant(*variant), problem=problem, title=title, text=plain(text))

    def _comparisons(self) -> str:
        facets = {
            "model": self.study.models,
            "family": figures.families_in_order(self.study.comparisons),
            "direction": sorted({row["direction"] for row in self.rows}),
            "question": sorted({row["question"] for row in self.rows}),
            "outcome": sorted({row["outcome"] or "unjudged" for row in self.rows}),
        }
        several = len(facets["question"]) > 1
        heads, rows = comparison_table(self.rows, several=several)
        shown = {name: values for name, values in facets.items() if len(values) > 1}
        return _html("comparisons.html.j2", heads=heads, rows=rows, facets=shown)

    def _tables(self) -> str:
        groups = [
            (None, main_tables(self.study)),
            ("When, why and how surely", further_tables(self.study)),
            ("What skills held and how they were used", annotation_tables(self.study)),
        ]
        return _html("tables.html.j2", groups=[(title, tables) for title, tables in groups if tables])

    def _pictures(self) -> str:
        found = pictures(self.study.frames, link=lambda row: f"#{names.comparison(row)}")
        found += annotation_pictures(self.study)
        shown = [(picture.name, picture.title, _svg(picture.chart), picture.note) for picture in found]
        return _html("pictures.html.j2", pictures=shown)

    def _search(self) -> str:
        """What the search box looks through: address, title, further words."""
        entries = [(view.anchor, view.title, "model family") for view in scopes(self.study, self._lifts, self.rows)]
        entries += [
            (names.problem(problem), problem, f"{family} problem")
            for problem, family in self.study.attempts.select("problem", "family").unique(maintain_order=True).rows()
        ]
        entries += [
            (
                names.comparison(row),
                f"{row['problem']} {row['direction']} {row['model']}",
                f"{row['family']} {row['outcome'] or 'unjudged'} {row['change']}",
            )
            for row in self.rows
        ]
        found = [[harmless(text) for text in entry] for entry in entries]
        return json.dumps(found, ensure_ascii=False).replace("<", "\\u003c")

    def shell(self, overview: str, *, parts: Markup | None) -> str:
        """The page itself: with all `parts` in it, or for a server that has them, without."""
        script = _script()
        return _html(
            "shell.html.j2",
            study=self.study,
            version=__version__,
            overview=Markup(overview),
            parts=parts,
            style=Markup(_text("report.css")),
            script=Markup(script),
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        )


def _svg(chart: Any) -> Markup:
    """A chart inline. Its links stay out of the tab order: the table of comparisons has the same ones."""
    drawn = re.sub(r'(<a [^>]*href=")[^"#]*#', r"\1#", harmless(figures.svg(chart)))  # it makes links absolute
    drawn = re.sub(r'<a ([^>]*?)(?: target="[^"]*")?>', r'<a tabindex="-1" \1>', drawn)
    # What only holds marks is no picture of its own for whoever listens to the page.
    return Markup(re.sub(r' role="graphics-symbol" aria-roledescription="[^"]* mark container"', "", drawn))


def _html(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: harmless(value) if type(value) is str else value,
    )
    environment.filters["zip"] = zip
    environment.filters["clock"] = _clock
    environment.filters["ticked"] = _ticked
    environment.globals["figures"] = FIGURES
    return environment


def _ticked(text: str) -> Markup:
    """A sentence of ours with what stands between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(harmless(text)))))


def _clock(seconds: float) -> str:
    seconds = max(0.0, seconds)  # an agent's own clock may go backwards
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


@cache
def _script() -> str:
    return '"use strict";\n' + "\n".join(_text(name) for name in _SCRIPTS)


def _text(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")
