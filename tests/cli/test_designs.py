"""`mkb designs`: every design with its question, its options and what it plans."""

from __future__ import annotations

import json

import pytest

from metakernelbench.cli.app import main
from metakernelbench.experiments.registry import design_names


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["designs", *arguments])
    captured = capsys.readouterr()
    return int(left.value.code or 0), captured.out, captured.err


def test_list_names_every_design_with_its_question(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "list", "--json")
    rows = json.loads(out)
    assert (code, [row["name"] for row in rows]) == (0, design_names())
    assert all(row["question"].endswith("?") for row in rows)


def test_show_says_what_is_planned_for_one_cell(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "show", "retry")
    assert code == 0
    assert "from metakernelbench.experiments.designs:retry" in out
    assert "    baseline   p01/cute/a/model/0/solo\n    treatment  p01/cute/a/model/0/again\n" in out


def test_show_lists_options_and_whether_they_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "option of [options.chain]: rounds (int), 3 where it is left out" in said(capsys, "show", "chain")[1]
    assert "categories (tuple[str, ...]), needed" in said(capsys, "show", "ablate")[1]


def test_an_unknown_design_lists_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(capsys, "show", "retri")
    assert code == 2
    assert "unknown design `retri`; nearest: `retry`" in err
