"""The sandbox's `task` command: its texts, its exit status, and what it says to do next."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from metakernelbench.attempts.payload import task_tool


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("app", "mailbox/requests", "mailbox/answers"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(task_tool, "KERNEL", tmp_path / "app/kernel.py")
    monkeypatch.setattr(task_tool, "MAILBOX", tmp_path / "mailbox")
    return tmp_path


def judge(root: Path, *, used: int = 3, closed: bool = False, budget_s: float = 1000.0) -> None:
    state = {"started": time.time() - 100, "budget_s": budget_s, "used": used, "max_submissions": 10, "closed": closed}
    (root / "mailbox/state.json").write_text(json.dumps(state))


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    code = task_tool.main(list(arguments))
    return code, capsys.readouterr().out.splitlines()


def answering(root: Path, text: str, exit_status: int) -> None:
    """Answer the first request as the judge does."""

    def answer() -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            for request in (root / "mailbox/requests").glob("*.py"):
                part = root / f"mailbox/answers/{request.stem}.part"
                part.write_text(json.dumps({"text": text, "exit": exit_status}))
                part.rename(part.with_suffix(".json"))
                return
            time.sleep(0.02)

    threading.Thread(target=answer, daemon=True).start()


class TestStatus:
    def test_it_says_what_is_left_and_what_to_do(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        judge(root)
        code, (line,) = ran(capsys, "status")
        assert code == 0
        assert line.startswith("[task] 14:59 left, 7 of 10") or line.startswith("[task] 15:00 left, 7 of 10")
        assert "There is no /app/kernel.py yet" in line
        task_tool.KERNEL.write_text("x")
        assert "`task submit` sends" in ran(capsys, "status")[1][0]

    def test_nothing_left_to_submit_is_no_dead_end(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        judge(root, used=10)
        task_tool.KERNEL.write_text("x")
        (line,) = ran(capsys, "status")[1]
        assert "0 of 10 submissions left. Put your best version into /app/kernel.py" in line

    def test_time_never_runs_below_zero(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        judge(root, budget_s=5.0)
        assert "[task] 0:00 left" in ran(capsys, "status")[1][0]

    @pytest.mark.usefixtures("root")
    def test_without_a_judge_it_says_so(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert ran(capsys, "status") == (0, ["[task] There is no judge behind this sandbox."])


class TestSubmit:
    @pytest.mark.parametrize(
        ("exit_status", "advice"),
        [(0, "Keep a copy of this version"), (1, "Correct it, `task check` it"), (2, "Put right what is said above")],
    )
    def test_the_verdict_decides_the_exit_status_and_the_advice(
        self, root: Path, capsys: pytest.CaptureFixture[str], exit_status: int, advice: str
    ) -> None:
        judge(root)
        task_tool.KERNEL.write_text("kernel")
        answering(root, "the verdict", exit_status)
        code, lines = ran(capsys, "submit")
        assert code == exit_status
        assert lines[:2] == ["Sent 6 bytes. Waiting for the verdict ...", "the verdict"]
        assert advice in lines[-1]

    def test_the_tries_used_up_are_told_after_the_last_verdict(
        self, root: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        judge(root, used=10)
        task_tool.KERNEL.write_text("kernel")
        answering(root, "FAILED", 1)
        assert "it is graded when the attempt ends" in ran(capsys, "submit")[1][-1]

    @pytest.mark.parametrize(
        ("closed", "kernel", "said"),
        [(True, True, "The mailbox is closed"), (False, False, "cannot be read (No such file or directory)")],
    )
    def test_what_is_not_sent_is_not_graded(
        self, root: Path, capsys: pytest.CaptureFixture[str], closed: bool, kernel: bool, said: str
    ) -> None:
        judge(root, closed=closed)
        if kernel:
            task_tool.KERNEL.write_text("kernel")
        code, lines = ran(capsys, "submit")
        assert (code, len(lines)) == (2, 2)
        assert said in lines[0]
        assert list((root / "mailbox/requests").iterdir()) == []

    def test_a_mailbox_that_closes_meanwhile_ends_the_wait(
        self, root: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        judge(root)
        task_tool.KERNEL.write_text("kernel")
        threading.Timer(0.5, lambda: judge(root, closed=True)).start()
        code, lines = ran(capsys, "submit")
        assert code == 2
        assert lines[1] == "The mailbox was closed before this submission was answered."


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("arguments", [[], ["sumbit"], ["submit", "now"], ["--help"]])
def test_anything_else_shows_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = ran(capsys, *arguments)
    assert code == 2
    assert any("task check" in line for line in lines)


def test_a_check_that_fails_itself_does_not_stop_the_agent(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_tool, "CHECK", root / "absent.py")
    code, lines = ran(capsys, "check")
    assert code == 2
    assert "no fault of kernel.py" in lines[-1]
