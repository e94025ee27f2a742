from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from metakernelbench.cli.app import main
from metakernelbench.grading.verdict import Verdict
from tests.grading.support import HONEST, plugin_installed

OPTIONS = ["--dsl", "toy", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COLUMNS", "120")
    with plugin_installed():
        yield


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["grade", *arguments])
    return int(left.value.code or 0)


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    return tmp_path / "kernel.py"


def test_passing_kernel_leaves_with_0_and_prints_the_verdict_as_json(
    kernel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel.write_text(HONEST)
    assert run("p28", str(kernel), *OPTIONS, "--json") == 0
    verdict = Verdict.from_dict(json.loads(capsys.readouterr().out))
    assert verdict.passed and verdict.workload == "smoke" and verdict.dsl == "toy"


def test_several_files_are_timed_against_each_other(
    kernel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "a:b.py"  # a path may look like DSL:FILE
    for path in (kernel, other):
        path.write_text(HONEST)
    assert run("p28", f"toy:{kernel}", str(other), *OPTIONS) == 0
    out = capsys.readouterr().out
    assert f"(1) toy:{kernel}" in out and f"(2) {other}" in out
    assert "(1) over (2): " in out and "95 % interval" in out


def test_a_list_is_graded_line_by_line_and_a_profile_is_shown(
    kernel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel.write_text(HONEST)
    (tmp_path / "bad.py").write_text("solve = 1")
    listed = tmp_path / "list.txt"
    listed.write_text("# two\np28 kernel.py\n\np28 toy:bad.py\n")
    assert run("--many", str(listed), *OPTIONS, "--json") == 1
    good, bad = map(json.loads, capsys.readouterr().out.splitlines())
    assert good["passed"] and good["file"] == str(kernel)
    assert bad["findings"][0]["code"] == "no-solve"
    assert run("p28", str(kernel), *OPTIONS, "--profile") == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("Starts and imports", "Mandated work", "Verification", "eager calls"))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "lists nothing"),
        ("p28\n", "line 1 names no file: p28"),
        ("\np28 nope.py", "line 2: `{folder}/nope.py` cannot be read"),
        ("p282 kernel.py", "line 1: unknown problem `p282`"),
    ],
)
def test_a_wrong_list_names_its_line_before_anything_is_graded(
    text: str, named: str, kernel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel.write_text(HONEST)
    (tmp_path / "list.txt").write_text(text)
    assert run("--many", str(tmp_path / "list.txt"), *OPTIONS) == 2
    assert named.format(folder=tmp_path) in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("standard_input", [False, True])
def test_a_list_that_never_ends_is_refused(
    standard_input: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/zero").open() as endless:
        monkeypatch.setattr("sys.stdin", endless)
        assert run("--many", "-" if standard_input else "/dev/zero", *OPTIONS) == 2
    said = "more than 1,000,000 characters" if standard_input else "no regular file"
    assert said in " ".join(capsys.readouterr().err.split())


def test_failing_kernel_leaves_with_1_and_says_why(kernel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernel.write_text("import os\n[bold]\n")
    assert run("p28", str(kernel), *OPTIONS) == 1
    out = capsys.readouterr().out
    assert out.startswith("FAILED: p28 in toy")
    assert "[no-solve]" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["p282", "k.py", *OPTIONS], "p28"),
        (["p28", "k.py", "--dsl", "tirks", "--device", "cpu"], "tirx"),
        (["p28", "k.py", "--dsl", "toy", "--device", "tpu"], "cuda"),
        (["p28", "k.py", *OPTIONS, "--workload", "tiny"], "smoke"),
        (["p28", ".", *OPTIONS], "directory"),
        (["p28", "k.py", "--device", "cpu"], "DSL:k.py"),
        (["p28", *OPTIONS], "say what to grade"),
        (["p28", "k.py", "--many", "k.py", *OPTIONS], "files from its list; leave out `p28` and what follows"),
        (["--many", "k.py", "--profile", *OPTIONS], "`--many` has no `--profile`"),
        (["p28", "k.py", "tirks:k.py", *OPTIONS], "tirx"),
        (["p28", "kernels/nope.py", *OPTIONS], "`kernels/nope.py` cannot be read: No such file"),
    ],
)
def test_wrong_usage_leaves_with_2_and_names_what_is_known(
    arguments: list[str],
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "k.py").write_text(HONEST)
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert named in captured.err
    assert captured.out == ""


def test_fault_of_the_machine_leaves_with_3(
    kernel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.write_text(HONEST)
    (tmp_path / "metakernelbench-cpu.lock").mkdir()  # where the lock of the device should be
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert run("p28", str(kernel), *OPTIONS) == 3
    assert "metakernelbench-cpu.lock cannot be opened" in " ".join(capsys.readouterr().err.split())
