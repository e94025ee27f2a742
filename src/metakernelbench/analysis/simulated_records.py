"""The records of simulated attempts: verdicts that are shaped like real ones and say that they are not."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from metakernelbench.analysis import simulated_texts as texts
from metakernelbench.attempts.record import AttemptRecord, Ending, Submission, Usage
from metakernelbench.experiments.planned import PlannedAttempt, PlannedComparison
from metakernelbench.grading.contract import CONTRACT, CONTRACT_VERSION
from metakernelbench.grading.verdict import Finding, Isolation, Stage, Timing, Verdict
from metakernelbench.store.rematches import Rematch

DEVICE = "simulated"
_EAGER_MS = 2.0
_TIMED = 50
_FAILS = (
    (Stage.CORRECTNESS, "wrong-output", "Output 0 differs from the reference in 12 of 4,096 elements."),
    (Stage.CORRECTNESS, "runtime-error", "`solve` raised: simulated."),
    (Stage.DEPENDENCE, "no-launch", "A call launched no kernel of the DSL."),
)
_BROKEN = "inline-source"
_START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What chance gave one attempt."""

    speedup: float | None
    """Of its final kernel; None where it failed."""
    broke_a_rule: float | None = None
    """The speedup of a kernel that was right and fast but broke a rule."""
    keeps_skill: bool = True
    grading_noise: float = 0.0
    """Standard deviation of ln time between two gradings of one kernel."""


def simulated_record(
    attempt: PlannedAttempt, drawn: Drawn, *, long: bool, source_skill: str | None, rng: np.random.Generator
) -> AttemptRecord:
    """The record of an attempt that ran; `long` gives it texts, submissions and a trajectory of a realistic size."""
    count = int(rng.integers(3, 11)) if long else 0
    versions = texts.kernel_versions(rng, count) if long else ["def solve(x):\n    return x\n"]
    sent = texts.instruction(attempt.problem, attempt.dsl, rules=200 if long else 3, source_skill=source_skill)
    submissions = _submissions(attempt, drawn, versions, rng) if long else ()
    turns = int(rng.integers(20, 45))
    trajectory = texts.trajectory(rng, model=attempt.model, sent=sent, kernels=versions, turns=turns) if long else None
    return _record(
        attempt,
        "completed" if rng.random() < 0.7 else "budget",
        instruction=sent,
        submissions=submissions,
        kernel=versions[-1],
        skill=texts.skill(rng, statements=24 if long else 2) if drawn.keeps_skill else None,
        trajectory=trajectory,
        final=_final(attempt, drawn, rng),
        usage=_usage(rng, turns),
        seconds={"agent": float(rng.uniform(600, 2400)), "grading": float(rng.uniform(20, 60))},
    )


