"""How far annotators agree beyond chance: Cohen's and Fleiss' kappa and Krippendorff's alpha, with intervals.

A rater is one annotator in one pass. The statistics are those of statsmodels and krippendorff; what is added here is
what to do where they are undefined: a category that everybody finds everywhere, or nowhere, has no chance-corrected
agreement, and None says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from metakernelbench.annotation.labels import CauseLabel, SkillLabels, UptakeLabels
from metakernelbench.annotation.rubric import rubric
from metakernelbench.store.annotations import Answer

type Ratings = npt.NDArray[np.float64]
"""Raters × units; a whole number for a label, NaN where a rater did not see a unit."""

DRAWS = 500
SEED = 20_260_101
MIN_UNITS = 6
"""With fewer units than this there is no 95 % interval: `analysis/resampling.py` says why."""
_MAX_UNDEFINED = 0.05
"""Share of bootstrap draws without variation above which no interval is given."""


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """One statistic with its 95 % interval; None where it, or the interval, is undefined."""

    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The agreement on one thing that is labelled."""

    name: str
    """A category, `uptake`, `propagation` or `cause`."""
    units: int
    """What at least two raters have labelled."""
    raters: int
    identical: float | None
    """Share of pairs of ratings of one unit that are equal, chance not taken off."""
    cohen: Agreed
    """Mean of the kappas of all pairs of raters."""
    fleiss: Agreed
    """Over the units that every rater has labelled."""
    alpha: Agreed


def agreement(name: str, ratings: Ratings, draws: int = DRAWS) -> Agreement:
    """The agreement of raters × units."""
    both = ratings[:, (~np.isnan(ratings)).sum(axis=0) >= 2] if ratings.size else ratings.reshape(0, 0)
    return Agreement(
        name=name,
        units=both.shape[1],
        raters=int((~np.isnan(both)).any(axis=1).sum()),
        identical=_identical(both),
        cohen=_with_interval(cohen, both, draws),
        fleiss=_with_interval(fleiss, both, draws),
        alpha=_with_interval(alpha, both, draws),
    )


def _identical(ratings: Ratings) -> float | None:
    pairs = [ratings[[a, b]] for a, b in combinations(range(ratings.shape[0]), 2)]
    common = [pair[:, ~np.isnan(pair).any(axis=0)] for pair in pairs]
    total = sum(pair.shape[1] for pair in common)
    return sum(int((pair[0] == pair[1]).sum()) for pair in common) / total if total else None


def cohen(ratings: Ratings) -> float | None:
    """Mean over the pairs of raters of Cohen's kappa, undefined pairs left out. For (1, 1, 0, 0) against (1, 0, 0, 0):
    observed 3/4, expected 1/2, kappa 1/2."""
    from statsmodels.stats.inter_rater import cohens_kappa

    found = []
    for a, b in combinations(range(ratings.shape[0]), 2):
        pair = ratings[[a, b]]
        pair = pair[:, ~np.isnan(pair).any(axis=0)]
        codes, index = np.unique(pair, return_inverse=True)
        if len(codes) < 2:
            continue
        table = np.zeros((len(codes), len(codes)))
        np.add.at(table, tuple(index.reshape(pair.shape)), 1)
        found.append(float(cohens_kappa(table, return_results=False)))
    return _finite(float(np.mean(found))) if found else None


def fleiss(ratings: Ratings) -> float | None:
    """Fleiss' kappa over the units that all raters have labelled. Three raters with (1, 1, 1) and (0, 0, 1): observed
    2/3, expected 5/9, kappa 1/4."""
    from statsmodels.stats.inter_rater import fleiss_kappa

    complete = ratings[:, ~np.isnan(ratings).any(axis=0)]
    codes, index = np.unique(complete, return_inverse=True)
    if len(codes) < 2 or complete.shape[0] < 2:
        return None
    counts = np.stack([(index.reshape(complete.shape) == code).sum(axis=0) for code in range(len(codes))], axis=1)
    return _finite(float(fleiss_kappa(counts)))


def alpha(ratings: Ratings) -> float | None:
    """Krippendorff's alpha for nominal labels; units with one label say nothing. For (1, 1, 0, 0) against (1, 0, 0, 0):
    1 - 7 · 2 / (2 · 3 · 5) = 0.5333."""
    import krippendorff

    seen = ratings[:, (~np.isnan(ratings)).sum(axis=0) >= 2]
    if len(np.unique(seen[~np.isnan(seen)])) < 2:
        return None
    return _finite(float(krippendorff.alpha(reliability_data=seen, level_of_measurement="nominal")))


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _with_interval(statistic: Callable[[Ratings], float | None], ratings: Ratings, draws: int) -> Agreed:
    """A statistic with its percentile interval by bootstrap over the units."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        value = statistic(ratings) if ratings.shape[0] > 1 else None
        units = ratings.shape[1]
        if value is None or units < MIN_UNITS:
            return Agreed(value=value)
        rng = np.random.default_rng([SEED, units])
        drawn = [statistic(ratings[:, rng.integers(units, size=units)]) for _ in range(draws)]
    defined = [one for one in drawn if one is not None]
    if len(defined) < (1 - _MAX_UNDEFINED) * draws or np.ptp(defined) == 0:
        return Agreed(value=value)
    low, high = np.quantile(defined, [0.025, 0.975])
    return Agreed(value=value, low=float(low), high=float(high))


def agreements(answers: Sequence[Answer], draws: int = DRAWS) -> list[Agreement]:
    """The agreement on every category, on uptake, propagation and cause, for whatever several raters have labelled."""
    skills = [(a, a.read(SkillLabels.model_validate_json)) for a in answers if a.question == "skill"]
    uptakes = [(a, a.read(UptakeLabels.model_validate_json)) for a in answers if a.question == "uptake"]
    causes = [(a, a.read(CauseLabel.model_validate_json)) for a in answers if a.question == "cause"]
    labelled: dict[str, list[tuple[Answer, str, str]]] = {
        category: [(a, a.subject, str(category in labels.categories)) for a, labels in skills]
        for category in rubric().ids
    }
    labelled["uptake"] = [(a, f"{a.subject} {one.category}", one.uptake) for a, up in uptakes for one in up.uptake]
    labelled["propagation"] = [(a, a.subject, str(bool(labels.propagated))) for a, labels in uptakes]
    labelled["cause"] = [(a, a.subject, label.cause) for a, label in causes]
    found = [agreement(name, _matrix(rows), draws) for name, rows in labelled.items()]
    return [one for one in found if one.units]


def _matrix(rows: Sequence[tuple[Answer, str, str]]) -> Ratings:
    raters = sorted({(answer.annotator, answer.pass_number) for answer, _, _ in rows})
    units = sorted({unit for _, unit, _ in rows})
    words = sorted({word for _, _, word in rows})
    ratings = np.full((len(raters), len(units)), np.nan)
    rater_at = {rater: index for index, rater in enumerate(raters)}
    unit_at = {unit: index for index, unit in enumerate(units)}
    for answer, unit, word in rows:
        ratings[rater_at[answer.annotator, answer.pass_number], unit_at[unit]] = words.index(word)
    return ratings
