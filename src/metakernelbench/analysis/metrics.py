"""The numbers of the benchmark as pure functions of arrays: what one row contributes, and how contributions add up.

Every metric here is a transform of a ratio of two sums over rows. That one shape is what lets `resampling.py` give any
of them an interval, and a table show any of them for any group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log

import numpy as np
import numpy.typing as npt

type Array = npt.NDArray[np.float64]

RATIO_LIMIT = 4.0
"""A paired ratio lies between 1/4 and 4; a rescue counts 4 and a break 1/4."""
SPEEDUP_CAP = 100.0
"""A speedup counts for at most this much in GM."""
FAST = 2.0
"""R(2) counts attempts that pass at this speedup or better; it also parts the upper two tiers of standing."""
FLOOR = 0.05
"""The speedup that stands for "did not pass" in rank correlations: below every speedup that matters, equal for all."""
BAND = 0.05
"""The default indifference band b: ratios between 1/(1+b) and 1+b are neutral."""
_ROUNDING = 1e-12
"""A ratio this near the band's edge is on the edge, so that swapping the arms swaps help and harm exactly."""


def paired_ratio(baseline_ms: Array, treatment_ms: Array, skipped: npt.NDArray[np.bool_]) -> Array:
    """ρ of each comparison; a time is NaN where the attempt was judged and did not pass.

    clip(t_base / t_treat, 1/4, 4) when both pass, 4 for a rescue, 1/4 for a break, 1 when both fail or the treatment
    was skipped. 3 ms against 2 ms is 1.5; 9 ms against 1 ms is 4; (fail, 1 ms) is 4; (1 ms, fail) is 1/4; (fail, fail)
    is 1.
    """
    base_fails, treat_fails = np.isnan(baseline_ms), np.isnan(treatment_ms)
    with np.errstate(invalid="ignore", over="ignore"):
        ratio = np.clip(baseline_ms / treatment_ms, 1 / RATIO_LIMIT, RATIO_LIMIT)
    return np.select(
        [skipped | (base_fails & treat_fails), base_fails, treat_fails],
        [np.ones_like(ratio), np.full_like(ratio, RATIO_LIMIT), np.full_like(ratio, 1 / RATIO_LIMIT)],
        ratio,
    )


def helped(rho: Array, band: float = BAND) -> npt.NDArray[np.bool_]:
    """ρ > 1 + b. With b = 0.05: 1.06 is help, 1.05 is not."""
    return np.asarray(np.log(rho) > log(1 + band) + _ROUNDING)


def harmed(rho: Array, band: float = BAND) -> npt.NDArray[np.bool_]:
    """ρ < 1/(1 + b). With b = 0.05: 0.95 is harm (1/1.05 = 0.9524), 0.96 is not."""
    return np.asarray(np.log(rho) < -log(1 + band) - _ROUNDING)


def _same(ratio: Array) -> Array:
    return ratio


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A transform of Σ numerator / Σ denominator over rows."""

    name: str
    title: str
    meaning: str
    """One sentence for the head of a table."""
    numerator: Callable[[Array], Array]
    """What each row adds above, from the column that the metric reads."""
    denominator: Callable[[Array], Array]
    transform: Callable[[Array], Array] = _same
    """Rises with the ratio."""
    proportion: bool = False
    """Whether it is a share of rows, between 0 and 1."""


def _ones(column: Array) -> Array:
    return np.ones_like(column)


def _passing(speedup: Array) -> Array:
    return (~np.isnan(speedup)).astype(np.float64)


def mean_metric(name: str, meaning: str, *, proportion: bool = False) -> Metric:
    """The plain mean of a column."""
    return Metric(name=name, title=name, meaning=meaning, numerator=_same, denominator=_ones, proportion=proportion)


PASS_RATE = Metric(
    name="P",
    title="P",
    meaning="share of judged attempts whose final kernel passed",
    numerator=_passing,
    denominator=_ones,
    proportion=True,
)
"""Of speedups (None for fails → NaN): passing over judged. (2.0, NaN, 0.5, NaN) gives 0.5."""

GEOMETRIC_MEAN = Metric(
    name="GM",
    title="GM",
    meaning="geometric mean speedup of the passing attempts, each capped at 100",
    numerator=lambda speedup: np.log(np.minimum(np.nan_to_num(speedup, nan=1.0), SPEEDUP_CAP)),
    denominator=_passing,
    transform=np.exp,
)
"""exp(mean ln min(s, 100)) over passing attempts. (2.0, NaN, 0.5, 400) gives (2 · 0.5 · 100)^(1/3) = 4.6416."""

FAST_RATE = Metric(
    name="R2",
    title="R(2)",
    meaning="share of judged attempts that passed at 2× or better",
    numerator=lambda speedup: (np.nan_to_num(speedup, nan=0.0) >= FAST).astype(np.float64),
    denominator=_ones,
    proportion=True,
)
"""Failures stay in the denominator. (2.0, NaN, 0.5, 400) gives 2/4 = 0.5."""

SOLO_METRICS = (PASS_RATE, GEOMETRIC_MEAN, FAST_RATE)
"""Metrics of a column of speedups, NaN where an attempt was judged and did not pass."""

PAIRED_LIFT = Metric(
    name="lift",
    title="ΔGM",
    meaning="geometric mean of the paired ratios, less one",
    numerator=np.log,
    denominator=_ones,
    transform=np.expm1,
)
"""exp(mean ln ρ) − 1. Of (4, 1, 1/4, 1.5): exp(ln 1.5 / 4) − 1 = 0.1067."""


def lift_metrics(band: float = BAND) -> tuple[Metric, ...]:
    """ΔGM, T, neutral, H of a column of paired ratios. T + neutral + H = 1."""
    return (
        PAIRED_LIFT,
        Metric(
            name="help",
            title="T, helped",
            meaning=f"share of comparisons that the skill helped (ρ above {1 + band:g})",
            numerator=lambda rho: helped(rho, band).astype(np.float64),
            denominator=_ones,
            proportion=True,
        ),
        Metric(
            name="neutral",
            title="neutral",
            meaning="share of comparisons that the skill neither helped nor harmed",
            numerator=lambda rho: (~helped(rho, band) & ~harmed(rho, band)).astype(np.float64),
            denominator=_ones,
            proportion=True,
        ),
        Metric(
            name="harm",
            title="H, harmed",
            meaning=f"share of comparisons that the skill harmed (ρ below 1/{1 + band:g})",
            numerator=lambda rho: harmed(rho, band).astype(np.float64),
            denominator=_ones,
            proportion=True,
        ),
    )


def value(metric: Metric, column: Array) -> float | None:
    """The metric of one group of rows; None where its denominator is empty (GM of attempts that all fail)."""
    denominator = float(metric.denominator(column).sum())
    if denominator == 0:
        return None
    return float(metric.transform(np.asarray(metric.numerator(column).sum() / denominator)))
