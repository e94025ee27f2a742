"""From a plan and the records of its attempts to frames: one row an attempt, a submission, or a comparison.

Everything else in `analysis` is computed from these. Rows carry the keys of their attempts, so that every number can
be traced. Missing is a value of its own: an attempt without a record is neither a pass nor a failure; it is left out
of every mean and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from math import isfinite

import numpy as np
import polars as pl

from metakernelbench.analysis.metrics import FAST, RATIO_LIMIT, paired_ratio
from metakernelbench.attempts.record import AttemptRecord, Submission
from metakernelbench.experiments.designs import Plan, PlannedAttempt, PlannedComparison
from metakernelbench.grading.codes import DEPENDENCE_CODES, RULE_CODES
from metakernelbench.grading.verdict import Timing, Verdict
from metakernelbench.problems import catalog
from metakernelbench.store.rematches import Rematch

STATES = ("passed", "failed", "skipped", "unjudged")
"""How an attempt stands: its final kernel passed; it was judged and did not pass (no kernel at all included); it was
not run because its source kept no skill; it has no record yet."""
TIERS = ("failed", "below 2×", "2× or better")
CHANGES = ("both pass", "rescue", "break", "both fail", "skipped", "unjudged")
"""What the treatment did to the baseline's verdict."""
MEASURED, MEDIANS, VERDICTS = "head to head", "two medians", "verdicts"
"""What a paired ratio comes from: one session that timed both kernels, two gradings, or what did not pass."""

_ATTEMPT_SCHEMA: dict[str, type[pl.DataType]] = {
    "key": pl.String,
    "problem": pl.String,
    "family": pl.String,
    "dsl": pl.String,
    "model": pl.String,
    "replicate": pl.Int64,
    "arm": pl.String,
    "label": pl.String,
    "source": pl.String,
    "device": pl.String,
    "workload": pl.String,
    "state": pl.String,
    "ms": pl.Float64,
    "eager_ms": pl.Float64,
    "speedup": pl.Float64,
    "roofline": pl.Float64,
    "tier": pl.Int64,
    "stage": pl.String,
    "code": pl.String,
    "violations": pl.String,
    "timed_ms": pl.Float64,
    "timed_eager_ms": pl.Float64,
    "timed_speedup": pl.Float64,
    "timed_roofline": pl.Float64,
    "ended": pl.String,
    "submissions": pl.Int64,
    "uncounted": pl.Int64,
    "turns": pl.Int64,
    "input_tokens": pl.Int64,
    "cached_tokens": pl.Int64,
    "output_tokens": pl.Int64,
    "cost_usd": pl.Float64,
    "agent_s": pl.Float64,
    "tries": pl.Int64,
    "has_kernel": pl.Boolean,
    "has_skill": pl.Boolean,
}


def attempts_frame(
    plan: Plan,
    records: Mapping[str, AttemptRecord],
    family_of: Callable[[str], str] = catalog.family_of,
    *,
    forgiven: frozenset[str] = frozenset(),
) -> pl.DataFrame:
    """One row a planned attempt, in the order of problem, model, replicate, DSL and arm.

    `violations` are the rules (codes with commas between) that alone stand between a kernel that was right and timed
    and a pass, null for any other attempt; `timed_…` is what was measured of it. `forgiven` is as in `forgiving`.
    """
    rows = [
        _planned(attempt, family_of(attempt.problem)) | _facts(attempt.key, records.get(attempt.key))
        for attempt in plan.attempts
    ]
    frame = pl.DataFrame(rows, schema=_ATTEMPT_SCHEMA)
    frame = frame.sort("problem", "model", "replicate", "dsl", "arm", "key", descending=[False] * 4 + [True, False])
    return forgiving(frame, forgiven) if forgiven else frame


def forgiving(attempts: pl.DataFrame, codes: frozenset[str]) -> pl.DataFrame:
    """The attempts with violations of the rules `codes` counted as passes, where nothing else was wrong."""
    broken = attempts["violations"].drop_nulls().unique()
    freed = pl.col("violations").is_in([each for each in broken if frozenset(each.split(",")) <= codes])
    columns = {"ms": "timed_ms", "eager_ms": "timed_eager_ms", "speedup": "timed_speedup", "roofline": "timed_roofline"}
    fast = pl.when(pl.col("timed_speedup") >= FAST).then(2).otherwise(1)
    return attempts.with_columns(
        pl.when(freed).then(pl.lit("passed")).otherwise("state").alias("state"),
        pl.when(freed).then(fast).otherwise("tier").cast(pl.Int64).alias("tier"),
        *(pl.when(freed).then(timed).otherwise(name).alias(name) for name, timed in columns.items()),
        *(pl.when(freed).then(None).otherwise(name).alias(name) for name in ("stage", "code")),
    )


