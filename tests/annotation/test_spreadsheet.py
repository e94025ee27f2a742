"""A person annotates in a spreadsheet: what is written, filled in and read back is the same, and mistakes are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from python_calamine import load_workbook

from metakernelbench.annotation.labels import CauseLabel, SkillLabels, UptakeLabels
from metakernelbench.annotation.rubric import rubric
from metakernelbench.annotation.spreadsheet import HUMAN
from metakernelbench.annotation.spreadsheet_reading import overtaken, read_sheet
from metakernelbench.annotation.spreadsheet_writing import write_sheet
from metakernelbench.errors import UserError
from metakernelbench.store.annotations import Answer
from metakernelbench.store.store import Store
from tests.annotation.study import REMARK, SOURCES, small_study
from tests.annotation.test_run import annotated_study, results, subjects
from tests.disk import files_of_at_most

type Cells = dict[str, list[list[str]]]


def cells_of(path: Path) -> Cells:
    book = load_workbook(path)
    return {
        name: [[str(cell) for cell in row] for row in book.get_sheet_by_name(name).to_python()]
        for name in book.sheet_names
    }


def write_cells(path: Path, cells: Cells) -> Path:
    """As a person's program writes it: everything typed by hand."""
    import xlsxwriter

    with xlsxwriter.Workbook(path) as book:
        for name, rows in cells.items():
            sheet = book.add_worksheet(name)
            for number, row in enumerate(rows):
                sheet.write_row(number, 0, row)
    return path


