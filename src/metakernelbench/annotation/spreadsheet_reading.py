"""Reads what a person has filled into a spreadsheet, and holds it to the same checks as a model's answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from metakernelbench.annotation.labels import (
    CategoryUptake,
    CauseLabel,
    Handed,
    Labels,
    Question,
    SkillLabels,
    Statement,
    UptakeLabels,
)
from metakernelbench.annotation.questions import Asked
from metakernelbench.annotation.rubric import NO_CAUSE, rubric, taxonomy
from metakernelbench.annotation.spreadsheet import (
    HUMAN,
    NO,
    SHEETS,
    SUPPORTED,
    TRACELESS,
    UNSUPPORTED,
    YES,
    Form,
    check_name,
    words,
)
from metakernelbench.annotation.statements import find_quote, parts
from metakernelbench.annotation.subjects import Subjects
from metakernelbench.errors import UserError
from metakernelbench.files import why_unread
from metakernelbench.store.annotations import Annotations, Answer
from metakernelbench.text import harmless


def read_sheet(path: Path, subjects: Subjects, kept: Annotations, annotator: str) -> list[Answer]:
    """The answers in a spreadsheet that a person has filled in. Raises `UserError`, which names sheet and row."""
    form, sheets = Form.of(subjects, kept), _read(path)
    _check_words(path, sheets["how to"])
    labels: list[tuple[Question, str, Labels]] = []
    labels += [("skill", subject, label) for subject, label in _skills_in(sheets["skills"], form)]
    labels += [
        ("uptake", subject, label) for subject, label in _uptakes_in(sheets["uptake"], sheets["handed on"], form)
    ]
    labels += [("cause", subject, label) for subject, label in _causes_in(sheets["causes"], form)]
    if not labels:
        raise UserError(f"{path} holds no labels", hint="a finished skill has an x in the column `done`")
    return [_answer(question, subject, label, annotator) for question, subject, label in labels]


def overtaken(answers: Sequence[Answer], subjects: Subjects, kept: Annotations) -> int:
    """How many of these answers are to questions that are no longer asked: labels of skills that came with them may
    have changed the majority, and with it what is asked of attempts."""
    form = Form.of(subjects, kept)
    return sum(a.question != "skill" and a.subject not in form.uptake and a.subject not in form.causes for a in answers)


def _check_words(path: Path, rows: list[_Row]) -> None:
    found = next((row.get("what", "") for row in rows if row.get("word") == "words"), "none that are named")
    if found != words():
        raise UserError(
            f"{path} was written for other words ({found}; these are {words()})", hint="export again and carry over"
        )


def _answer(question: Question, subject: str, labels: Labels, annotator: str) -> Answer:
    version = rubric().version if question == "skill" else taxonomy().version
    return Answer(
        question=question,
        subject=subject,
        request=f"{HUMAN}{annotator}:{question}:{subject}:{version}",
        annotator=HUMAN + annotator,
        pass_number=1,
        words_version=version,
        prompt_version=None,
        temperature=None,
        labels=labels.model_dump_json(),
        answered_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


class _Row(dict[str, str]):
    """One row of a sheet: column → text, with its place for error messages."""

    place: str = ""

    def fault(self, what: str) -> UserError:
        return UserError(f"{self.place}: {what}", hint="correct the cell and import the file again; nothing was kept")


def _read(path: Path) -> dict[str, list[_Row]]:
    from python_calamine import CalamineError, load_workbook

    check_name(path)
    try:
        book = load_workbook(path)
        missing = sorted(set(SHEETS) - set(book.sheet_names))
        if missing:
            raise UserError(f"{path} has no sheet `{missing[0]}`; it is not one that `--export` wrote")
        return {
            name: _rows(path, name, book.get_sheet_by_name(name).to_python(skip_empty_area=False)) for name in SHEETS
        }
    except (OSError, CalamineError) as error:
        raise UserError(f"cannot read {path}: {why_unread(error, path)}") from error


def _rows(path: Path, name: str, cells: list[list[Any]]) -> list[_Row]:
    if not cells:
        return []
    head, found = [str(cell) for cell in cells[0]], []
    for number, line in enumerate(cells[1:], start=2):
        row = _Row(zip(head, (_plain(cell) for cell in line), strict=False))
        row.place = f"{path}, sheet `{name}`, row {number}"
        found.append(row)
    return found


def _plain(cell: Any) -> str:
    """A cell's text; a spreadsheet may have made a number of it."""
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell).strip()


