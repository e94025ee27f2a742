"""Uncertainty: intervals by bootstrap over problems, and two randomisation tests. Pure functions of arrays and a seed.

The unit that is drawn anew is the problem. All of a problem's rows stay together (both arms, both directions, every
model), so the bootstrap is paired, and rows of one problem are never taken for independent evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import batched
from math import sqrt

import numpy as np
import numpy.typing as npt

from metakernelbench.analysis.metrics import Array, Metric

DRAWS = 10_000
LEVEL = 0.95
FLIP_DRAWS = 20_000
SWAP_DRAWS = 2_000
SEED = 20_260_101
MIN_PROBLEMS = 6
"""Even the whole range of n independent values covers their median with probability 1 − 2^(1−n) only: 94 % for 5
problems, 97 % for 6. With fewer there is nothing from which a 95 % interval could be made, and none is shown."""
_CHUNK = 200
_AT_ONCE = 64
"""Intervals drawn together: what they need stays within some ten megabytes."""
_ONE_THREAD = 200_000
"""Multiplications in one matrix product."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value with its interval. What the data do not support is None, never a zero-width interval."""

    value: float | None
    low: float | None = None
    high: float | None = None
    rows: int
    problems: int


@lru_cache(maxsize=32)
def _weights(problems: int, draws: int, seed: int) -> Array:
    """How often each problem (row) appears in each bootstrap draw (column). Groups with as many problems share them."""
    rng = np.random.default_rng([seed, problems])
    drawn = rng.integers(problems, size=(draws, problems)) * draws + np.arange(draws)[:, None]
    counts = np.bincount(drawn.ravel(), minlength=draws * problems)
    return counts.reshape(problems, draws).astype(np.float64)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A metric of a column of rows, each of one problem."""

    metric: Metric
    column: Array
    problem: npt.NDArray[np.int64]


def estimate(
    metric: Metric, column: Array, problem: npt.NDArray[np.int64], *, seed: int = SEED, draws: int = DRAWS
) -> Estimate:
    """`metric` of `column` with its 95 % interval by bootstrap over `problem`.

    The interval is the expanded percentile interval: the percentile bootstrap is too narrow for few problems, by
    √((n−1)/n) in width and by normal against Student quantiles, and taking Φ(∓√(n/(n−1)) · t_{0.975, n−1}) as quantiles
    repairs both (T. Hesterberg, What Teachers Should Know About the Bootstrap, 2015). For n = 74 these are 2.26 % and
    97.74 % instead of 2.5 % and 97.5 %; for n = 6, 0.24 % and 99.76 %.

    A share of 0 or 1 in every problem has no bootstrap spread; its interval is the exact binomial one with the problem
    as the unit (0 of 6 problems: 0 to 0.459). Any other metric without spread has no interval.
    """
    return estimate_all([Request(metric=metric, column=column, problem=problem)], seed=seed, draws=draws)[0]


def estimate_all(requests: Sequence[Request], *, seed: int = SEED, draws: int = DRAWS) -> list[Estimate]:
    """`estimate` of each request, those with equally many problems by one matrix product."""
    sums = [_Sums.of(request) for request in requests]
    found = [_without_bootstrap(request, each) for request, each in zip(requests, sums, strict=True)]
    open_ones: dict[int, list[int]] = {}
    for at, each in enumerate(found):
        if each is None:
            open_ones.setdefault(len(sums[at].below), []).append(at)
    for count, places in open_ones.items():
        for some in batched(places, _AT_ONCE):
            bounds = _bootstrap([sums[at] for at in some], _weights(count, draws, seed))
            for at, (low, high) in zip(some, bounds, strict=True):
                found[at] = _estimate(requests[at], sums[at], low, high)
    return [each for each in found if each is not None]


@dataclass(frozen=True, kw_only=True)
class _Sums:
    """What each problem adds above and below, for the problems that add anything below: a problem that adds nothing to
    the denominator adds nothing to the metric."""

    above: Array
    below: Array
    problems: int

    @staticmethod
    def of(request: Request) -> _Sums:
        problems, index = np.unique(request.problem, return_inverse=True)
        count, metric = len(problems), request.metric
        above = np.bincount(index, weights=metric.numerator(request.column), minlength=count)
        below = np.bincount(index, weights=metric.denominator(request.column), minlength=count)
        return _Sums(above=above[below > 0], below=below[below > 0], problems=count)


def _estimate(request: Request, sums: _Sums, low: float | None, high: float | None) -> Estimate:
    point = float(request.metric.transform(np.asarray(sums.above.sum() / sums.below.sum())))
    if low is not None and high is not None:
        low, high = (float(request.metric.transform(np.asarray(bound))) for bound in (low, high))
    return Estimate(value=point, low=low, high=high, rows=len(request.column), problems=sums.problems)


def _without_bootstrap(request: Request, sums: _Sums) -> Estimate | None:
    """The estimate where there is nothing to draw: no rows, too few problems, no spread. None for all others."""
    count = len(sums.below)
    if count == 0:
        return Estimate(value=None, rows=len(request.column), problems=sums.problems)
    if count < MIN_PROBLEMS:
        return _estimate(request, sums, None, None)
    share = sums.above / sums.below
    if np.ptp(share) > 0:
        return None
    low, high = _exact_share(float(share[0]), count) if request.metric.proportion else (None, None)
    return _estimate(request, sums, low, high)


def _bootstrap(sums: Sequence[_Sums], weights: Array) -> list[tuple[float, float]]:
    """The interval of each ratio of sums before its transform, which rises and so keeps the order of the draws."""
    below = {each.below.tobytes(): each.below for each in sums}  # the metrics of one group share their denominator
    drawn = dict(zip(below, _product(np.stack(list(below.values())), weights), strict=True))
    ratios = _product(np.stack([each.above for each in sums]), weights)
    for at, each in enumerate(sums):
        ratios[at] /= drawn[each.below.tobytes()]
    low, high = np.quantile(ratios, _expanded_quantiles(weights.shape[0]), axis=1)
    return list(zip(low.tolist(), high.tolist(), strict=True))


def _product(sums: Array, weights: Array) -> Array:
    """`sums @ weights`, in pieces so small that no library takes them for worth a second thread: its threads would wait
    busily for each other, and for the other table that is made at the same time."""
    rows, problems = sums.shape
    piece = max(1, _ONE_THREAD // (rows * problems))
    found = np.empty((rows, weights.shape[1]))
    for start in range(0, weights.shape[1], piece):
        np.matmul(sums, weights[:, start : start + piece], out=found[:, start : start + piece])
    return found


@lru_cache(maxsize=128)
def _expanded_quantiles(count: int) -> tuple[float, float]:
    from scipy.special import ndtr, stdtrit  # scipy.stats would take seconds to import

    tail = float(ndtr(-sqrt(count / (count - 1)) * stdtrit(count - 1, (1 + LEVEL) / 2)))
    return tail, 1 - tail


def _exact_share(share: float, count: int) -> tuple[float, float] | tuple[None, None]:
    """Clopper–Pearson for 0 or `count` of `count` problems; a share that is constant in between has no interval."""
    edge = float(((1 - LEVEL) / 2) ** (1 / count))
    if share == 0:
        return 0.0, 1 - edge
    return (edge, 1.0) if share == 1 else (None, None)


@dataclass(frozen=True, kw_only=True)
class RankTest:
    """A rank correlation, or a difference of two, against its randomisation null."""

    value: float | None
    """None where a rank correlation is undefined: fewer than three pairs, or no variation."""
    p: float | None
    """Two-sided; (1 + draws at least as extreme) / (1 + draws), so never 0."""
    pairs: int
    draws: int


def codes_of(values: Array) -> npt.NDArray[np.int32]:
    """Whole numbers from 0 in the place of values, in the same order and with the same ties."""
    return np.asarray(np.unique(values, return_inverse=True)[1], dtype=np.int32)


def twice_ranks(codes: npt.NDArray[np.int32], kinds: int) -> npt.NDArray[np.int64]:
    """Twice the average rank of each code within its row; twice, so that it is whole. Codes are below `kinds`.

    Counts instead of sorting: a value's average rank is how many are smaller, plus half of those equal to it, plus a
    half. Of (3, 1, 1) they are 3, 1.5 and 1.5. As `scipy.stats.rankdata(codes, axis=1)`, some ten times faster.
    """
    draws = len(codes)
    places = codes + (kinds * np.arange(draws, dtype=np.int32))[:, None]
    counts = np.bincount(places.ravel(), minlength=draws * kinds).reshape(draws, kinds)
    twice = 2 * np.cumsum(counts, axis=1) - counts + 1
    return np.asarray(twice.ravel()[places])


def _correlation(x: npt.NDArray[np.int64], y: npt.NDArray[np.int64]) -> Array:
    """Pearson's r of each row of x with the row of y; NaN where one does not vary."""
    one, other = (values - values.mean(axis=-1, keepdims=True) for values in (x, y))
    norm = np.sqrt((one * one).sum(axis=-1) * (other * other).sum(axis=-1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((one * other).sum(axis=-1) / norm)


def spearman(x: Array, y: Array) -> float | None:
    """Spearman's rank correlation with average ranks for ties. Of (1, 2, 3, 4) and (1, 3, 2, 4): 0.8."""
    if len(x) < 3:
        return None
    ranks = [twice_ranks(codes_of(values)[None, :], len(values)) for values in (x, y)]
    value = float(_correlation(*ranks)[0])
    return None if np.isnan(value) else value


def _two_sided(observed: float, null: Array) -> float:
    """Draws without variation count as 0. The hair keeps a draw that equals the observation up to rounding."""
    extreme = np.count_nonzero(np.abs(np.nan_to_num(null)) >= abs(observed) - 1e-9)
    return (1 + int(extreme)) / (1 + len(null))


def sign_flip_test(forth: Array, back: Array, *, seed: int = SEED, draws: int = FLIP_DRAWS) -> RankTest:
    """Do the two directions' ln ρ go together? Spearman against random signs.

    Null: whether a skill helped or harmed is a coin toss in either direction, given the sizes. Every ln ρ gets its sign
    at random, in both directions and independently; sizes, zeros and ties stay where they are. For forth = back =
    (1, 2, 3) the observation is 1 and 8 of the 64 sign patterns reach |1|, so p tends to 1/8.
    """
    observed = spearman(forth, back)
    if observed is None:
        return RankTest(value=None, p=None, pairs=len(forth), draws=0)
    rng = np.random.default_rng([seed, 1])
    signed = [codes_of(np.concatenate([values, -values])).reshape(2, -1) for values in (forth, back)]
    null = []
    for size in _chunks(draws):
        ranks = [
            twice_ranks(np.where(rng.random((size, len(forth))) < 0.5, as_is, flipped), 2 * len(forth))
            for as_is, flipped in signed
        ]
        null.append(_correlation(*ranks))
    return RankTest(value=observed, p=_two_sided(observed, np.concatenate(null)), pairs=len(forth), draws=draws)


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """Comparisons as places in one list of attempts, because an attempt is in several: the solo attempt that is one
    comparison's baseline is another one's source."""

    speedup: Array
    """Of each attempt, with what stands for "did not pass"."""
    group: npt.NDArray[np.int64]
    """Attempts that nothing but their skill distinguishes have one group: same problem, DSL, model and replicate."""
    source: npt.NDArray[np.int64]
    """Of each comparison: the place of its source, of its baseline, and of its treatment (a skipped one: the
    baseline's)."""
    solo: npt.NDArray[np.int64]
    conditioned: npt.NDArray[np.int64]


def swap_test(rows: Tracked, *, seed: int = SEED, draws: int = SWAP_DRAWS) -> RankTest:
    """Does the conditioned attempt follow the source more than the solo attempt does? The difference of two Spearman
    correlations with the source's speedup, against swapping attempts.

    Null: a skill changes nothing, so that the attempts of a group could as well have changed their places. They do so
    at random, and everywhere at once: with a solo attempt, the baseline of one comparison and the source of another
    are swapped together. Swapping arms within each comparison on its own instead would reject twice too often where
    both directions are pooled.
    """
    size = len(rows.source)
    codes = codes_of(rows.speedup)
    as_it_is = _tracking(codes[None, :], rows)[0] if size >= 3 else np.nan
    if np.isnan(as_it_is):
        return RankTest(value=None, p=None, pairs=size, draws=0)
    order = np.argsort(rows.group, kind="stable")
    groups, back = rows.group[order], np.argsort(order)
    rng = np.random.default_rng([seed, 2])
    null = []
    for chunk in _chunks(draws):
        swapped = np.argsort(groups + rng.random((chunk, len(groups))), axis=1)
        null.append(_tracking(codes[order][swapped][:, back], rows))
    observed = float(as_it_is)
    return RankTest(value=observed, p=_two_sided(observed, np.concatenate(null)), pairs=size, draws=draws)


def _tracking(codes: npt.NDArray[np.int32], rows: Tracked) -> Array:
    """For each row of codes (attempts, in the order of their speedups): how much better the conditioned attempts'
    ranks go with the sources' than the solo attempts' do."""
    source, solo, conditioned = (
        twice_ranks(codes[:, places], codes.shape[1]) for places in (rows.source, rows.solo, rows.conditioned)
    )
    return _correlation(conditioned, source) - _correlation(solo, source)


def _chunks(draws: int) -> list[int]:
    """Sizes that keep the working arrays of a full study within the caches of a processor."""
    return [min(_CHUNK, draws - start) for start in range(0, draws, _CHUNK)]
