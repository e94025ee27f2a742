"""`mkb task` and `mkb docs`: what an agent is given, written to a folder or opened for a person."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from metakernelbench.cli.app import main
from metakernelbench.dsls.docs.build import fingerprint
from metakernelbench.dsls.dsl import load
from tests.attempts.support import needs_sandbox
from tests.disk import files_of_at_most


def mkb(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    return int(left.value.code or 0)


class TestBuild:
    def test_the_folder_holds_all_that_an_image_needs(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = tmp_path / "task"
        assert mkb("task", "build", "p28", "--dsl", "triton", str(folder), "--json") == 0
        told = json.loads(capsys.readouterr().out)
        assert told["folder"] == str(folder)
        assert told["files"] == sum(path.is_file() for path in folder.rglob("*"))
        docs = folder / "environment" / "docs"
        assert not docs.is_symlink()
        assert (docs / "index.md").is_file()
        copied = [
            line for line in (folder / "environment/Dockerfile").read_text().splitlines() if line.startswith("COPY")
        ]
        assert [line for line in copied if not (folder / "environment" / line.split()[1]).exists()] == []

    def test_it_may_be_written_again_over_a_task_and_over_nothing_else(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = tmp_path / "task"
        for device in ("cuda", "cpu"):
            assert mkb("task", "build", "p28", "--dsl", "triton", str(folder), "--device", device) == 0
        assert "Grading runs on a CPU" in (folder / "instruction.md").read_text()
        (tmp_path / "precious").touch()
        assert mkb("task", "build", "p28", "--dsl", "triton", str(tmp_path)) == 2
        assert (tmp_path / "precious").exists()
        assert "holds something that is no task" in capsys.readouterr().err
        (folder / "notes.md").touch()
        assert mkb("task", "build", "p28", "--dsl", "triton", str(folder)) == 2
        assert "holds `notes.md`, which is no part of a task" in capsys.readouterr().err
        (tmp_path / "task.toml").write_text('[task]\nname = "somebody/else"\n')
        assert mkb("task", "build", "p28", "--dsl", "triton", str(tmp_path)) == 2
        assert "holds something that is no task of ours" in capsys.readouterr().err

    def test_a_task_that_finds_no_room_leaves_the_older_one(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = tmp_path / "task"
        assert mkb("task", "build", "p28", "--dsl", "triton", str(folder)) == 0
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for again in (folder, tmp_path / "new"):
            with files_of_at_most(2000):
                assert mkb("task", "build", "p28", "--dsl", "triton", str(again)) == 2
            assert f"cannot write {again}: File too large" in " ".join(capsys.readouterr().err.split())
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
        assert not (tmp_path / "new").exists()

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("p99", "--dsl", "triton"), "unknown problem `p99`"),
            (("p28", "--dsl", "trtion"), "unknown DSL `trtion`"),
            (("p28", "--dsl", "triton", "--device", "tpu"), "unknown device `tpu`"),
            (("p28", "--dsl", "cute", "--device", "cpu"), "CuTe DSL kernels run on cuda, not on cpu"),
        ],
    )
    def test_wrong_names_write_nothing(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
    ) -> None:
        assert mkb("task", "build", *arguments, str(tmp_path / "task")) == 2
        assert said in capsys.readouterr().err
        assert not (tmp_path / "task").exists()


class TestTry:
    pytestmark = needs_sandbox

    def test_a_command_sees_what_an_agent_sees(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        kernel = tmp_path / "mine.py"
        kernel.write_text("def solve(): ...\n")
        asked = "cat kernel.py; task status; docs-search -n 1 dot; touch /task/x; touch /docs/x; exit 7"
        code = mkb("task", "try", "p28", "--dsl", "triton", "--device", "cpu", "--kernel", str(kernel), "--run", asked)
        text = capsys.readouterr().out
        assert code == 7
        assert "def solve(): ..." in text
        assert "10 of 10 submissions left" in text
        assert "/docs/modules/triton.language" in text
        assert text.count("Read-only file system") == 2

    def test_a_person_gets_a_shell_with_the_agents_prompt(self) -> None:
        command = [sys.executable, "-m", "metakernelbench", "task", "try", "p28", "--dsl", "triton", "--device", "cpu"]
        typed = "tty\nstty size\nfalse\nexit 3\n"
        done = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert "left] /app$ " in done.stdout
        assert "/dev/pts/" in done.stdout

    def test_standard_input_that_ends_leaves_the_shell(self) -> None:
        command = [sys.executable, "-m", "metakernelbench", "task", "try", "p28", "--dsl", "triton", "--device", "cpu"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False)
        assert done.returncode == 0

    @pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="a kernel can be graded here")
    def test_a_submission_that_cannot_be_graded_here_ends_it_with_the_reason(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "mine.py").write_text("def solve(): ...\n")
        asked = ["--kernel", str(tmp_path / "mine.py"), "--run", "task status; task submit; echo never"]
        assert mkb("task", "try", "p28", "--dsl", "cute", *asked) == 2
        said = capsys.readouterr()
        assert "never" not in said.out
        assert "this machine has no CUDA GPU" in said.err

    def test_other_sandboxes_are_not_for_this(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert mkb("task", "try", "p28", "--dsl", "triton", "--sandbox", "docker") == 2
        assert "bubblewrap" in capsys.readouterr().err


def test_documentation_is_built_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert mkb("docs", "build", "--dsl", "triton", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert Path(told["folder"], "index.md").is_file()
    assert told["fingerprint"] == fingerprint(load("triton"))
    assert 0 < told["bytes"] < 20e6
