"""Whole attempts by agents that behave as agents do: each must end in the right record, whatever went wrong on the way.

Harbor, Terminus-2, the sandbox, the mailbox and the tools are the real ones; only the model's turns are prepared, and
the judge goes by a word in the source.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from metakernelbench.attempts import attempt as attempts
from metakernelbench.attempts.agents.script import Turn
from metakernelbench.attempts.agents.scripted_model import ScriptedModel
from metakernelbench.attempts.record import AttemptRecord
from metakernelbench.attempts.settings import AttemptSettings
from metakernelbench.attempts.task import task_files
from metakernelbench.grading.contract import CONTRACT
from tests.attempts.support import WordJudge, needs_sandbox
from tests.attempts.test_attempt import RIGHT, attempt

pytestmark = needs_sandbox

ANSWERED = r"^\[task\] "


def reply(*commands: tuple[str, float], **more: Any) -> dict[str, str]:
    """A turn in the agent's own format, keystrokes and all."""
    typed = [{"keystrokes": keys, "duration": duration} for keys, duration in commands]
    return {"raw": json.dumps({"analysis": "", "plan": "", "commands": typed, **more})}


def numbers(record: AttemptRecord) -> list[int | None]:
    return [submission.number for submission in record.submissions]


def screen(record: AttemptRecord) -> str:
    return json.dumps(record.trajectory)


def test_a_typical_attempt_with_every_common_slip(tmp_path: Path) -> None:
    """Prose instead of a reply, a reply cut short, Enter forgotten, a quote left open, a misspelt command, a submission
    without a kernel, with a syntax error, too large; then all ten submissions, more of them, the skill at the end."""
    large = f"python3 -c \"print('#' * {CONTRACT.max_source_bytes})\" > kernel.py; task submit"
    turns: list[dict[str, Any]] = [
        {"raw": "Let me think about the memory traffic first."},
        {"raw": '{"analysis": "cut", "plan": "", "commands": [{"keystrokes": "ls'},
        reply(("ls /task", 0.2)),  # Enter comes with the next turn
        reply(("\n", 0.2)),
        reply(('echo "open\n', 0.2)),
        reply(("\x03", 0.2)),
        {"run": "task sumbit", "wait": 0.5},
        {"run": "task submit", "until": ANSWERED},
        {"run": "task check", "until": ANSWERED},
        {"write": {"kernel.py": "def solve(:\n"}},
        {"run": "task submit", "until": ANSWERED},
        {"run": large, "until": ANSWERED},
    ]
    versions = [f"x = {number}\n" for number in range(9)] + [RIGHT, "x = 'too late'\n"]
    record = attempt(
        tmp_path, {"turns": turns, "submissions": [*versions, RIGHT], "skill": "# Late, but here\n"}, budget_s=300.0
    )
    assert record.ended == "completed"
    assert numbers(record) == [None, None, *range(1, 11), None, None]
    answers = [submission.answer for submission in record.submissions]
    assert "cannot be parsed: line 1" in answers[0]
    assert "larger than" in answers[1]
    assert all("All 10 submissions are used" in answer for answer in answers[-2:])
    assert [s.verdict.passed for s in record.submissions if s.verdict] == [False] * 9 + [True]
    assert (record.kernel, record.skill) == (RIGHT, "# Late, but here\n")
    assert record.final is not None
    assert record.final.passed
    seen = screen(record)
    for shown in ("problem.py", "There is no /app/kernel.py yet", "[missing] There is no kernel.py", "0 of 10"):
        assert shown in seen
    assert AttemptRecord.model_validate_json(record.model_dump_json()) == record


def test_waiting_far_longer_than_there_is_time_ends_with_the_clock_and_keeps_the_work(tmp_path: Path) -> None:
    turns = [{"write": {"kernel.py": RIGHT, "SKILL.md": "so far\n"}}, reply(("sleep 500\n", 600))]
    record = attempt(tmp_path, {"turns": turns}, budget_s=5.0)
    assert record.ended == "budget"
    assert (record.kernel, record.skill) == (RIGHT, "so far\n")
    assert record.final is not None
    assert record.final.passed


