"""What the measured times amount to: medians, the speedup with its interval, and whether a worker's clock can be
believed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import numpy as np

from metakernelbench.grading.contract import Contract
from metakernelbench.grading.head_to_head import Pair
from metakernelbench.grading.verdict import ClockCheck, Timing

_RESAMPLES = 2000
_SEED = 20_240_229
_Z = 1.96
"""The normal quantile of a two-sided 95 % interval."""
_LOW = {"cpu": 0.2, "cuda": 0.1}
"""The quantile of windows that is compared. On a GPU windows have a hard lower edge: of all quantiles of the draws on
record (`records/h200/noise.jsonl`), this one scatters least from grading to grading, by 0.017 ms."""
_NOISE = {"cpu": (2.0, 0.2, 0.5), "cuda": (1.0, 0.05, 0.25)}
"""What noise may add to a difference of two such quantiles: so many times the distance between these quantiles of the
control's windows. On a GPU it is about twice the difference's standard error, by the density of the windows there."""
_MOST_NOISE = {"cpu": 3.0, "cuda": 1.0}
"""How many times the tolerance noise may add to it before it is no use to compare clocks."""
_MOST_HANDICAP = {"cpu": 10.0, "cuda": 5.0}
"""The same for the handicap of a worker: what is more was measured in a noise of its own, and counts as that."""
_OVERLOADED = 0.25
"""The reference, run by the verifier itself, waits for so much of its time where more wants to run than the machine
has processors for. Measured on two cores with six processes on them: 40 to 70 %; alone on them: none."""
_MOST_BACKGROUND = 0.2
_LEAST_BACKGROUND_S = 0.005
"""Fifty times what an honest worker runs without a call in a dozen of them, and less than half of what is open then."""


def speedup_interval(eager_ms: Sequence[float], implementation_ms: Sequence[float]) -> tuple[float, float]:
    """95 % percentile interval of the ratio of medians, by bootstrap over the timed draws.

    A draw is resampled as a pair (eager, implementation), since the two were timed one after the other on the same
    inputs: what slowed both down cancels. 2000 resamples from a fixed seed, so that a verdict can be computed again.
    """
    eager, own = np.asarray(eager_ms), np.asarray(implementation_ms)
    picks = np.random.default_rng(_SEED).integers(0, len(own), size=(_RESAMPLES, len(own)))
    ratios = np.median(eager[picks], axis=1) / np.median(own[picks], axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)


def paired_ratio(first_ms: Sequence[float], second_ms: Sequence[float]) -> tuple[float, float, float]:
    """Runtime of the first over runtime of the second, with its 95 % interval: (ratio, low, high).

    The two were timed on the same draws, one right after the other. The estimate is Hodges and Lehmann's: the median of
    the means of every two of the draws' log ratios. Taking logarithms draw by draw cancels what slowed down both, and
    makes the ratio seen from the other side exactly the inverse; averaging by twos keeps the estimate steady where
    times fall into two heaps (who ran first, which buffer), between which a plain median would jump. The interval is
    the one that belongs to it, from Wilcoxon's signed-rank test: order statistics of the same means, no resampling.
    """
    logs = np.log(np.asarray(first_ms)) - np.log(np.asarray(second_ms))
    n = len(logs)
    i, j = np.triu_indices(n)
    means = np.sort((logs[i] + logs[j]) / 2)
    rank = n * (n + 1) / 4 - _Z * np.sqrt(n * (n + 1) * (2 * n + 1) / 24)
    outer = min(max(int(rank), 0), len(means) - 1)
    low, high = means[outer], means[len(means) - 1 - outer]
    return float(np.exp(np.median(means))), float(np.exp(low)), float(np.exp(high))


def pairs(timings: Sequence[Timing | None]) -> Iterator[Pair]:
    """Every two of these timings of one session, where both are there."""
    for (i, first), (j, second) in combinations(enumerate(timings), 2):
        if first is not None and second is not None:
            ratio, low, high = paired_ratio(first.implementation_ms, second.implementation_ms)
            yield Pair(first=i, second=j, ratio=ratio, low=low, high=high)


@dataclass(frozen=True)
class Clocks:
    """One timed draw on three clocks, in milliseconds."""

    claimed_ms: float
    """The worker's own."""
    window_ms: float
    """The verifier's, around the worker's call."""
    carrying_ms: float
    """The verifier's around the control's call of the same draw, less what the control claims: the cost of carrying."""


