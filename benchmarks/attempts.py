"""Attempts that end at once, with records of a realistic size, for the benchmarks of the machinery around attempts.

What they leave follows from their key alone, so that two runs of one experiment must leave the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from metakernelbench.attempts.attempt import fingerprint
from metakernelbench.attempts.record import AttemptRecord, Submission, Usage
from metakernelbench.attempts.settings import AttemptSettings
from metakernelbench.attempts.task import task_files
from metakernelbench.errors import InfrastructureFault
from metakernelbench.experiments.planned import PlannedAttempt
from metakernelbench.experiments.settle import Machinery
from metakernelbench.grading.contract import CONTRACT, CONTRACT_VERSION
from metakernelbench.grading.verdict import Finding, Isolation, Stage, Timing, Verdict
from metakernelbench.judging.judge import GradingRequest, Judge

SUBMISSIONS = 4
_KERNEL, _SKILL, _ANSWER, _TRAJECTORY = 8_000, 4_000, 1_500, 120_000
"""Characters."""


@cache
def _library() -> str:
    """Words in lines, a megabyte of them: about as compressible as code and prose."""
    chance = random.Random("library")
    words = [hashlib.sha256(str(number).encode()).hexdigest()[: 3 + number % 8] for number in range(2000)]
    return "\n".join(" ".join(chance.choices(words, k=12)) for _ in range(12_000))


def text(chance: random.Random, length: int) -> str:
    """A passage of that length, another one almost every time."""
    start = chance.randrange(len(_library()) - length)
    return _library()[start : start + length]


def unlucky(share: float, *parts: object) -> bool:
    """True for this share of all things, always the same ones."""
    return int(hashlib.sha256(repr(parts).encode()).hexdigest()[:8], 16) < share * 2**32


@dataclass
class InstantJudge:
    """Answers at once; a share of the gradings is lost once."""

    fault_share: float
    _lost: set[bytes] = field(default_factory=set[bytes])

    async def verdict(self, request: GradingRequest) -> Verdict:
        await asyncio.sleep(0)
        if request.source not in self._lost and unlucky(self.fault_share, request.source):
            self._lost.add(request.source)
            raise InfrastructureFault("the judge was lost (injected)")
        return verdict_of(request, random.Random(request.source))

    async def close(self) -> None:
        """Nothing is held."""


def verdict_of(request: GradingRequest, chance: random.Random) -> Verdict:
    """Three of four pass."""
    passed = chance.random() < 0.75
    times = tuple(chance.uniform(0.9, 1.1) for _ in range(CONTRACT.timed_calls))
    eager = tuple(3 * time for time in times)
    timing = Timing(
        implementation_ms=times,
        eager_ms=eager,
        implementation_median_ms=sorted(times)[25],
        eager_median_ms=sorted(eager)[25],
        speedup=sorted(eager)[25] / sorted(times)[25],
    )
    return Verdict(
        problem=request.problem,
        dsl=request.dsl,
        workload=request.workload,
        device=request.device,
        passed=passed,
        ended_at=None if passed else Stage.CORRECTNESS,
        findings=() if passed else (Finding(code="values", message="the outputs differ"),),
        timing=timing if passed else None,
        isolation=Isolation(method="none"),
        contract_version=CONTRACT_VERSION,
    )


@dataclass
class InstantAttempts:
    """Runs attempts without agent or sandbox. `log` gets the key of each that has come to its end."""

    log: Path
    fault_share: float
    _tried: dict[str, int] = field(default_factory=dict[str, int])

    async def run(
        self,
        planned: PlannedAttempt,
        *,
        settings: AttemptSettings,
        skill: str | None,
        judge: Judge,
        folder: Path,
        slot: int,
    ) -> AttemptRecord:
        """One attempt: submissions, a final grading, and a record. Sometimes the first try is lost, rarely two."""
        tried = self._tried[planned.key] = self._tried.get(planned.key, 0) + 1
        if tried < 3 and unlucky(self.fault_share, planned.key, tried):
            raise InfrastructureFault("the sandbox was lost (injected)")
        chance = random.Random(planned.key)
        submissions = [await self._submission(planned, number, chance, judge) for number in range(1, SUBMISSIONS + 1)]
        kernel = submissions[-1].source or ""
        final = await _graded(planned, kernel, judge, final=True)
        record = AttemptRecord(
            problem=planned.problem,
            dsl=planned.dsl,
            model=planned.model,
            replicate=planned.replicate,
            arm=planned.arm,
            source=planned.source,
            ended="completed",
            instruction=task_files(planned.problem, planned.dsl, settings, skill)["instruction.md"].decode(),
            submissions=tuple(submissions),
            kernel=kernel,
            skill=None if unlucky(0.05, planned.key, "skill") else text(chance, _SKILL),
            final=final,
            usage=Usage(turns=30, input_tokens=900_000, cached_tokens=700_000, output_tokens=50_000),
            trajectory={"steps": [{"source": "agent", "message": text(chance, _TRAJECTORY)}]},
            fingerprint=fingerprint(planned, settings, skill),
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            finished_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        with self.log.open("a") as file:
            file.write(f"{planned.key}\n")
        return record

    async def _submission(
        self, planned: PlannedAttempt, number: int, chance: random.Random, judge: Judge
    ) -> Submission:
        source = text(chance, _KERNEL)
        verdict = await _graded(planned, source, judge, final=False)
        return Submission(
            number=number,
            requested_at_s=60.0 * number,
            answered_at_s=60.0 * number + 30,
            source=source,
            verdict=verdict,
            answer=text(chance, _ANSWER),
        )

    def machinery(self) -> Machinery:
        """These attempts in place of Harbor's; everything else as in a real run."""
        return Machinery(run=self.run, fingerprint=fingerprint, check_model=lambda *_: None)


async def _graded(planned: PlannedAttempt, source: str, judge: Judge, *, final: bool) -> Verdict:
    """A grading, tried again as an attempt tries it."""
    request = GradingRequest(problem=planned.problem, dsl=planned.dsl, source=source.encode(), final=final)
    for _ in range(2):
        try:
            return await judge.verdict(request)
        except InfrastructureFault:
            pass
    return await judge.verdict(request)