def _planned(attempt: PlannedAttempt, family: str) -> dict[str, object]:
    return {
        "key": attempt.key,
        "problem": attempt.problem,
        "family": family,
        "dsl": attempt.dsl,
        "model": attempt.model,
        "replicate": attempt.replicate,
        "arm": attempt.arm,
        "label": attempt.label,
        "source": attempt.source,
    }


def _facts(key: str, record: AttemptRecord | None) -> dict[str, object]:
    """What a record says, in columns."""
    if record is None:
        return {"state": "unjudged"}
    counted = sum(submission.number is not None for submission in record.submissions)
    return {
        **_outcome(key, record),
        "ended": record.ended,
        "submissions": counted,
        "uncounted": len(record.submissions) - counted,
        **record.usage.model_dump(),
        "agent_s": record.seconds.get("agent"),
        "tries": record.tries,
        "has_kernel": record.kernel is not None,
        "has_skill": record.skill is not None,
    }


def _outcome(key: str, record: AttemptRecord) -> dict[str, object]:
    """State, times and tier of a record. A passing verdict without a usable time is our fault and is refused."""
    verdict = record.final
    if record.ended == "skipped":
        return {"state": "skipped"}
    if verdict is None:
        return {"state": "failed", "tier": 0, "code": "no-kernel"}
    where = {"device": verdict.device, "workload": verdict.workload}
    if not verdict.passed or verdict.timing is None:
        failed = {"state": "failed", "tier": 0, "stage": verdict.ended_at, "code": verdict.code}
        return where | failed | _beside_violations(key, verdict)
    found = _times(key, verdict.timing)
    return where | found | {"state": "passed", "tier": 2 if verdict.timing.speedup >= FAST else 1}


def _beside_violations(key: str, verdict: Verdict) -> dict[str, object]:
    """What was measured of a kernel that only broke rules."""
    codes = sorted({finding.code for finding in verdict.findings})
    if verdict.timing is None or not verdict.final or not set(codes) <= _RULES:
        return {}
    timed = {f"timed_{name}": value for name, value in _times(key, verdict.timing).items()}
    return {"violations": ",".join(codes), **timed}


_RULES = RULE_CODES.keys() | DEPENDENCE_CODES.keys()


def _times(key: str, timing: Timing) -> dict[str, object]:
    times = (timing.implementation_median_ms, timing.eager_median_ms, timing.speedup)
    if not all(isfinite(time) and time > 0 for time in times):
        raise ValueError(f"attempt `{key}` was timed with medians {times[:2]} ms and speedup {times[2]}")
    return {"ms": times[0], "eager_ms": times[1], "speedup": times[2], "roofline": timing.roofline_fraction}


_SUBMISSION_SCHEMA: dict[str, type[pl.DataType]] = {
    "key": pl.String,
    "number": pl.Int64,
    "requested_s": pl.Float64,
    "answered_s": pl.Float64,
    "passed": pl.Boolean,
    "ms": pl.Float64,
    "speedup": pl.Float64,
    "stage": pl.String,
    "code": pl.String,
    "is_final_kernel": pl.Boolean,
}


def submissions_frame(records: Mapping[str, AttemptRecord]) -> pl.DataFrame:
    """One row a submission, counted or not: when it was sent, and what came of it. `number` is null for one that was
    not counted, `passed` for one that was not graded; `is_final_kernel` says whether it was graded again at the end."""
    rows = [_submitted(key, sent, record) for key, record in records.items() for sent in record.submissions]
    return pl.DataFrame(rows, schema=_SUBMISSION_SCHEMA)


def _submitted(key: str, sent: Submission, record: AttemptRecord) -> dict[str, object]:
    verdict = sent.verdict
    passed = verdict is not None and verdict.passed
    return {
        "key": key,
        "number": sent.number,
        "requested_s": sent.requested_at_s,
        "answered_s": sent.answered_at_s,
        "passed": None if verdict is None else passed,
        "ms": verdict.timing.implementation_median_ms if verdict and verdict.timing and passed else None,
        "speedup": verdict.speedup if verdict else None,
        "stage": verdict.ended_at if verdict else None,
        "code": verdict.code if verdict else None,
        "is_final_kernel": sent.source is not None and sent.source == record.kernel,
    }


