"""Whole attempts: Harbor's trial, the real Terminus-2, the sandbox and the mailbox; the model's turns are prepared."""

import asyncio
import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metakernelbench.attempts import attempt as attempts
from metakernelbench.attempts.agents.script import Script
from metakernelbench.attempts.agents.scripted_model import ScriptedModel
from metakernelbench.attempts.attempt import run_attempt
from metakernelbench.attempts.record import AttemptRecord
from metakernelbench.attempts.settings import AttemptSettings
from metakernelbench.errors import InfrastructureFault, TriedEnough, UserError
from metakernelbench.experiments.designs import PlannedAttempt
from metakernelbench.grading.contract import CONTRACT
from metakernelbench.grading.verdict import Verdict
from metakernelbench.judging.judge import GradingRequest
from tests.attempts.support import WordJudge, needs_sandbox, run, running, verdict_on

PLANNED = PlannedAttempt(problem="p28", dsl="tirx", model="scripted/demo")
RIGHT = "right = 1\n\n\ndef solve(x):\n\treturn f'{x!r}'\n"


def attempt(
    folder: Path, script: dict[str, Any], *, judge: Any = None, skill: str | None = None, **settings: Any
) -> AttemptRecord:
    """Run one attempt with one script."""
    path = folder / "turns.json"
    path.write_text(json.dumps({"attempt": [{"match": "*", **script}]}))
    chosen = AttemptSettings(
        **{"script": path, "workload": "smoke", "device": "cpu", "budget_s": 120.0, "memory_mb": 1024, **settings}
    )
    record: AttemptRecord = run(
        run_attempt(PLANNED, settings=chosen, skill=skill, judge=judge or WordJudge(), folder=folder / "attempt")
    )
    return record