def filled(cells: Cells) -> Cells:
    """Every skill finished with one label in its second statement, every uptake ignored, every cause the toolchain."""
    head = cells["skills"][0]
    for row in cells["skills"][1:]:
        if row[head.index("statement")] == "1":
            row[head.index("done")] = "x"
        if row[head.index("statement")] == "2":
            row[head.index("workload_fact")] = "S"
    for row in cells["uptake"][1:]:
        row[3] = "ignored"
    for row in cells["handed on"][1:]:
        row[1] = "no"
    for row in cells["causes"][1:]:
        row[1:3] = ["toolchain_friction", REMARK]
    return cells


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A study that a model has annotated, so that uptake and causes are asked as well."""
    return annotated_study(tmp_path / "store")


def exported(store: Store, path: Path) -> Cells:
    write_sheet(path, subjects(store), store.annotations, "ana")
    return cells_of(path)


def imported(store: Store, path: Path) -> list[Answer]:
    return read_sheet(path, subjects(store), store.annotations, "ana")


def test_what_a_person_fills_in_comes_back_as_answers(store: Store, tmp_path: Path) -> None:
    sheet = filled(exported(store, tmp_path / "out.xlsx"))
    answers = imported(store, write_cells(tmp_path / "in.xlsx", sheet))
    by = {question: [a for a in answers if a.question == question] for question in ("skill", "uptake", "cause")}
    # Short skills have one statement only, and are finished all the same.
    assert [len(by[question]) for question in ("skill", "uptake", "cause")] == [2 * len(SOURCES), 12, 4]
    assert {a.annotator for a in answers} == {f"{HUMAN}ana"}
    labels = [SkillLabels.model_validate_json(a.labels) for a in by["skill"]]
    assert sum(found.categories == {"workload_fact"} for found in labels) == len(SOURCES)
    assert all(s.supported for found in labels for s in found.statements)
    uptake = UptakeLabels.model_validate_json(by["uptake"][0].labels)
    assert {one.uptake for one in uptake.uptake} == {"ignored"}
    cause = CauseLabel.model_validate_json(by["cause"][0].labels)
    assert (cause.cause, cause.step, cause.evidence) == ("toolchain_friction", "toolchain_friction", REMARK)


def test_a_second_export_shows_what_was_imported_and_reads_back_the_same(store: Store, tmp_path: Path) -> None:
    first = imported(store, write_cells(tmp_path / "in.xlsx", filled(exported(store, tmp_path / "out.xlsx"))))
    store.annotations.save(first)
    exported(store, tmp_path / "again.xlsx")
    again = {a.request: a.labels for a in imported(store, tmp_path / "again.xlsx")}
    # The person's skill labels changed the majority, and with it which categories uptake is asked of.
    for answer in first:
        if answer.question == "skill" or answer.request in again:
            assert again[answer.request] == answer.labels


def test_an_untouched_sheet_holds_no_labels(store: Store, tmp_path: Path) -> None:
    exported(store, tmp_path / "out.xlsx")
    with pytest.raises(UserError, match="holds no labels"):
        imported(store, tmp_path / "out.xlsx")


def test_people_and_models_are_compared(store: Store, tmp_path: Path) -> None:
    sheet = filled(exported(store, tmp_path / "out.xlsx"))
    store.annotations.save(imported(store, write_cells(tmp_path / "in.xlsx", sheet)))
    assert {a.annotator for a in results(store).answers if a.question == "skill"} == {"scripted/judge", "human:ana"}


def test_the_sheet_is_blind(store: Store, tmp_path: Path) -> None:
    whole = str(exported(store, tmp_path / "out.xlsx"))
    for word in ("from-cute", "/solo", "conditioned", "harmed"):
        assert word not in whole


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    hostile = '=HYPERLINK("http://evil", "x")\n\n- +1+1\n- @SUM(1)\n- https://evil.example\n- a\x07b\n'
    with small_study(tmp_path / "store") as store:
        about = subjects(store)
        planned = about.plan.attempts[0]
        store.save_attempt("small", planned, about.records[planned.key].model_copy(update={"skill": hostile}))
        cells = exported(store, tmp_path / "out.xlsx")
    texts = [row[3] for row in cells["skills"]]
    for text in ('=HYPERLINK("http://evil", "x")', "+1+1", "@SUM(1)", "https://evil.example", "a�b"):
        assert text in texts
    import zipfile

    with zipfile.ZipFile(tmp_path / "out.xlsx") as file:
        xml = "".join(file.read(name).decode() for name in file.namelist() if "sheet" in name)
    assert "<f>" not in xml
    assert "hyperlink" not in xml


@pytest.mark.parametrize(
    ("sheet", "column", "value", "message"),
    [
        ("skills", "workload_fact", "yes", "`yes` under `workload_fact`; write s, u or nothing"),
        ("skills", "skill", "0" * 64, "this skill is not one of the experiment's"),
        ("skills", "statement", "999", "there is no statement `999`"),
        ("uptake", "uptake", "loved", "`loved` is no uptake"),
        ("uptake", "uptake", "followed_fully", "needs words from the attempt as evidence"),
        ("uptake", "evidence", "never said", "the evidence does not stand in the attempt"),
        ("uptake", "uptake", "", "for all of its categories or for none"),
        ("handed on", "handed on", "maybe", "`handed on` is x or no"),
        ("handed on", "handed on", "x", "the sentence of the note is missing"),
        ("causes", "cause", "bad luck", "`bad luck` is no cause"),
        ("causes", "evidence", "", "a cause needs words from the attempt"),
    ],
)
def test_a_mistake_is_named_with_its_sheet_and_row(
    store: Store, tmp_path: Path, sheet: str, column: str, value: str, message: str
) -> None:
    cells: Any = filled(exported(store, tmp_path / "out.xlsx"))
    row = cells[sheet][1]
    row[cells[sheet][0].index(column)] = value
    if column == "statement":
        row[cells[sheet][0].index("workload_fact")] = "s"
    if column == "skill":
        row[cells[sheet][0].index("done")] = "x"
    with pytest.raises(UserError, match=message) as caught:
        imported(store, write_cells(tmp_path / "in.xlsx", cells))
    assert f"sheet `{sheet}`, row" in caught.value.message


def test_other_files_are_refused(store: Store, tmp_path: Path) -> None:
    (tmp_path / "no.xlsx").write_text("nothing")
    with pytest.raises(UserError, match="cannot read"):
        imported(store, tmp_path / "no.xlsx")
    with pytest.raises(UserError, match="does not end in"):
        write_sheet(tmp_path / "a.csv", subjects(store), store.annotations, "ana")
    with pytest.raises(UserError, match="has no sheet `causes`"):
        imported(store, write_cells(tmp_path / "other.xlsx", {"Sheet1": [["a"]]}))
    with pytest.raises(UserError, match="cannot write"):
        write_sheet(tmp_path / "missing" / "a.xlsx", subjects(store), store.annotations, "ana")


def test_a_sheet_that_somebody_may_have_filled_in_is_not_replaced(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "ana.xlsx"
    write_cells(path, filled(exported(store, tmp_path / "out.xlsx")))
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"ana\.xlsx exists, and what a person has filled in") as refused:
        write_sheet(path, subjects(store), store.annotations, "ana")
    assert "--import" in str(refused.value.hint)
    assert path.read_bytes() == before


def test_a_sheet_that_cannot_be_written_leaves_nothing_behind(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    with files_of_at_most(2000), pytest.raises(UserError, match=r"cannot write .*ana\.xlsx: File too large"):
        write_sheet(tmp_path / "ana.xlsx", subjects(store), store.annotations, "ana")
    assert not (tmp_path / "ana.xlsx").exists()
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_sheet_for_other_words_is_refused(store: Store, tmp_path: Path) -> None:
    cells = filled(exported(store, tmp_path / "out.xlsx"))
    assert cells["how to"][1] == ["words", "rubric 1, taxonomy 1"]
    cells["how to"][1][1] = "rubric 0, taxonomy 1"
    with pytest.raises(UserError, match="was written for other words"):
        imported(store, write_cells(tmp_path / "in.xlsx", cells))


def test_answers_to_questions_that_the_import_itself_has_changed_are_counted(store: Store, tmp_path: Path) -> None:
    answers = imported(store, write_cells(tmp_path / "in.xlsx", filled(exported(store, tmp_path / "out.xlsx"))))
    assert overtaken(answers, subjects(store), store.annotations) == 0
    store.annotations.save(answers)
    assert overtaken(answers, subjects(store), store.annotations) > 0


def test_columns_are_the_rubrics(store: Store, tmp_path: Path) -> None:
    assert exported(store, tmp_path / "out.xlsx")["skills"][0][4:] == list(rubric().ids)