def comparisons_frame(
    plan: Plan,
    attempts: pl.DataFrame,
    rematches: Iterable[Rematch] = (),
) -> pl.DataFrame:
    """One row a planned comparison: its keys, the three attempts' states and times, ρ, and what became of the verdict.

    `rematches` are the head-to-head measurements that fit the attempts' present kernels. `judge` says what the columns
    mean.
    """
    names = [field.name for field in fields(PlannedComparison)]
    rows = [{name: getattr(c, name) for name in names} | {"direction": c.direction} for c in plan.comparisons]
    planned = pl.DataFrame(rows, schema=dict.fromkeys([*names, "direction"], pl.String) | {"replicate": pl.Int64})
    measured = pl.DataFrame(
        [(m.baseline, m.treatment, m.ratio, m.low, m.high) for m in rematches], schema=_MEASURED, orient="row"
    )
    return judge(planned.join(measured, on=["baseline", "treatment"], how="left"), attempts)


_MEASURED = dict.fromkeys(("baseline", "treatment"), pl.String) | dict.fromkeys(
    ("measured_ratio", "measured_low", "measured_high"), pl.Float64
)
_PLANNED = (
    "design", "arm", "problem", "model", "replicate", "source_dsl", "target_dsl", "direction",
    "source", "baseline", "treatment", "measured_ratio", "measured_low", "measured_high",
)  # fmt: skip


def judge(comparisons: pl.DataFrame, attempts: pl.DataFrame) -> pl.DataFrame:
    """Planned comparisons with what became of their attempts; those of an earlier `judge` may come again.

    A skipped treatment inherits the baseline's time, speedup and tier. `rho_medians` comes from the two gradings,
    `rho` from the head-to-head measurement where both pass and there is one (`rho_from` says which). Both are null
    exactly where the change is `unjudged`: the baseline or the treatment has no record yet.
    """
    frame = comparisons.select(_PLANNED).join(
        attempts.select("problem", "family").unique(), on="problem", how="left"
    )  # fmt: skip
    for role in ("source", "baseline", "treatment"):
        columns = {"key": role} | {name: f"{role}_{name}" for name in ("state", "ms", "speedup", "tier")}
        frame = frame.join(attempts.select(list(columns)).rename(columns), on=role, how="left")
        without = pl.when(pl.col(role).is_null()).then(pl.lit("none")).otherwise(pl.lit("unjudged"))
        frame = frame.with_columns(pl.col(f"{role}_state").fill_null(without))
    skipped = pl.col("treatment_state") == "skipped"
    frame = frame.with_columns(
        pl.when(skipped).then(f"baseline_{name}").otherwise(f"treatment_{name}").alias(f"treatment_{name}")
        for name in ("ms", "speedup", "tier")
    ).with_columns(_change().alias("change"))
    frame = frame.with_columns(_ratios(frame)).with_columns(_measured_first())
    return frame.sort("design", "arm", "problem", "model", "replicate", "source_dsl", "target_dsl", "treatment")


def _measured_first() -> tuple[pl.Expr, pl.Expr]:
    """ρ, from the head-to-head measurement where there is one, and where it comes from."""
    measured = (pl.col("change") == "both pass") & pl.col("measured_ratio").is_not_null()
    clipped = pl.col("measured_ratio").clip(1 / RATIO_LIMIT, RATIO_LIMIT)
    origin = (
        pl.when(measured)
        .then(pl.lit(MEASURED))
        .when(pl.col("change") == "both pass")
        .then(pl.lit(MEDIANS))
        .when(pl.col("change") != "unjudged")
        .then(pl.lit(VERDICTS))
    )
    return pl.when(measured).then(clipped).otherwise("rho_medians").alias("rho"), origin.alias("rho_from")


def _change() -> pl.Expr:
    before, after = pl.col("baseline_state"), pl.col("treatment_state")
    return (
        pl.when((before == "unjudged") | (after == "unjudged"))
        .then(pl.lit("unjudged"))
        .when(after == "skipped")
        .then(pl.lit("skipped"))
        .when((before == "passed") & (after == "passed"))
        .then(pl.lit("both pass"))
        .when(after == "passed")
        .then(pl.lit("rescue"))
        .when(before == "passed")
        .then(pl.lit("break"))
        .otherwise(pl.lit("both fail"))
    )


def _ratios(frame: pl.DataFrame) -> pl.Series:
    """ρ of every judged row from its two gradings, null elsewhere."""
    rho = paired_ratio(
        frame["baseline_ms"].to_numpy().astype(np.float64),
        frame["treatment_ms"].to_numpy().astype(np.float64),
        (frame["change"] == "skipped").to_numpy(),
    )
    judged = (frame["change"] != "unjudged").to_numpy()
    return pl.Series("rho_medians", np.where(judged, rho, np.nan)).fill_nan(None)
