"""The mailbox against a sandbox that is a folder: real commands and the real `task` tool, no walls."""

import asyncio
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from metakernelbench.attempts import mailbox as mailbox_module
from metakernelbench.attempts.mailbox import Mailbox, read_file, refuse
from metakernelbench.attempts.payload import task_tool
from metakernelbench.grading.contract import CONTRACT
from metakernelbench.grading.verdict import Verdict
from metakernelbench.judging.judge import GradingRequest
from tests.attempts.support import WordJudge, run

TOO_LARGE = b"#" * (CONTRACT.max_source_bytes + 1)


@dataclass
class Folder:
    """A sandbox below a folder, found by `MKB_ROOT`."""

    root: Path

    def __post_init__(self) -> None:
        for name in ("app", "mailbox"):
            (self.root / name).mkdir(exist_ok=True)

    async def exec(self, command: str, *, timeout_sec: int | None = None) -> Any:
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=self.env
        )
        out, _ = await asyncio.wait_for(process.communicate(), timeout_sec)
        return SimpleNamespace(stdout=out.decode(), return_code=process.returncode)

    @property
    def env(self) -> dict[str, str]:
        return {"MKB_ROOT": str(self.root), "PATH": "/usr/bin:/bin"}

    def request(self, id: str, source: bytes) -> None:
        """Leave a request as the tool does."""
        (self.root / "mailbox/requests").mkdir(exist_ok=True)
        (self.root / f"mailbox/requests/{id}.py").write_bytes(source)

    async def task(self, *arguments: str) -> tuple[int, str]:
        """Run the agent's tool."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, task_tool.__file__, *arguments, stdout=asyncio.subprocess.PIPE, env=self.env
        )
        out, _ = await process.communicate()
        return process.returncode or 0, out.decode()


@pytest.fixture
def sandbox(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def mailbox_of(judge: WordJudge, *, budget_s: float = 600, max_submissions: int = 10) -> Mailbox:
    async def grade(source: bytes) -> Verdict:
        return await judge.verdict(GradingRequest(problem="p28", dsl="tirx", source=source))

    def render(verdict: Verdict) -> str:
        return "It passed." if verdict.passed else verdict.findings[0].message

    return Mailbox(grade, render, budget_s=budget_s, max_submissions=max_submissions)


async def until(condition: Any, seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(("source", "code", "says"), [("right", 0, "It passed."), ("wrong", 1, "raised while it was")])
def test_a_submission_is_answered_with_its_verdict_and_exit_status(
    sandbox: Folder, source: str, code: int, says: str
) -> None:
    async def attempt() -> None:
        mailbox = mailbox_of(WordJudge())
        await mailbox.open(sandbox)
        (sandbox.root / "app/kernel.py").write_text(source)
        assert (await sandbox.task("submit"))[0] == code
        left, text = await sandbox.task("submit")
        await mailbox.close()
        assert says in text
        assert text.splitlines()[-1].startswith("[task] 9:5")
        assert "8 of 10 submissions left" in text
        assert [submission.number for submission in mailbox.submissions] == [1, 2]
        assert mailbox.submissions[0].source == source
        assert left == code

    run(attempt())


def test_the_snapshot_is_graded_whatever_happens_to_the_file_afterwards(sandbox: Folder) -> None:
    async def attempt() -> None:
        judge = WordJudge()
        mailbox = mailbox_of(judge)
        (sandbox.root / "app/kernel.py").write_text("right")
        await mailbox.open(sandbox)
        sent = asyncio.create_task(sandbox.task("submit"))
        await until(lambda: list((sandbox.root / "mailbox/requests").glob("*.py")))
        (sandbox.root / "app/kernel.py").write_text("wrong")
        await sent
        await mailbox.close()
        assert [request.source for request in judge.seen] == [b"right"]

    run(attempt())


def test_a_missing_kernel_is_not_sent(sandbox: Folder) -> None:
    async def attempt() -> None:
        mailbox = mailbox_of(WordJudge())
        await mailbox.open(sandbox)
        code, text = await sandbox.task("submit")
        await mailbox.close()
        assert code == 2
        assert "No such file" in text
        assert mailbox.submissions == []

    run(attempt())


def test_the_judges_own_failure_is_answered_and_not_counted(sandbox: Folder) -> None:
    async def attempt() -> None:
        mailbox = mailbox_of(WordJudge())
        (sandbox.root / "app/kernel.py").write_text("broken")
        await mailbox.open(sandbox)
        code, text = await sandbox.task("submit")
        await mailbox.close()
        assert code == 2
        assert "not yours (the GPU has gone). Not counted" in text
        assert "10 of 10" in text
        (submission,) = mailbox.submissions
        assert submission.number is None
        assert submission.verdict is None

    run(attempt())


def test_a_submission_that_the_clock_overtakes_is_recorded_without_an_answer(sandbox: Folder) -> None:
    async def attempt() -> None:
        mailbox = mailbox_of(WordJudge())
        (sandbox.root / "app/kernel.py").write_text("slow")
        await mailbox.open(sandbox)
        sent = asyncio.create_task(sandbox.task("submit"))
        await until(lambda: mailbox.submissions)
        await mailbox.close()
        code, text = await sent
        assert (code, mailbox.used) == (2, 1)
        assert "closed before this submission was answered" in text
        (submission,) = mailbox.submissions
        assert (submission.number, submission.answered_at_s, submission.verdict) == (1, None, None)
        assert (await sandbox.task("submit"))[1].startswith("The mailbox is closed")

    run(attempt())


def test_status_shows_time_and_submissions_left(sandbox: Folder) -> None:
    async def attempt() -> None:
        mailbox = mailbox_of(WordJudge(), budget_s=125, max_submissions=3)
        await mailbox.open(sandbox)
        code, text = await sandbox.task("status")
        await mailbox.close()
        assert code == 0
        assert text.startswith("[task] 2:0")
        assert "3 of 3 submissions left" in text

    run(attempt())


def test_without_a_judge_the_tool_says_so(sandbox: Folder) -> None:
    code, text = run(sandbox.task("submit"))
    assert code == 2
    assert "no judge" in text


def test_the_tool_explains_itself_when_called_wrongly(sandbox: Folder) -> None:
    code, text = run(sandbox.task("sumbit"))
    assert code == 2
    assert "task submit" in text


KINDS = {
    "right": b"right",
    "wrong": b"wrong",
    "broken": b"broken",
    "too large": TOO_LARGE,
    "unparsable": b"def solve(:",
    "not text": b"\xff\xfe",
}
COUNTED = {"right", "wrong"}


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(kinds=st.lists(st.sampled_from(sorted(KINDS)), max_size=8), most=st.integers(0, 3))
@example(kinds=["right"] * 8, most=3)
@example(kinds=sorted(KINDS), most=1)
def test_only_what_was_graded_counts_and_never_more_than_allowed(kinds: list[str], most: int) -> None:
    async def attempt() -> None:
        with tempfile.TemporaryDirectory() as folder:
            sandbox = Folder(Path(folder))
            for place, kind in enumerate(kinds):
                sandbox.request(f"{place:03}", KINDS[kind])
            judge = WordJudge()
            mailbox = mailbox_of(judge, max_submissions=most)
            await mailbox.open(sandbox)
            answers = sandbox.root / "mailbox/answers"
            await until(lambda: len(list(answers.glob("*.json"))) == len(kinds), 30)
            await mailbox.close()

        numbers = [submission.number for submission in mailbox.submissions]
        graded = [number for number in numbers if number is not None]
        expected = sum(kind in COUNTED for kind in kinds)
        assert len(numbers) == len(kinds)
        assert graded == list(range(1, min(expected, most) + 1))
        assert mailbox.used == len(graded)
        assert all(submission.answer for submission in mailbox.submissions)
        assert all((submission.verdict is None) == (submission.number is None) for submission in mailbox.submissions)
        assert all(len(request.source) <= CONTRACT.max_source_bytes for request in judge.seen)

    run(attempt())


def test_a_flood_of_requests_closes_the_mailbox(sandbox: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox_module, "_MAX_REQUESTS", 5)

    async def attempt() -> None:
        for place in range(12):
            sandbox.request(f"{place:03}", b"def solve(:")
        mailbox = mailbox_of(WordJudge())
        (sandbox.root / "app/kernel.py").write_text("right")
        await mailbox.open(sandbox)
        await until(lambda: '"closed": true' in (sandbox.root / "mailbox/state.json").read_text())
        assert (await sandbox.task("submit"))[0] == task_tool.NOT_GRADED
        await mailbox.close()
        assert len(mailbox.submissions) == 5

    run(attempt())


def test_names_that_no_tool_of_ours_makes_are_left_alone(sandbox: Folder) -> None:
    async def attempt() -> None:
        for name in ("$(touch hit)", "a b", "..", "UPPER", "x" * 60):
            sandbox.request(name, b"right")
        sandbox.request("ok", b"right")
        mailbox = mailbox_of(WordJudge())
        await mailbox.open(sandbox)
        await until(lambda: mailbox.submissions and mailbox.submissions[-1].answered_at_s)
        await mailbox.close()
        assert len(mailbox.submissions) == 1

    run(attempt())


def test_a_link_a_folder_and_a_pipe_are_not_read(sandbox: Folder) -> None:
    requests = sandbox.root / "mailbox/requests"
    requests.mkdir()
    (requests / "link.py").symlink_to("/etc/hostname")
    (requests / "folder.py").mkdir()
    subprocess.run(["mkfifo", requests / "pipe.py"], check=True)
    for name in ("link", "folder", "pipe", "absent"):
        assert run(read_file(sandbox, f"/mailbox/requests/{name}.py", 1000)) is None


@given(data=st.binary(max_size=300), limit=st.integers(0, 300))
@settings(max_examples=25, deadline=None)
def test_reading_gives_the_bytes_as_they_are_up_to_the_limit(data: bytes, limit: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sandbox = Folder(Path(folder))
        (sandbox.root / "app/kernel.py").write_bytes(data)
        assert run(read_file(sandbox, "/app/kernel.py", limit)) == data[:limit]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (None, "could be read"),
        (TOO_LARGE, f"larger than {CONTRACT.max_source_bytes} bytes"),
        (b"x = '\xff'", "not UTF-8 (byte 5)"),
        (b"a = 1\ndef solve(:\n", "line 2"),
        (b"a = '\0'", "null bytes"),
        (b"(" * 5000, "cannot be parsed"),
        (b"-" * 100_000 + b"1", "cannot be parsed"),
    ],
    ids=["unreadable", "too large", "not text", "syntax", "null byte", "deep parentheses", "deep expression"],
)
def test_what_cannot_be_graded_is_refused_with_the_reason(source: bytes | None, says: str) -> None:
    assert says in str(refuse(source))


def test_anything_that_parses_is_for_the_judge() -> None:
    assert refuse(b"") is None
    assert refuse(b"def solve(x):\n    return '\\d'\n") is None