def _skills_in(rows: list[_Row], form: Form) -> Iterator[tuple[str, SkillLabels]]:
    by_skill: dict[str, list[_Row]] = {}
    for row in rows:
        by_skill.setdefault(row.get("skill", ""), []).append(row)
    for digest, its in by_skill.items():
        if not any(row.get("done") for row in its):
            continue
        if digest not in form.skills:
            raise its[0].fault("this skill is not one of the experiment's; has an attempt run again since the export?")
        yield digest, SkillLabels(statements=tuple(_statements_in(its, form.skills[digest])))


def _statements_in(rows: list[_Row], text: str) -> Iterator[Statement]:
    found = parts(text)
    for row in rows:
        for category in rubric().ids:
            mark = row.get(category, "").lower()
            if not mark:
                continue
            if mark not in (SUPPORTED, UNSUPPORTED):
                raise row.fault(f"`{mark}` under `{category}`; write s, u or nothing")
            number = row.get("statement", "")
            if not number.isdecimal() or not 1 <= int(number) <= len(found):
                raise row.fault(f"there is no statement `{number}` in this skill")
            part = found[int(number) - 1]
            yield Statement(
                category=category, quote=part.of(text), start=part.start, end=part.end, supported=mark == SUPPORTED
            )


def _uptakes_in(rows: list[_Row], handed: list[_Row], form: Form) -> Iterator[tuple[str, UptakeLabels]]:
    by_attempt: dict[str, list[_Row]] = {}
    for row in rows:
        by_attempt.setdefault(row.get("attempt", ""), []).append(row)
    for subject, its in by_attempt.items():
        filled = [row for row in its if row.get("uptake")]
        if not filled:
            continue
        if subject not in form.uptake:
            raise its[0].fault("this attempt is not asked about any more; export again")
        if len(filled) < len(its):
            empty = next(row for row in its if not row.get("uptake"))
            raise empty.fault("an attempt's uptake is filled in for all of its categories or for none")
        attempt = form.uptake[subject].data["attempt"]
        uptake = tuple(_uptake_in(row, attempt) for row in filled)
        mine = [row for row in handed if row.get("attempt") == subject]
        yield subject, UptakeLabels(uptake=uptake, propagated=tuple(_handed_in(mine, form.uptake[subject])))


def _uptake_in(row: _Row, attempt: str) -> CategoryUptake:
    word, evidence = row["uptake"], row.get("evidence", "")
    if word not in taxonomy().uptake_ids:
        raise row.fault(f"`{word}` is no uptake; choose one from the list")
    if evidence and find_quote(harmless(attempt), evidence) is None:
        raise row.fault("the evidence does not stand in the attempt word for word")
    if not evidence and word not in TRACELESS:
        raise row.fault(f"`{word}` needs words from the attempt as evidence")
    return CategoryUptake(category=row["category"], uptake=word, evidence=evidence if word not in TRACELESS else None)


def _handed_in(rows: list[_Row], asked: Asked) -> Iterator[Handed]:
    for row in rows:
        mark = row.get("handed on", "").lower()
        if mark not in (YES, NO):
            raise row.fault("`handed on` is x or no for every attempt whose uptake is filled in")
        if mark == NO:
            continue
        source, own = row.get("sentence of the note", ""), row.get("sentence of the own note", "")
        for text, part in ((source, "note"), (own, "own note")):
            if not text or find_quote(harmless(asked.data.get(part, "")), text) is None:
                raise row.fault(f"the sentence of the {part} is missing or does not stand there word for word")
        yield Handed(source=source, own=own)


def _causes_in(rows: list[_Row], form: Form) -> Iterator[tuple[str, CauseLabel]]:
    for row in rows:
        subject, cause, evidence = row.get("attempt", ""), row.get("cause", ""), row.get("evidence", "")
        if not cause:
            continue
        if subject not in form.causes:
            raise row.fault("this attempt is not asked about any more; export again")
        if cause == NO_CAUSE:
            yield subject, CauseLabel(cause=NO_CAUSE, decided_by="annotator")
            continue
        if cause not in taxonomy().cause_ids:
            raise row.fault(f"`{cause}` is no cause; choose one from the list")
        attempt = harmless(form.causes[subject].data["attempt"])
        if not evidence or find_quote(attempt, evidence) is None:
            raise row.fault("a cause needs words from the attempt as evidence, word for word")
        step = next(step.id for step in reversed(taxonomy().step) if step.cause == cause)
        yield subject, CauseLabel(cause=cause, step=step, decided_by="annotator", evidence=evidence)
