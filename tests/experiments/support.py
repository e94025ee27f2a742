"""Experiments without sandboxes and graders: attempts that end at once, in a real store."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from metakernelbench.attempts.record import AttemptRecord
from metakernelbench.attempts.settings import AttemptSettings
from metakernelbench.experiments.planned import PlannedAttempt
from metakernelbench.experiments.progress import Lines
from metakernelbench.experiments.settle import Machinery
from metakernelbench.experiments.spec import ExperimentSpec
from metakernelbench.grading.contract import CONTRACT_VERSION
from metakernelbench.grading.verdict import Finding, Isolation, Stage, Timing, Verdict
from metakernelbench.judging.judge import GradingRequest, Judge
from metakernelbench.store.store import Store


def spec_of(folder: Path, **changes: Any) -> ExperimentSpec:
    """A small experiment: two problems, two DSLs, eight attempts."""
    values = {
        "name": "small",
        "design": "cross-dsl",
        "problems": ("p03", "p28"),
        "dsls": ("tirx", "triton"),
        "models": ("vendor/model",),
        "attempt": AttemptSettings(device="cpu", workload="smoke"),
        "store": str(folder),
    }
    return ExperimentSpec.model_validate(values | changes)


def verdict_of(planned: PlannedAttempt, *, passed: bool, speedup: float = 2.0) -> Verdict:
    timing = Timing(
        implementation_ms=(1.0,),
        eager_ms=(speedup,),
        implementation_median_ms=1.0,
        eager_median_ms=speedup,
        speedup=speedup,
    )
    return Verdict(
        problem=planned.problem,
        dsl=planned.dsl,
        workload="smoke",
        device="cpu",
        passed=passed,
        ended_at=None if passed else Stage.CORRECTNESS,
        findings=() if passed else (Finding(code="values", message="the outputs differ"),),
        timing=timing if passed else None,
        isolation=Isolation(method="process"),
        contract_version=CONTRACT_VERSION,
    )


def fingerprint(planned: PlannedAttempt, settings: AttemptSettings, skill: str | None) -> str:
    parts = (planned.problem, planned.dsl, planned.model, settings.model_dump_json(), skill)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def record_of(planned: PlannedAttempt, settings: AttemptSettings, skill: str | None, **changes: Any) -> AttemptRecord:
    """What an attempt leaves, as a function of its key alone: the same in every run."""
    number = int(hashlib.sha256(planned.key.encode()).hexdigest()[:8], 16)
    values: dict[str, Any] = {
        "problem": planned.problem,
        "dsl": planned.dsl,
        "model": planned.model,
        "replicate": planned.replicate,
        "arm": planned.arm,
        "source": planned.source,
        "ended": "completed",
        "instruction": "Write a kernel. " * 200 + (skill or ""),
        "kernel": f"# {planned.key}\n" * 300,
        "skill": None if number % 5 == 0 else f"What {planned.key} taught.",
        "final": verdict_of(planned, passed=number % 3 > 0, speedup=1 + number % 7),
        "fingerprint": fingerprint(planned, settings, skill),
        "started_at": "2026-01-01T00:00:00+00:00",
        "finished_at": "2026-01-01T00:00:01+00:00",
    }
    return AttemptRecord.model_validate(values | changes)


def outcome_of(store: Store, experiment: str) -> dict[str, tuple[Any, ...]]:
    """All that tables are made of, by key."""
    return {
        key: (record.ended, record.skill, record.kernel, record.instruction, record.final, record.fingerprint)
        for key, record in store.attempts(experiment)
    }


class NoJudge:
    """Instant attempts bring their verdicts along."""

    async def verdict(self, request: GradingRequest) -> Verdict:
        raise AssertionError(f"nobody asks for {request}")

    async def close(self) -> None: ...


@dataclass
class Instant:
    """Attempts that end at once, and remember that they ran."""

    ran: list[str] = field(default_factory=list)
    skills: dict[str, str | None] = field(default_factory=dict)

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
        (folder / "left behind").write_text("by an attempt")
        self.ran.append(planned.key)
        self.skills[planned.key] = skill
        return record_of(planned, settings, skill)

    def machinery(self, **changes: Any) -> Machinery:
        values: dict[str, Any] = {"run": self.run, "fingerprint": fingerprint, "check_model": lambda *_: None}
        return Machinery(**(values | changes))


def lines() -> Lines:
    """Progress that is kept in memory: `lines().console.file.getvalue()`."""
    return Lines(Console(file=StringIO(), width=200))
