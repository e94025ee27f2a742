"""Judges are found by name, also those that somebody else has written; a mistake is one sentence."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from metakernelbench.errors import InfrastructureFault, UnknownName, UserError
from metakernelbench.experiments.designs import PlannedAttempt
from metakernelbench.grading.head_to_head import HeadToHead
from metakernelbench.grading.verdict import Verdict
from metakernelbench.judging import registry
from metakernelbench.judging.judge import GradingRequest
from metakernelbench.judging.registry import check_judge, judge_names, open_judge
from metakernelbench.judging.steadfast import TRIES, Steadfast
from tests.experiments.support import verdict_of
from tests.judging.support import request

THEIRS = """
class Judge:
    def __init__(self, *, device, queue="short", contract=None):
        if queue == "none":
            raise ValueError("there is no such queue")
        self.device, self.queue = device, queue
    async def verdict(self, request): ...
    async def close(self): ...
"""


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Somebody else's package with two judges, installed."""
    (tmp_path / "theirjudge.py").write_text(THEIRS)
    metadata = tmp_path / "theirjudge-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: theirjudge\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[metakernelbench.judges]\ntheirs = theirjudge:Judge\nbroken = theirjudge.missing:Judge\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._entries.cache_clear()
    yield
    registry._entries.cache_clear()
    sys.modules.pop("theirjudge", None)


def test_ours_are_registered() -> None:
    assert {"local", "ray", "modal"} <= set(judge_names())


@pytest.mark.usefixtures("theirs")
def test_a_judge_of_somebody_else_is_opened_with_its_options() -> None:
    judge = open_judge("theirs", device="cpu", options={"queue": "long"})
    assert isinstance(judge, Steadfast)
    assert (judge.judge.device, judge.judge.queue) == ("cpu", "long")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("theirz", {}, "unknown judge `theirz`; nearest: `theirs`"),
        ("theirs", {"queu": "long"}, "unknown option of the judge `theirs` `queu`; nearest: `queue`"),
        ("theirs", {"device": "cpu"}, "unknown option of the judge `theirs` `device`"),
        ("theirs", {"queue": "none"}, "cannot be made with these options: there is no such queue"),
        ("broken", {}, "the judge `broken` cannot be imported from `theirjudge.missing:Judge`"),
        ("local", {"gpu": "0"}, "unknown option of the judge `local` `gpu`; nearest: `gpus`"),
    ],
)
@pytest.mark.usefixtures("theirs")
def test_mistakes_are_told_in_a_sentence(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        open_judge(name, device="cpu", options=options)
    assert message in caught.value.message and "\n" not in caught.value.message


def test_what_is_checked_beforehand_starts_nothing() -> None:
    check_judge("local", {"gpus": ["0"]})
    check_judge("ray", {"address": "auto"})
    check_judge("modal", {"gpu": "H200"})
    with pytest.raises(UnknownName):
        check_judge("locl", {})


class Failing:
    """A judge that fails so many times and then works."""

    def __init__(self, times: int) -> None:
        self.left, self.asked = times, 0

    async def verdict(self, request: GradingRequest) -> Verdict:
        self.asked += 1
        if self.left:
            self.left -= 1
            raise InfrastructureFault("the judge died")
        return verdict_of(PlannedAttempt(problem="p28", dsl="toy", model="m"), passed=True)

    async def close(self) -> None: ...


class Measuring(Failing):
    async def head_to_head(self, requests: Sequence[GradingRequest]) -> HeadToHead:
        return HeadToHead(verdicts=(await self.verdict(requests[0]),), pairs=())


def test_a_judge_that_dies_is_asked_again_up_to_three_times() -> None:
    judge = Failing(TRIES - 1)
    assert asyncio.run(Steadfast(judge, pause_s=0).verdict(request())).passed
    judge = Failing(TRIES)
    with pytest.raises(InfrastructureFault, match="the judge died"):
        asyncio.run(Steadfast(judge, pause_s=0).verdict(request()))
    assert judge.asked == TRIES


def test_a_final_grading_is_asked_for_once_for_the_attempt_counts_its_own_tries() -> None:
    judge = Failing(1)
    with pytest.raises(InfrastructureFault):
        asyncio.run(Steadfast(judge, pause_s=0).verdict(request(final=True)))
    assert judge.asked == 1


def test_only_a_judge_that_can_time_head_to_head_is_asked_to() -> None:
    assert asyncio.run(Steadfast(Measuring(1), pause_s=0).head_to_head([request()])).verdicts[0].passed
    with pytest.raises(UserError, match="the judge Failing cannot time implementations head to head"):
        asyncio.run(Steadfast(Failing(0)).head_to_head([request()]))
