"""The forms of a table: rounded for people, exact for programs, undefined shown as undefined."""

from __future__ import annotations

import csv
import io
import json

import polars as pl
import pytest
from rich.console import Console

from metakernelbench.analysis import outcome, registry
from metakernelbench.analysis.frames import Frames, frames_of
from metakernelbench.analysis.simulate import World, simulate
from metakernelbench.analysis.tables import Column, Table, number
from metakernelbench.errors import UnknownName
from tests.analysis.support import rematch


@pytest.fixture(scope="module")
def study() -> Frames:
    plan, records = simulate(World(problems=12, models=2, effect=0.2, unfinished=0.02, texts=True), 5)
    treatments = [c for c in plan.comparisons if c.treatment in records and records[c.treatment].kernel][:9]
    return frames_of(plan, records, rematches=[rematch(c, records, ratio=1.2) for c in treatments])


@pytest.fixture(scope="module")
def tables(study) -> dict[str, Table]:
    return {name: registry.table(study, name) for name in registry.TABLES}


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (0.125, "lift", "+12.5\u00a0%"),
        (-0.125, "lift", "−12.5\u00a0%"),
        (0.125, "share", "12.5\u00a0%"),
        (2.5637, "factor", "2.56×"),
        (1234, "count", "1,234"),
        (0.0004, "p", "< 0.001"),
        (None, "lift", "–"),
    ],
)
def test_numbers_as_people_read_them(value, kind, text):
    assert number(value, kind) == text


def test_every_table_has_all_its_forms(tables):
    for table in tables.values():
        assert len(table.cells()) == table.frame.height > 0
        assert len(list(csv.DictReader(io.StringIO(table.to_csv())))) == table.frame.height
        assert table.to_latex().count(r"\\") == table.frame.height + 1
        assert json.loads(json.dumps(table.to_dict(), allow_nan=False))["name"] == table.name


def printed(table: Table, width: int | None) -> list[str]:
    console = Console(file=io.StringIO(), width=width or 80)
    console.print(table.to_rich(width), soft_wrap=width is None)
    return console.file.getvalue().splitlines()


def test_a_terminal_gets_lines_that_fit_and_a_pipe_one_line_a_row(tables):
    for table in tables.values():
        assert all(len(line) <= 100 for line in printed(table, 100))
        lines = printed(table, None)
        for row in table.cells():
            assert any(all(text in line for text in row) for line in lines), table.name


def test_a_table_cut_off_says_so(tables):
    bands = tables["bands"]
    assert bands.first(3).frame.height == 3
    assert bands.first(3).note.endswith("4 more rows are not shown.")
    assert bands.first(7) is bands


def test_a_table_that_is_not_there_is_answered_with_the_nearest(study):
    with pytest.raises(UnknownName, match="`tier_pairs`"):
        registry.table(study, "tiers")


def test_the_table_says_how_many_ratios_were_measured_head_to_head(tables, study):
    whole = tables["lift_by_direction"].frame.row(0, named=True)
    assert whole["measured"] == study.measured > 0
    assert "head to head" in [column.title for column in tables["lift_by_direction"].shown]
    both = {
        row["how"]: row["lift"] for row in tables["ratios_both_ways"].frame.to_dicts() if row["of"] != "all comparisons"
    }
    assert both["head to head where measured"] != both["two medians"]
    assert sum(tables["ratio_changes"].frame.select("help", "neutral", "harm").sum().row(0)) == study.measured


def test_every_comparison_that_a_rule_decides_is_listed(tables, study):
    changes = tables["rule_changes"].frame
    assert tables["rules"].frame["changed"].to_list()[-1] == changes.height > 0
    freed = study.forgiving(frozenset(study.violations))
    assert freed.attempts.filter(state="passed").height > study.attempts.filter(state="passed").height


def test_costs_add_up_over_models_and_arms(tables, study):
    usage = tables["usage"].frame
    whole = usage.filter(model="all")["cost_usd"].sum()
    assert whole == pytest.approx(usage.filter(pl.col("model") != "all")["cost_usd"].sum())
    assert whole == pytest.approx(study.attempts["cost_usd"].sum())


def test_latex_escapes_what_a_name_may_contain():
    frame = pl.DataFrame({"model": ["a_b & c\\d 50%"]})
    table = Table(name="t", title="t", note="", columns=(Column(name="model", title="m_1"),), frame=frame)
    assert r"a\_b \& c\textbackslash{}d 50\%" in table.to_latex()


def test_groups_add_up_to_the_whole(tables, study):
    for by in ("direction", "family", "model"):
        whole, *parts = tables[f"lift_by_{by}"].frame.to_dicts()
        assert whole["n"] == sum(part["n"] for part in parts) == outcome.judged(study.main).height
        assert whole["n"] + whole["unjudged"] == study.main.height
        helped = sum(part["help"] * part["n"] for part in parts)
        assert helped == pytest.approx(whole["help"] * whole["n"])


def test_the_best_family_is_the_one_left_out(tables):
    families = {
        row["family"]: row["lift"] for row in tables["lift_by_family"].frame.to_dicts() if row["family"] != "all"
    }
    scope = tables["leave_best_family_out"].frame["scope"][1]
    assert scope == f"without {max(families, key=families.get)}"


def test_a_wider_band_never_finds_more_help_or_harm(tables):
    rows = tables["bands"].frame
    assert rows["help"].is_sorted(descending=True)
    assert rows["harm"].is_sorted(descending=True)


def test_a_column_that_is_zero_throughout_is_not_shown(tables, study):
    assert "unjudged" in [column.name for column in tables["solo"].shown]
    finished = outcome.solo(study.attempts.filter(pl.col("state") != "unjudged"))
    assert "unjudged" not in [column.name for column in finished.shown]
