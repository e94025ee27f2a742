"""`mkb redteam`: which files it grades, what it prints, and when it leaves with 1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from metakernelbench.cli.app import main
from metakernelbench.errors import UserError
from metakernelbench.grading import redteam

HEADER = '"""Honest in fact.\n\nfamily: D1\nmechanism: none\nproblem: p28\ndsl: tirx\nexpected: {}\ndevices: cpu\n"""\n'


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["redteam", *arguments])
    return int(ended.value.code or 0)


@pytest.fixture
def exploits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(redteam, "EXPLOITS", tmp_path)
    return tmp_path


def test_json_says_which_code_was_met_and_another_than_expected_fails(
    exploits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (exploits / "other.py").write_text(HEADER.format("late-write"))
    (exploits / "refused.py").write_text(HEADER.format("no-launch no-solve"))
    assert run("--json") == 1
    rows = json.loads(capsys.readouterr().out)
    assert [(row["file"], row["met"], row["ok"]) for row in rows] == [
        ("other.py", "no-solve", False),
        ("refused.py", "no-solve", True),
    ]


def test_table_counts_what_is_as_expected(exploits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (exploits / "refused.py").write_text(HEADER.format("no-solve"))
    assert run("refused") == 0
    assert "1 of 1 as expected" in capsys.readouterr().out


def test_unknown_file_is_a_mistake_of_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("replayed_outputs") == 2
    assert "`replayed_output`" in capsys.readouterr().err


def test_header_must_say_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "odd.py"
    path.write_text('"""A sentence.\n\nproblem: p28\n"""\n')
    with pytest.raises(UserError, match=r"odd\.py.*problem"):
        redteam.read(path)
    path.write_text(HEADER.format("no-such-code"))
    with pytest.raises(UserError, match="no-such-code"):
        redteam.read(path)


def test_folder_outside_of_a_checkout_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no `exploits`"):
        redteam.samples(tmp_path / "exploits", "cpu")