class TestInTheSandbox:
    pytestmark = needs_sandbox

    def test_an_attempt_is_recorded_from_the_first_turn_to_the_final_verdict(self, tmp_path: Path) -> None:
        judge = WordJudge()
        script = {"submissions": ["x = 1\n", RIGHT], "skill": "# What I learned\n"}
        record = attempt(tmp_path, script, judge=judge, skill="Notes of another.")

        assert record.ended == "completed"
        assert [submission.number for submission in record.submissions] == [1, 2]
        assert [submission.verdict and submission.verdict.passed for submission in record.submissions] == [False, True]
        assert record.kernel == RIGHT
        assert record.skill == "# What I learned\n"
        assert record.final is not None
        assert record.final.passed
        assert [request.final for request in judge.seen] == [False, False, True]
        assert record.instruction.rstrip().endswith("Notes of another.")
        assert record.trajectory is not None
        assert record.instruction.strip() in record.trajectory["steps"][0]["message"]
        assert record.usage.turns >= 6
        assert record.usage.output_tokens
        assert {"sandbox_start", "agent_setup", "agent", "final_grading"} <= set(record.seconds)
        assert record.seconds["agent_setup"] < 5
        assert record.sandbox["kind"] == "bubblewrap"
        assert "memory" in record.sandbox
        assert AttemptRecord.model_validate_json(record.model_dump_json()) == record

    def test_the_agent_sees_its_clock_its_answers_and_its_task(self, tmp_path: Path) -> None:
        turns = [
            {"run": "task status", "until": r"^\[task\]"},
            {"run": "head -n 3 /task/problem.py; ls /task; test -w /task || echo cannot", "until": "cannot$"},
        ]
        record = attempt(tmp_path, {"turns": turns})
        seen = json.dumps(record.trajectory)
        assert re.search(r"\[(2:00|1:5\d) left\] /app\$", seen)
        for shown in ("10 of 10 submissions left", "contract.md", "Residual add"):
            assert shown in seen

    def test_the_clock_ends_an_attempt_in_the_middle_of_a_submission(self, tmp_path: Path) -> None:
        late = "touch /app/early; (while true; do sleep 0.1; date > /app/SKILL.md; done) &"
        script = {"turns": [{"run": late}], "submissions": ["slow = right = 1\n"], "ending": "wait"}
        start = time.monotonic()
        record = attempt(tmp_path, script, judge=_PatientOnce(), budget_s=6.0)
        assert record.ended == "budget"
        assert time.monotonic() - start < 60
        (submission,) = record.submissions
        assert (submission.number, submission.answered_at_s, submission.verdict) == (1, None, None)
        assert record.final is not None
        assert record.final.passed

    def test_leaving_the_terminal_is_not_taken_for_being_done(self, tmp_path: Path) -> None:
        record = attempt(tmp_path, {"turns": [{"write": {"kernel.py": RIGHT}}], "ending": "exit"})
        assert record.ended == "agent_exit"
        assert record.final is not None
        assert record.final.passed

    def test_work_survives_an_agent_that_breaks_its_own_terminal(self, tmp_path: Path) -> None:
        turns = [
            {"write": {"kernel.py": RIGHT, "SKILL.md": "kept\n"}},
            {"raw": json.dumps({
                "analysis": "", "plan": "",
                "commands": [{"keystrokes": "tmux kill-server\n", "duration": 1}, {"keystrokes": "ls\n"}],
            })},
        ]  # fmt: skip
        record = attempt(tmp_path, {"turns": turns})
        assert record.ended == "agent_error"
        assert (record.kernel, record.skill) == (RIGHT, "kept\n")
        assert record.final is not None
        assert record.final.passed

    def test_a_typical_agents_slips_cost_turns_and_nothing_else(self, tmp_path: Path) -> None:
        turns = [{"raw": "I shall think first."}, {"run": "tusk submit"}, {"raw": '{"analysis": "only"}'}]
        record = attempt(tmp_path, {"turns": turns, "submissions": [RIGHT]})
        assert record.ended == "completed"
        assert [submission.number for submission in record.submissions] == [1]

    def test_a_long_kernel_typed_into_the_terminal_arrives_intact(self, tmp_path: Path) -> None:
        source = (
            "".join(f"x{line} = {line} != 0  # 'quoted' \"twice\" $HOME `id` \\n\n" for line in range(1000)) + RIGHT
        )
        record = attempt(tmp_path, {"submissions": [source]})
        assert record.submissions[0].source == source == record.kernel

    def test_submissions_beyond_the_last_are_answered_and_not_counted(self, tmp_path: Path) -> None:
        too_large = f"python3 -c \"print('#' * {CONTRACT.max_source_bytes})\" > kernel.py; task submit"
        turns = [{"run": too_large, "until": r"^\[task\]"}]
        script = {"turns": turns, "submissions": ["a = 1\n", "b = 1\n", RIGHT]}
        record = attempt(tmp_path, script, max_submissions=2)
        assert [submission.number for submission in record.submissions] == [None, 1, 2, None]
        assert "larger than" in record.submissions[0].answer
        assert "All 2 submissions are used" in record.submissions[3].answer
        assert record.final is not None
        assert record.final.passed

    def test_links_in_place_of_the_deliverables_are_not_followed(self, tmp_path: Path) -> None:
        turns = [{"run": f"ln -s {Path(__file__)} kernel.py; ln -s /etc/passwd SKILL.md; task submit", "wait": 2}]
        record = attempt(tmp_path, {"turns": turns})
        assert (record.kernel, record.skill, record.final) == (None, None, None)
        assert record.ended == "completed"

    def test_the_hosts_trajectory_cannot_be_replaced_from_inside(self, tmp_path: Path) -> None:
        record = attempt(tmp_path, {"turns": [{"run": "echo '{}' > /logs/agent/trajectory.json"}]})
        assert record.trajectory is not None
        assert len(record.trajectory["steps"]) > 2

    def test_a_blank_skill_is_no_skill(self, tmp_path: Path) -> None:
        assert attempt(tmp_path, {"skill": " \n\t\n"}).skill is None

    def test_an_oversized_final_kernel_reaches_the_judge_as_too_large(self, tmp_path: Path) -> None:
        judge = WordJudge()
        run_it = f"python3 -c \"print('#' * {2 * CONTRACT.max_source_bytes})\" > kernel.py"
        attempt(tmp_path, {"turns": [{"run": run_it, "wait": 1}]}, judge=judge)
        assert [len(request.source) for request in judge.seen] == [CONTRACT.max_source_bytes + 1]

    def test_a_provider_that_refuses_the_key_is_the_users_to_put_right(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="AuthenticationError"):
            attempt(tmp_path, {"turns": [{"http_error": 401, "times": 99}]})

    def test_a_model_of_any_provider_runs_the_same_way(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        script = Script(match="*", submissions=(RIGHT,))

        async def work() -> AttemptRecord:
            async with ScriptedModel(script) as provider:
                settings = AttemptSettings(
                    model_options={"api_base": provider.api_base}, workload="smoke", device="cpu", budget_s=60
                )
                return await run_attempt(
                    replace(PLANNED, model="openai/demo"),
                    settings=settings,
                    skill=None,
                    judge=WordJudge(),
                    folder=tmp_path / "attempt",
                )

        record = run(work())
        assert (record.model, record.ended, record.kernel) == ("openai/demo", "completed", RIGHT)
        assert "OPENAI_API_KEY" not in (tmp_path / "attempt/trial/config.json").read_text()

    def test_attempts_side_by_side_do_not_mix(self, tmp_path: Path) -> None:
        async def work() -> list[AttemptRecord]:
            return await asyncio.gather(*(one(number) for number in range(3)))

        async def one(number: int) -> AttemptRecord:
            path = tmp_path / f"turns{number}.json"
            source = f"right = {number}\n"
            path.write_text(json.dumps({"attempt": [{"match": "*", "submissions": [source], "skill": f"{number}\n"}]}))
            settings = AttemptSettings(script=path, workload="smoke", device="cpu", budget_s=60, memory_mb=1024)
            return await run_attempt(
                replace(PLANNED, replicate=number),
                settings=settings,
                skill=None,
                judge=WordJudge(),
                folder=tmp_path / str(number),
                slot=number,
            )

        records = run(work())
        assert [record.kernel for record in records] == ["right = 0\n", "right = 1\n", "right = 2\n"]
        assert [record.skill for record in records] == ["0\n", "1\n", "2\n"]
        assert {len(record.submissions) for record in records} == {1}

    def test_an_attempt_that_is_cancelled_leaves_nothing_running(self, tmp_path: Path) -> None:
        async def work() -> None:
            path = tmp_path / "turns.json"
            turns = [{"run": "touch /app/begun; sleep 62.75"}]
            path.write_text(json.dumps({"attempt": [{"match": "*", "turns": turns, "ending": "wait"}]}))
            settings = AttemptSettings(script=path, workload="smoke", device="cpu", budget_s=60, memory_mb=1024)
            attempt = asyncio.create_task(
                run_attempt(PLANNED, settings=settings, skill=None, judge=WordJudge(), folder=tmp_path / "attempt")
            )
            async with asyncio.timeout(30):
                while not running("62.75"):
                    await asyncio.sleep(0.1)
            attempt.cancel()
            with pytest.raises(asyncio.CancelledError):
                await attempt

        run(work())
        assert not running("62.75")

    def test_a_judge_that_cannot_work_at_all_ends_the_attempt_with_its_own_error(self, tmp_path: Path) -> None:
        start = time.monotonic()
        with pytest.raises(UserError, match="no such device"):
            attempt(tmp_path, {"submissions": [RIGHT], "ending": "wait"}, judge=_Unusable())
        assert time.monotonic() - start < 60

    def test_a_final_grading_is_tried_three_times_and_goes_on_later_without_the_agent(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(attempts, "_FINAL_PAUSE_S", 0.01)
        script = {"turns": [{"write": {"kernel.py": RIGHT}}], "skill": "learned\n"}
        flaky = _Flaky(faults=2)
        record = attempt(tmp_path, script, judge=flaky)
        assert record.final is not None
        assert flaky.calls == 3
        shutil.rmtree(tmp_path / "attempt")
        with pytest.raises(TriedEnough, match="the final grading failed 3 times: the GPU is away"):
            attempt(tmp_path, script, judge=_Flaky(faults=3))
        shutil.rmtree(tmp_path / "attempt" / "trial")
        again = attempt(tmp_path, script, judge=_Flaky(faults=0))
        assert not (tmp_path / "attempt" / "trial").exists(), "the agent has worked again"
        assert again.final is not None
        assert (again.kernel, again.skill) == (record.kernel, record.skill)
        assert attempt(tmp_path, script, judge=_Unusable()) == again, "what is complete is graded again"


@pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux")
def test_prepared_turns_also_run_without_walls(tmp_path: Path) -> None:
    record = attempt(tmp_path, {"submissions": [RIGHT], "skill": "learned\n"}, sandbox="host")
    assert (record.ended, record.kernel, record.skill) == ("completed", RIGHT, "learned\n")
    assert record.sandbox == {"kind": "host", "isolation": "none"}


class _PatientOnce:
    """Takes a minute over feedback and none over the final grading."""

    async def verdict(self, request: GradingRequest) -> Verdict:
        await asyncio.sleep(0 if request.final else 60)
        return verdict_on(request, passed=True)

    async def close(self) -> None:
        """Nothing is held."""


class _Unusable:
    """Refuses every request as a mistake of the user's."""

    async def verdict(self, request: GradingRequest) -> Verdict:
        raise UserError(f"no such device for {request.problem}")

    async def close(self) -> None:
        """Nothing is held."""


class _Flaky:
    """Fails a number of times, then passes everything."""

    def __init__(self, faults: int) -> None:
        self.calls = 0
        self._faults = faults

    async def verdict(self, request: GradingRequest) -> Verdict:
        self.calls += 1
        if self.calls <= self._faults:
            raise InfrastructureFault("the GPU is away")
        return verdict_on(request, passed=True)

    async def close(self) -> None:
        """Nothing is held."""
