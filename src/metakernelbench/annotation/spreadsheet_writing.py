"""Writes the spreadsheet that a person annotates with. Every text is written as text, so that nothing in it becomes a
formula, a link or a control character."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from metakernelbench.annotation.labels import CauseLabel, Labels, SkillLabels, UptakeLabels
from metakernelbench.annotation.questions import Asked
from metakernelbench.annotation.rubric import NO_CAUSE, rubric, taxonomy
from metakernelbench.annotation.spreadsheet import (
    CAUSE_COLUMNS,
    HANDED_COLUMNS,
    NO,
    SKILL_COLUMNS,
    SUPPORTED,
    UNSUPPORTED,
    UPTAKE_COLUMNS,
    YES,
    Form,
    check_name,
    words,
)
from metakernelbench.annotation.statements import parts, touched
from metakernelbench.annotation.subjects import Subjects
from metakernelbench.errors import UserError
from metakernelbench.files import write_whole, writing
from metakernelbench.store.annotations import Annotations
from metakernelbench.text import harmless

_CELL = 30_000
"""Characters of one cell; a spreadsheet takes 32,767."""
_WIDE = frozenset({"text", "statements", "evidence", "sentence of the note", "sentence of the own note", "what"})

type _Rows = list[Sequence[str]]


def write_sheet(path: Path, subjects: Subjects, kept: Annotations, annotator: str) -> dict[str, int]:
    """Write the spreadsheet, filled in with what this person has labelled so far; returns how much it asks for.

    Raises `UserError` where it cannot be written, and where there is a file already.
    """
    import xlsxwriter

    check_name(path)
    if path.exists():
        raise UserError(
            f"{path} exists, and what a person has filled in there would be lost",
            hint="bring it into the store with --import and then remove it, or choose another name",
        )
    form = Form.of(subjects, kept)
    given = form.labels_by(kept, annotator)
    written = io.BytesIO()
    book = xlsxwriter.Workbook(written, {"in_memory": True})  # it leaves its temporary files behind where it fails
    writer = _Writer(book)
    marks = [SUPPORTED, UNSUPPORTED]
    causes = [*taxonomy().cause_ids, NO_CAUSE]
    writer.table("how to", ("word", "what"), _help())
    writer.table("skills", SKILL_COLUMNS, _skill_rows(form, given), dict.fromkeys(rubric().ids, marks))
    writer.table("uptake", UPTAKE_COLUMNS, _uptake_rows(form, given), {"uptake": list(taxonomy().uptake_ids)})
    writer.table("handed on", HANDED_COLUMNS, _handed_rows(form, given), {"handed on": [YES, NO]})
    writer.table("causes", CAUSE_COLUMNS, _cause_rows(form, given), {"cause": causes})
    writer.table("attempts", ("attempt", "part", "text"), _reading(form))
    book.close()
    with writing(path, hint="choose another name"):
        write_whole(path, written.getvalue())
    return {"skills": len(form.skills), "attempts": len(form.uptake), "causes": len(form.causes)}


class _Writer:
    """Sheets with a head, text cells and lists of choices."""

    def __init__(self, book: Any) -> None:
        self._book = book
        self._head = book.add_format({"bold": True, "bottom": 1, "text_wrap": True, "valign": "top"})
        self._body = book.add_format({"text_wrap": True, "valign": "top"})

    def table(
        self, name: str, columns: Sequence[str], rows: _Rows, choices: Mapping[str, list[str]] | None = None
    ) -> None:
        sheet = self._book.add_worksheet(name)
        sheet.freeze_panes(1, 0)
        for place, column in enumerate(columns):
            sheet.set_column(place, place, 70 if column in _WIDE else 16, self._body)
            sheet.write_string(0, place, column, self._head)
            if rows and choices and column in choices:
                sheet.data_validation(1, place, len(rows), place, {"validate": "list", "source": choices[column]})
        for line, row in enumerate(rows, start=1):
            for place, cell in enumerate(row):
                sheet.write_string(line, place, harmless(cell)[:_CELL], self._body)


_HOW_TO: _Rows = [
    ("how to", "Judge what the sentences say. Nothing here tells you whose they are or what came of them."),
    ("skills", "A row a statement. Under each category that it meets: s where evidence is stated, u where it is not."),
    ("done", "When a skill is finished, an x in its first row; without it the skill counts as not labelled."),
    ("uptake", "A row an attempt and category: choose from the list; copy words from the attempt as evidence."),
    ("handed on", "x with the two sentences where a claim came back unverified, otherwise no."),
    ("causes", "The first that applies, in the order below, with words from the attempt as evidence."),
]


def _help() -> _Rows:
    known: _Rows = [(c.id, f"{c.definition} Counts where: {c.criterion}") for c in rubric().category]
    known += [(uptake.id, uptake.definition) for uptake in taxonomy().uptake]
    known.append(("handed on", f"{taxonomy().propagation.definition} {taxonomy().propagation.criterion}"))
    known += [(cause.id, cause.definition) for cause in taxonomy().cause]
    return [("words", words()), *_HOW_TO, *known]


def _skill_rows(form: Form, given: Mapping[str, Labels]) -> _Rows:
    rows: _Rows = []
    for digest, text in form.skills.items():
        labels = given.get(digest)
        marks = _marks(text, labels) if isinstance(labels, SkillLabels) else {}
        for index, part in enumerate(parts(text)):
            done = YES if index == 0 and labels is not None else ""
            cells = [marks.get((index, category), "") for category in rubric().ids]
            rows.append((digest, done, str(index + 1), part.of(text), *cells))
    return rows


def _marks(text: str, labels: SkillLabels) -> dict[tuple[int, str], str]:
    """(statement, category) → its mark."""
    found = parts(text)
    return {
        (index, statement.category): SUPPORTED if statement.supported else UNSUPPORTED
        for statement in labels.statements
        for index in touched(found, statement.start, statement.end)
    }


def _uptake_rows(form: Form, given: Mapping[str, Labels]) -> _Rows:
    rows: _Rows = []
    for subject, asked in form.uptake.items():
        labels = given.get(subject)
        known = {one.category: one for one in labels.uptake} if isinstance(labels, UptakeLabels) else {}
        for category, statements in _statements(asked):
            one = known.get(category)
            filled = ("", "") if one is None else (one.uptake, one.evidence or "")
            rows.append((subject, category, statements, *filled))
    return rows


def _statements(asked: Asked) -> Iterator[tuple[str, str]]:
    """The categories that are asked about, each with its statements, as the question lists them."""
    category, lines = "", list[str]()
    for line in asked.data["statements"].splitlines():
        if line.startswith("- "):
            lines.append(line)
            continue
        if category:
            yield category, "\n".join(lines)
        category, lines = line.removesuffix(":"), []
    yield category, "\n".join(lines)


def _handed_rows(form: Form, given: Mapping[str, Labels]) -> _Rows:
    rows: _Rows = []
    for subject, asked in form.uptake.items():
        labels = given.get(subject)
        if isinstance(labels, UptakeLabels) and labels.propagated:
            rows += [(subject, YES, one.source, one.own) for one in labels.propagated]
        else:
            open_yet = labels is None and "own note" in asked.data
            rows.append((subject, "" if open_yet else NO, "", ""))
    return rows


def _cause_rows(form: Form, given: Mapping[str, Labels]) -> _Rows:
    rows: _Rows = []
    for subject in form.causes:
        label = given.get(subject)
        known = (label.cause, label.evidence or "") if isinstance(label, CauseLabel) else ("", "")
        rows.append((subject, *known))
    return rows


def _reading(form: Form) -> _Rows:
    """Notes and courses of all attempts that are asked about, in pieces that fit a cell."""
    rows: _Rows = []
    for subject, asked in (form.uptake | form.causes).items():
        for name in ("note", "attempt", "own note"):
            text = asked.data.get(name, "")
            rows += [(subject, name, text[at : at + _CELL]) for at in range(0, len(text), _CELL)]
    return rows
