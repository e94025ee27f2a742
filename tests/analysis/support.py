"""Small studies written down as times: what the tests of the analysis and of the report start from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from metakernelbench.analysis.comparisons import attempts_frame, comparisons_frame
from metakernelbench.attempts.record import AttemptRecord
from metakernelbench.experiments.designs import Plan, PlannedAttempt, PlannedComparison, cross_dsl
from metakernelbench.grading.contract import CONTRACT_VERSION
from metakernelbench.grading.verdict import Finding, Isolation, Stage, Timing, Verdict
from metakernelbench.store.artifacts import digest_of
from metakernelbench.store.rematches import Rematch

FAIL = "fail"
SKIPPED = "skipped"
type Outcome = float | str
"""Milliseconds, `FAIL` or `SKIPPED`."""


def verdict(problem: str, dsl: str, ms: float | None, eager_ms: float = 12.0, **changes: Any) -> Verdict:
    """A final verdict: passed in `ms`, or failed."""
    timing = ms and Timing(
        implementation_ms=(ms,), eager_ms=(eager_ms,), implementation_median_ms=ms, eager_median_ms=eager_ms,
        speedup=eager_ms / ms,
    )  # fmt: skip
    fields: dict[str, Any] = {
        "problem": problem,
        "dsl": dsl,
        "workload": "full",
        "device": "NVIDIA H200",
        "passed": ms is not None,
        "ended_at": None if ms is not None else Stage.CORRECTNESS,
        "findings": () if ms is not None else (Finding(code="wrong-output", message="Output `y` differs."),),
        "timing": timing,
        "final": True,
        "isolation": Isolation(method="process"),
        "contract_version": CONTRACT_VERSION,
    }
    return Verdict(**(fields | changes))


def record(attempt: PlannedAttempt, outcome: Outcome, **changes: Any) -> AttemptRecord:
    """The record of an attempt that ended so."""
    ms = outcome if isinstance(outcome, int | float) else None
    fields: dict[str, Any] = {
        "problem": attempt.problem,
        "dsl": attempt.dsl,
        "model": attempt.model,
        "replicate": attempt.replicate,
        "arm": attempt.arm,
        "source": attempt.source,
        "ended": "skipped" if outcome == SKIPPED else "completed",
        "instruction": "" if outcome == SKIPPED else f"Write {attempt.problem} in {attempt.dsl}.",
        "kernel": None if outcome == SKIPPED else "def solve(x):\n    return x\n",
        "skill": None if outcome == SKIPPED else "# Skill\n",
        "final": None if outcome == SKIPPED else verdict(attempt.problem, attempt.dsl, ms),
        "fingerprint": "f",
        "started_at": "2026-01-01T00:00:00+00:00",
        "finished_at": "2026-01-01T00:10:00+00:00",
    }
    return AttemptRecord.model_validate(fields | changes)


def study_of(times: Mapping[str, tuple[Outcome, Outcome, Outcome, Outcome]]) -> tuple[Plan, dict[str, AttemptRecord]]:
    """Problem → outcomes of cute alone, tirx alone, tirx from cute, cute from tirx."""
    plan = cross_dsl(list(times), ["cute", "tirx"], ["m"], 1)
    columns = {("cute", "solo"): 0, ("tirx", "solo"): 1, ("tirx", "from-cute"): 2, ("cute", "from-tirx"): 3}
    return plan, {a.key: record(a, times[a.problem][columns[a.dsl, a.label]]) for a in plan.attempts}


def frames(plan: Plan, records: Mapping[str, AttemptRecord]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The attempts and the comparisons."""
    attempts = attempts_frame(plan, records)
    return attempts, comparisons_frame(plan, attempts)


def rematch(comparison: PlannedComparison, records: Mapping[str, AttemptRecord], *, ratio: float) -> Rematch:
    """A head-to-head measurement of the kernels that the two attempts have."""
    kernels = [records[key].kernel for key in (comparison.baseline, comparison.treatment)]
    digests = [digest_of(kernel) for kernel in kernels if kernel is not None]
    return Rematch(
        baseline=comparison.baseline,
        treatment=comparison.treatment,
        ratio=ratio,
        low=ratio * 0.99,
        high=ratio * 1.01,
        baseline_sha256=digests[0],
        treatment_sha256=digests[1],
        workload="full",
        device="NVIDIA H200",
        judge="local",
        contract_version=CONTRACT_VERSION,
        measured_at="2026-01-02T00:00:00+00:00",
    )
