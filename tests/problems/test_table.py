"""The catalogue's page repeats what modules and records say, and is not allowed to fall behind them."""

from pathlib import Path

import pytest

from metakernelbench.problems.catalog import problem_ids
from metakernelbench.problems.table import BEGIN, END, read_measurements, render, replace_generated

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date():
    page = (ROOT / "docs" / "problems.md").read_text()
    measurements = read_measurements(ROOT / "records" / "h200" / "problems.jsonl")
    assert replace_generated(page, render(measurements)) == page, "run `mkb problems table`"


def test_every_full_workload_has_been_measured_on_a_gpu():
    measurements = read_measurements(ROOT / "records" / "h200" / "problems.jsonl")
    assert sorted(measurements) == problem_ids()
    assert all(row["vectorized_passes"] is not False for row in measurements.values())


def test_what_stands_around_the_generated_part_is_kept():
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert replace_generated(page, "new") == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"


def test_a_page_without_the_marks_is_refused():
    with pytest.raises(ValueError, match="needs the lines"):
        replace_generated("no marks here", "new")


def test_no_record_gives_a_table_that_says_so(tmp_path):
    assert read_measurements(tmp_path / "missing.jsonl") == {}
    assert "not measured" in render({})