def test_a_model_that_thinks_past_the_end_keeps_what_was_there(tmp_path: Path) -> None:
    turns = [{"write": {"kernel.py": RIGHT}}, {"think": 30, "write": {"kernel.py": "x = 'never'\n"}}]
    record = attempt(tmp_path, {"turns": turns}, budget_s=4.0)
    assert (record.ended, record.kernel, record.skill) == ("budget", RIGHT, None)


def test_a_skill_that_is_never_written_is_none(tmp_path: Path) -> None:
    record = attempt(tmp_path, {"submissions": [RIGHT]})
    assert (record.ended, record.skill) == ("completed", None)


def test_an_attempt_that_does_nothing_is_recorded_as_that(tmp_path: Path) -> None:
    judge = WordJudge()
    record = attempt(tmp_path, {}, judge=judge)
    assert (record.ended, record.kernel, record.skill, record.final, record.submissions) == (
        "completed", None, None, None, (),
    )  # fmt: skip
    assert judge.seen == []


def test_the_last_kernel_counts_even_where_an_earlier_one_was_better(tmp_path: Path) -> None:
    turns = [{"write": {"kernel.py": RIGHT}}, {"run": "task submit", "until": ANSWERED}]
    turns.append({"write": {"kernel.py": "x = 'broken at the last moment'\n".replace("broken", "spoilt")}})
    record = attempt(tmp_path, {"turns": turns})
    assert record.submissions[0].verdict is not None
    assert record.submissions[0].verdict.passed
    assert record.final is not None
    assert not record.final.passed


class _CompressedModel(ScriptedModel):
    """Answers the agent's questions when that compresses its context; keeps what it was asked."""

    asked: list[list[dict[str, Any]]]

    async def _answer(self, path: str, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.asked.append(request["messages"])
        return await super()._answer(path, request)

    def _next_turn(self, seen: str) -> Turn:
        for told, answer in (
            ("about to hand off your work", "kernel.py was written."),
            ("picking up work from a previous AI agent", "What is next?"),
            ("The next agent has a few questions", "It is to be submitted."),
        ):
            if told in seen:
                return Turn(raw=answer)
        return super()._next_turn(seen)


def test_a_compressed_context_begins_with_the_whole_instruction_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[dict[str, Any]]] = []
    monkeypatch.setattr(_CompressedModel, "asked", asked, raising=False)
    monkeypatch.setattr(attempts, "ScriptedModel", _CompressedModel)
    notes = "Notes of another: the row is read twice.\n"
    # The stand-in's context holds a million tokens. One long remark fills what the compression is told to leave free,
    # two instructions and some turns do not.
    instruction = task_files("p28", "tirx", AttemptSettings(), notes)["instruction.md"].decode()
    words = len(instruction.split())
    options = {"proactive_summarization_threshold": 1_000_000 - 8 * words}
    remark = "remark " * (10 * words)
    record = attempt(
        tmp_path,
        {"turns": [{"say": remark}], "submissions": [RIGHT], "skill": "learned\n"},
        skill=notes,
        model_options=options,
        budget_s=300.0,
    )
    told = [place for place, messages in enumerate(asked) if "picking up work" in str(messages[-1]["content"])]
    assert len(told) == 1, "the context was to be compressed once"
    instruction = record.instruction.strip()
    assert instruction in str(asked[told[0]][-1]["content"])
    for messages in asked[told[0] + 2 :]:  # every turn after the hand-over
        whole = "\n".join(str(message["content"]) for message in messages)
        assert instruction in whole
        assert notes.strip() in whole
    assert (record.ended, record.kernel, record.skill) == ("completed", RIGHT, "learned\n")
    assert numbers(record) == [1]
