"""How far apart two measurements of the same thing lie, and the indifference band that this supports.

Four pairs of measurements can tell, from the least that differs to the most: the same kernel graded twice in one
attempt; the same kernel in a file of repeated gradings; two kernels timed head to head against the two medians of their
gradings; and two attempts that nothing distinguishes (the design `retry`), which says what chance alone does to ρ.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from math import expm1

import numpy as np
import polars as pl

from metakernelbench.analysis.comparisons import MEASURED
from metakernelbench.analysis.frames import Frames
from metakernelbench.analysis.metrics import BAND, Array
from metakernelbench.analysis.tables import Column, Table
from metakernelbench.grading.verdict import Verdict

SUPPORTED = 0.95
"""The band that noise supports is the change that this share of pairs stays within."""


def regradings(attempts: pl.DataFrame, submissions: pl.DataFrame) -> Array:
    """ln of the ratio of two medians of one kernel: a passing submission that passed again as the final kernel."""
    final = attempts.filter(pl.col("state") == "passed").select("key", final_ms="ms")
    again = submissions.filter(pl.col("is_final_kernel") & pl.col("ms").is_not_null()).join(final, on="key")
    return np.asarray((again["ms"].log() - again["final_ms"].log()).to_numpy(), dtype=np.float64)


def repeated_gradings(verdicts: Iterable[Verdict]) -> Array:
    """ln of the ratio of the medians of every two passing gradings of one kernel, on one device and workload."""
    groups: dict[tuple[str | None, ...], list[float]] = {}
    for verdict in verdicts:
        if verdict.passed and verdict.timing:
            kernel = (verdict.problem, verdict.dsl, verdict.workload, verdict.device, verdict.source_sha256)
            groups.setdefault(kernel, []).append(float(np.log(verdict.timing.implementation_median_ms)))
    return np.array([a - b for group in groups.values() for a, b in combinations(group, 2)], dtype=np.float64)


def against_head_to_head(comparisons: pl.DataFrame) -> Array:
    """ln of the head-to-head ratio over the ratio of the two medians, where both are known."""
    measured = comparisons.filter(pl.col("rho_from") == MEASURED)
    medians = measured["baseline_ms"] / measured["treatment_ms"]
    return np.asarray((measured["measured_ratio"] / medians).log().to_numpy(), dtype=np.float64)


def again(comparisons: pl.DataFrame) -> Array:
    """ln of the ratio of two attempts that nothing distinguishes, where both pass."""
    pairs = comparisons.filter((pl.col("design") == "retry") & (pl.col("change") == "both pass"))
    return np.asarray(pairs["rho"].log().to_numpy(), dtype=np.float64)


def supported_band(differences: Array) -> float | None:
    """The band that 95 % of these ln ratios stay within; None where there are none.

    |ln| of 0.0100, 0.0101, 0.0198 and 0.0408 have the 95 % quantile 0.0377, which is a band of 0.0384.
    """
    return expm1(float(np.quantile(np.abs(differences), SUPPORTED))) if len(differences) else None


def noise(study: Frames, gradings: Iterable[Verdict] = ()) -> Table:
    """What two measurements of one thing differ by. `gradings` are further verdicts, some of them of one kernel."""
    sources = {
        "one kernel, graded in the attempt and at the end": regradings(study.attempts, study.submissions),
        "one kernel, in the file of repeated gradings": repeated_gradings(gradings),
        "head to head against two medians": against_head_to_head(study.comparisons),
        "two attempts that nothing distinguishes": again(study.comparisons),
    }
    rows = [_row(source, differences, study.band) for source, differences in sources.items() if len(differences)]
    rows = rows or [_row(next(iter(sources)), np.empty(0), study.band)]
    schema = {"source": pl.String, "pairs": pl.Int64} | dict.fromkeys(("median", "supported", "band"), pl.Float64)
    return Table(
        name="noise",
        title="Measured noise",
        note="How far two measurements of the same thing lie apart. A band below what 95 % of gradings of one kernel "
        "stay within counts noise as help and harm; two attempts that nothing distinguishes say what chance does.",
        columns=(
            Column(name="source", title="two measurements of"),
            Column(name="pairs", title="pairs", kind="count"),
            Column(name="median", title="median change", kind="share"),
            Column(name="supported", title="95 % stay within", kind="share"),
            Column(name="band", title="band used", kind="share"),
        ),
        frame=pl.DataFrame(rows, schema=schema),
    )


def _row(source: str, differences: Array, band: float = BAND) -> dict[str, object]:
    middle = expm1(float(np.median(np.abs(differences)))) if len(differences) else None
    return {
        "source": source,
        "pairs": len(differences),
        "median": middle,
        "supported": supported_band(differences),
        "band": band,
    }