def low(values: Sequence[float], device: str) -> float:
    """What a window takes when nothing disturbs it, by a low quantile. Whoever hides time hides it there too."""
    return float(np.quantile(np.asarray(values), _LOW[device]))


@dataclass(frozen=True)
class Agreement:
    """Whether a worker's clock fits the verifier's."""

    hidden_ms: float
    """What the worker's windows hold beyond its claims and the cost of carrying, over the faster half of the claims,
    which is the half that makes the median."""
    allowed_ms: float
    noise_ms: float
    """What noise adds to the allowance."""
    most_noise_ms: float
    waited: float
    """The share of its time for which the reference waited for a processor, in the middle of the draws."""

    @property
    def believable(self) -> bool:
        return self.hidden_ms <= self.allowed_ms + min(self.noise_ms, self.most_noise_ms)

    def told(self) -> ClockCheck:
        """The same for the verdict."""
        hidden, allowed, noise = (round(x, 4) for x in (self.hidden_ms, self.allowed_ms, self.noise_ms))
        return ClockCheck(hidden_ms=hidden, allowed_ms=allowed, noise_ms=noise, waited=round(self.waited, 4))

    @property
    def undecided(self) -> bool:
        """Whether only the noise of the machine keeps the clocks from disagreeing, or it is so busy that whoever works
        more than the control is woken later as well."""
        within_noise = self.hidden_ms <= self.allowed_ms + self.noise_ms
        return not self.believable and (within_noise or self.waited > _OVERLOADED)


def agreement(
    clocks: Sequence[Clocks], handicap_ms: float, waited: Sequence[float], device: str, contract: Contract
) -> Agreement:
    """Compare the clocks.

    `handicap_ms` is how much more carrying cost this very worker than the control before it imported the submission.
    Allowed is the contract's share of the claim or its floor, whichever is larger, and the noise of this machine as the
    control meets it. On a machine so noisy that a large lie could hide in that, the answer is left open: nobody is
    believed for noise.
    `waited` is, for every draw, the share of its time for which the reference waited for a processor.
    """
    middle = median(c.claimed_ms for c in clocks)
    windows = [c.window_ms - c.claimed_ms for c in clocks if c.claimed_ms <= middle]
    carrying = [c.carrying_ms for c in clocks]
    floor = contract.clock_floor_cpu_ms if device == "cpu" else contract.clock_floor_ms
    tolerance = max(contract.clock_tolerance * middle, floor)
    handicap = min(handicap_ms, _MOST_HANDICAP[device] * tolerance)
    factor, lower, upper = _NOISE[device]
    scatter = float(np.quantile(carrying, upper) - np.quantile(carrying, lower))
    noise = factor * scatter + handicap_ms - handicap
    return Agreement(
        hidden_ms=low(windows, device) - low(carrying, device) - handicap,
        allowed_ms=tolerance,
        noise_ms=noise,
        most_noise_ms=_MOST_NOISE[device] * tolerance,
        waited=median(waited),
    )


@dataclass
class Idleness:
    """How much a worker's processes run while no call of it is open, which slows down whatever else is timed then."""

    open_s: float = 0.0
    run_s: float = 0.0
    _since: tuple[float, float] | None = None

    def begins(self, now_s: float, run_s: float) -> None:
        """A call has ended, at a time when the processes had run for `run_s` in all."""
        self._since = now_s, run_s

    def ends(self, now_s: float, run_s: float) -> None:
        """A call is about to begin."""
        if self._since is not None:
            self.open_s += now_s - self._since[0]
            self.run_s += max(0.0, run_s - self._since[1])
            self._since = None

    @property
    def excessive(self) -> bool:
        """Whether that is more than what freeing the last call's tensors takes."""
        return self.run_s > max(_MOST_BACKGROUND * self.open_s, _LEAST_BACKGROUND_S)
