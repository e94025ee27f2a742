"""`mkb witnesses`: what it lists, what a grading leaves behind, and when its page is out of date."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from metakernelbench.cli.app import main
from metakernelbench.grading import witnesses

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["witnesses", *arguments])
    return int(ended.value.code or 0)


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict]:
    assert run("list", *arguments, "--json") == 0
    rows: list[dict] = json.loads(capsys.readouterr().out)
    return rows


def test_every_variant_is_listed_and_those_without_a_file_are_missing(capsys: pytest.CaptureFixture[str]) -> None:
    rows = listed(capsys)
    assert len(rows) == 2 * 74
    there = {(row["problem"], row["dsl"]) for row in rows if row["state"] != "missing"}
    assert there == {(path.stem, dsl) for dsl in ("cute", "tirx") for path in (ROOT / "witnesses" / dsl).glob("p*.py")}


def test_a_verdict_on_another_version_of_the_file_does_not_count(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (before,) = listed(capsys, "p28", "--dsl", "cute")
    assert before["state"] == "passed" and before["speedup"] > 1
    shutil.copytree(ROOT / "witnesses", tmp_path / "witnesses")
    (tmp_path / "witnesses" / "cute" / "p28.py").open("a").write("# another version\n")
    monkeypatch.setattr(witnesses, "WITNESSES", tmp_path / "witnesses")
    (after,) = listed(capsys, "p28", "--dsl", "cute", "--missing")
    assert (after["state"], after["speedup"]) == ("changed", None)


def test_the_page_is_up_to_date() -> None:
    assert run("table", "--check") == 0


@pytest.mark.parametrize("arguments", [("p99",), ("--family", "norms"), ("--dsl", "hip")])
def test_what_does_not_exist_leaves_with_2_and_is_named(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert run("list", *arguments) == 2
    assert arguments[-1] in capsys.readouterr().err


def test_a_grading_is_kept_in_place_of_a_former_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    kept = tmp_path / "witnesses.jsonl"
    shutil.copyfile(witnesses.RECORDS, kept)
    lines = len(kept.read_text().splitlines())
    assert run("grade", "p28", "--dsl", "tirx", "--device", "cpu", "--keep", str(kept)) == 0
    assert "p28 tirx: passed" in capsys.readouterr().err
    verdict = witnesses.read_records(kept)["p28", "tirx"]
    assert verdict.passed and verdict.final and (verdict.workload, verdict.device) == ("smoke", "cpu")
    assert len(kept.read_text().splitlines()) == lines
