"""The `mkb` command itself: what it says where it is misused."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from metakernelbench.cli.app import main


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    said = capsys.readouterr()
    return int(end.value.code or 0), said.out, said.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["problems", "show"], "Missing argument"),
        (["problems", "list", "--famly", "moe"], "No such option: --famly"),
        (["rematch", "demo", "--store"], "requires an argument"),
        (["designs", "shwo"], "No such command 'shwo'"),
        (["export", "parquet", "", "demo"], "nothing is given at the end of `mkb export parquet ''`"),
        (["report", "demo", "--out="], "nothing is given at the end of `mkb report demo --out=`"),
        (["repot"], "unknown command `repot`; nearest: `report`"),
    ],
)
def test_misuse_is_told_as_text_or_as_one_json_document(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    code, out, err = run(capsys, arguments[0], "--json", *arguments[1:])
    assert (code, err) == (2, "")
    assert json.loads(out)["error"]["kind"] in {"usage", "unknown_name"}


def test_a_command_that_succeeds_leaves_with_zero_in_either_form(capsys):
    assert run(capsys, "designs", "list")[0] == 0
    code, out, _ = run(capsys, "designs", "list", "--json")
    assert code == 0
    assert {row["name"] for row in json.loads(out)} > {"cross-dsl", "retry"}


FULL = Path("/dev/full")
"""A file that every write to says that no space is left."""
needs_full = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")


def mkb(*arguments: str, columns: str = "80", **streams: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "metakernelbench", *arguments]
    environment = {**os.environ, "COLUMNS": columns}
    return subprocess.run(command, env=environment, text=True, timeout=120, check=False, **streams)


@needs_full
@pytest.mark.parametrize(
    "arguments",
    [("--version",), ("--help",), ("problems", "list"), ("problems", "list", "--json"), ("repot", "--json")],
    ids=" ".join,
)
def test_a_full_disk_below_standard_output_is_told_in_a_sentence(arguments):
    with FULL.open("w") as full:
        done = mkb(*arguments, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr.strip() == "error: cannot write to standard output: No space left on device"


@needs_full
def test_a_full_disk_below_both_outputs_ends_with_the_same_code():
    with FULL.open("w") as full:
        assert mkb("problems", "list", stdout=full, stderr=full).returncode == 2


def test_what_the_disk_refuses_is_no_traceback_whatever_the_command(monkeypatch, capsys):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("metakernelbench.cli.root.app", full)
    code, out, err = run(capsys, "designs", "list")
    assert (code, out) == (2, "")
    assert "a file cannot be written: No space left on device" in err and "make room" in err
    assert json.loads(run(capsys, "designs", "list", "--json")[1])["error"]["kind"] == "usage"


def test_an_interruption_while_modules_are_imported_ends_as_any_other():
    code = """
import sys

class Interrupting:
    def find_spec(self, name, *rest):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
from metakernelbench.cli.app import main
main(["problems", "list"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize("columns", ["0", "1", "20"])
def test_however_narrow_the_terminal_tables_say_what_they_are_about(columns):
    shown = mkb("problems", "list", columns=columns, stdout=subprocess.PIPE).stdout
    assert shown == mkb("problems", "list", columns="80", stdout=subprocess.PIPE).stdout
    assert "p01" in shown