def _usage(rng: np.random.Generator, turns: int) -> Usage:
    read, written = int(rng.integers(200_000, 900_000)), int(rng.integers(20_000, 60_000))
    return Usage(turns=turns, input_tokens=read, cached_tokens=read // 2, output_tokens=written, cost_usd=read * 1e-6)


def skipped_record(attempt: PlannedAttempt) -> AttemptRecord:
    """The record of a treatment whose source kept no skill."""
    return _record(attempt, "skipped", instruction="")


def simulated_rematch(comparison: PlannedComparison, ratio: float, digests: tuple[str, str]) -> Rematch:
    """A head-to-head measurement; `digests` are those of the baseline's and of the treatment's kernel."""
    return Rematch(
        baseline=comparison.baseline,
        treatment=comparison.treatment,
        ratio=ratio,
        low=ratio * 0.995,
        high=ratio * 1.005,
        baseline_sha256=digests[0],
        treatment_sha256=digests[1],
        workload="full",
        device=DEVICE,
        judge=DEVICE,
        contract_version=CONTRACT_VERSION,
        measured_at=(_START + timedelta(days=1)).isoformat(),
    )


def _record(attempt: PlannedAttempt, ended: Ending, **parts: object) -> AttemptRecord:
    return AttemptRecord.model_validate(
        {
            "problem": attempt.problem,
            "dsl": attempt.dsl,
            "model": attempt.model,
            "replicate": attempt.replicate,
            "arm": attempt.arm,
            "source": attempt.source,
            "ended": ended,
            "fingerprint": "simulated",
            "started_at": _START.isoformat(),
            "finished_at": (_START + timedelta(minutes=40)).isoformat(),
            **parts,
        }
    )


def _final(attempt: PlannedAttempt, drawn: Drawn, rng: np.random.Generator) -> Verdict:
    if drawn.broke_a_rule is not None:
        return _refused(attempt, drawn.broke_a_rule, rng)
    return _verdict(attempt, drawn.speedup, final=True, rng=rng)


def _graded(drawn: Drawn, rng: np.random.Generator) -> float | None:
    """The speedup that a grading of the final kernel for feedback measures."""
    return None if drawn.speedup is None else drawn.speedup * float(np.exp(rng.normal(0, drawn.grading_noise)))


def _verdict(attempt: PlannedAttempt, speedup: float | None, *, final: bool, rng: np.random.Generator) -> Verdict:
    if speedup is None:
        stage, code, message = _FAILS[int(rng.integers(len(_FAILS)))]
        finding = Finding(code=code, message=message)
        return Verdict(**_common(attempt, final), passed=False, ended_at=stage, findings=(finding,), draws_passed=1)
    draws = CONTRACT.correctness_draws
    return Verdict(**_common(attempt, final), passed=True, draws_passed=draws, timing=_timing(speedup, rng))


def _refused(attempt: PlannedAttempt, speedup: float, rng: np.random.Generator) -> Verdict:
    """A final verdict on a kernel that broke a rule and was measured all the same."""
    return Verdict(
        **_common(attempt, final=True),
        passed=False,
        ended_at=Stage.RULES,
        findings=(Finding(code=_BROKEN, message="A string holds source of another language.", line=12),),
        draws_passed=CONTRACT.correctness_draws,
        timing=_timing(speedup, rng),
    )


def _common(attempt: PlannedAttempt, final: bool) -> dict[str, Any]:
    return {
        "problem": attempt.problem,
        "dsl": attempt.dsl,
        "workload": "full",
        "device": DEVICE,
        "final": final,
        "isolation": Isolation(method="process"),
        "contract_version": CONTRACT_VERSION,
    }


def _timing(speedup: float, rng: np.random.Generator) -> Timing:
    median = _EAGER_MS / speedup
    around = np.exp(rng.normal(0, 0.02, (2, _TIMED))).round(4)
    return Timing(
        implementation_ms=tuple((median * around[0]).tolist()),
        eager_ms=tuple((_EAGER_MS * around[1]).tolist()),
        implementation_median_ms=median,
        eager_median_ms=_EAGER_MS,
        speedup=speedup,
        speedup_interval=(speedup * 0.98, speedup * 1.02),
        roofline_fraction=float(min(0.95, 0.08 * speedup * np.exp(rng.normal(0, 0.3)))),
    )


def _submissions(
    attempt: PlannedAttempt, drawn: Drawn, versions: list[str], rng: np.random.Generator
) -> tuple[Submission, ...]:
    """One submission a version, evenly over the attempt; the last has the final kernel."""
    return tuple(_submission(attempt, drawn, number, versions, rng) for number in range(1, len(versions) + 1))


def _submission(
    attempt: PlannedAttempt, drawn: Drawn, number: int, versions: list[str], rng: np.random.Generator
) -> Submission:
    """The later, the likelier it passes, and the nearer its speedup is to the final one."""
    share = number / len(versions)
    reached = drawn.broke_a_rule or drawn.speedup
    verdict = _verdict(attempt, _graded(drawn, rng), final=False, rng=rng)
    if share < 1:
        passes = reached is not None and rng.random() < share
        speedup = reached * share * float(rng.uniform(0.6, 1.1)) if passes and reached is not None else None
        verdict = _verdict(attempt, speedup, final=False, rng=rng)
    asked = 2200.0 * share + float(rng.uniform(0, 60))
    return Submission(
        number=number,
        requested_at_s=asked,
        answered_at_s=asked + 25.0,
        source=versions[number - 1],
        verdict=verdict,
        answer=f"passed at {verdict.speedup:.2f}×" if verdict.speedup else f"failed: {verdict.code}",
    )
