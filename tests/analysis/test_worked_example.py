"""The worked example of docs/results.md, computed from the tables that stand there."""

from __future__ import annotations

from fractions import Fraction
from math import prod
from pathlib import Path

import polars as pl
import pytest

from metakernelbench.analysis import outcome, standing
from tests.analysis.support import Outcome, frames, study_of

PAGE = (Path(__file__).parents[2] / "docs" / "results.md").read_text(encoding="utf-8")


def table(first_head: str, second_head: str) -> list[list[str]]:
    """The body rows of the page's table that starts with these heads."""
    lines = PAGE.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_head} | {second_head} |"))
    body = lines[start + 2 :]
    end = next(i for i, line in enumerate([*body, ""]) if not line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body[:end]]


def outcome_of(cell: str) -> Outcome:
    return cell if cell in ("fail", "skipped") else float(cell)


def figure(cell: str) -> float:
    return float(Fraction(cell.replace("−", "-")))


@pytest.fixture(scope="module")
def example() -> tuple[pl.DataFrame, pl.DataFrame]:
    rows = {row[0]: tuple(outcome_of(cell) for cell in row[1:]) for row in table("problem", "cute")}
    return frames(*study_of(rows))


def test_the_solo_numbers_are_those_of_the_page(example):
    found = {row["dsl"]: row for row in outcome.solo(example[0]).frame.to_dicts()}
    assert {(row["n"], row["passed"], row["unjudged"]) for row in found.values()} == {(6, 4, 0)}
    assert found["cute"]["P"] == found["tirx"]["P"] == pytest.approx(4 / 6)
    assert found["cute"]["R2"] == found["tirx"]["R2"] == pytest.approx(3 / 6)
    assert found["cute"]["GM"] == pytest.approx(2.5637, abs=5e-5)
    assert found["tirx"]["GM"] == pytest.approx(2.9130, abs=5e-5)
    assert "2.5637" in PAGE and "2.9130" in PAGE


def test_the_paired_ratios_are_those_of_the_page(example):
    found = {(row["problem"], row["direction"]): row["rho"] for row in example[1].to_dicts()}
    said = {}
    for problem, forth, _, back, _ in table("problem", "cute→tirx"):
        said |= {(problem, "cute→tirx"): figure(forth), (problem, "tirx→cute"): figure(back)}
    assert len(said) == 12
    assert found == pytest.approx(said, abs=5e-6)


def test_the_lifts_are_those_of_the_page(example):
    found = {row["direction"]: row for row in outcome.lift(example[1], "direction").frame.to_dicts()}
    rows = table("direction", "n")
    assert [row[0] for row in rows] == list(found)
    for direction, n, lift, helped, neutral, harmed in rows:
        row = found[direction]
        assert row["n"] == int(n)
        assert row["lift"] == pytest.approx(figure(lift), abs=5e-6)
        assert (row["help"], row["neutral"], row["harm"]) == pytest.approx(
            tuple(map(figure, (helped, neutral, harmed)))
        )


def test_two_of_the_helped_are_rescues_and_one_of_the_harmed_is_a_break(example):
    found = {row["outcome"]: row for row in outcome.verdict_changes(example[1]).frame.to_dicts()}
    assert (found["help"]["n"], found["help"]["rescue"]) == (4, 2)
    assert (found["harm"]["n"], found["harm"]["break"]) == (3, 1)


def test_the_lift_by_standing_is_that_of_the_page(example):
    found = {row["standing"]: row for row in standing.standing(example[1]).frame.to_dicts()}
    swapped = 0
    for stood, ratios, lift, others, chance in table("source stood", "ratios"):
        assert found[stood]["n"] == len(ratios.split(","))
        assert found[stood]["lift"] == pytest.approx(figure(lift), abs=5e-6)
        assert found[stood]["chance"] == pytest.approx(figure(chance), abs=5e-6)
        both = [*map(figure, ratios.split(",")), *map(figure, others.split(","))]
        assert prod(both) ** (1 / len(both)) - 1 == pytest.approx(figure(chance), abs=2e-5)
        swapped += len(others.split(","))
    assert swapped == 12


def test_the_pass_rates_given_the_source_are_those_of_the_page(example):
    found = {row["source_state"]: row for row in standing.source_verdicts(example[1]).frame.to_dicts()}
    assert found["passed"]["n"] == 8 and found["failed"]["n"] == 4
    assert (found["passed"]["baseline"], found["passed"]["treatment"]) == pytest.approx((6 / 8, 7 / 8))
    assert (found["failed"]["baseline"], found["failed"]["treatment"]) == pytest.approx((2 / 4, 2 / 4))
    assert "passed (8 comparisons), 6 baselines and 7 treatments passed; where it failed (4),\n2 and 2" in PAGE


def test_the_correlation_of_the_directions_is_that_of_the_page(example):
    [row] = standing.reverse_directions(example[1]).frame.to_dicts()
    assert row["pairs"] == 6
    assert row["correlation"] == pytest.approx(-0.47767, abs=5e-6)
    assert "−0.47767" in PAGE
