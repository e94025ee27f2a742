"""The lift of every group that a page shows, and where its interval lies on a common scale."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log, log1p

import polars as pl

from metakernelbench.analysis.metrics import lift_metrics
from metakernelbench.analysis.outcome import judged
from metakernelbench.analysis.tables import estimates, number

_SCALES = (1.1, 1.25, 1.5, 2.0, 4.0)
"""Ratios at which the scale of a chart may end."""


@dataclass(frozen=True, kw_only=True)
class Lift:
    """ΔGM of a group of comparisons, and what share of them was helped and harmed."""

    label: str
    anchor: str | None
    """The page of the group."""
    n: int
    problems: int
    value: float | None = None
    low: float | None = None
    high: float | None = None
    help: float = 0.0
    neutral: float = 0.0
    harm: float = 0.0

    @property
    def shown(self) -> str:
        return number(self.value, "lift")

    @property
    def interval(self) -> str:
        if self.low is None or self.high is None:
            return "no interval"
        return f"{number(self.low, 'lift')} to {number(self.high, 'lift')}"

    @property
    def shares(self) -> tuple[tuple[str, float, int], ...]:
        """(outcome, share, comparisons)."""
        parts = (("help", self.help), ("neutral", self.neutral), ("harm", self.harm))
        return tuple((name, share, round(share * self.n)) for name, share in parts)

    @property
    def kind(self) -> str:
        """`help` or `harm` where the whole interval is on that side of zero, else `neutral`."""
        if self.low is not None and self.low > 0:
            return "help"
        return "harm" if self.high is not None and self.high < 0 else "neutral"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A logarithmic scale that is symmetric about zero lift, in percent of its width."""

    limit: float
    """The ratio at its right end."""

    def at(self, lift: float) -> float:
        share = log1p(max(lift, -0.999)) / log(self.limit)
        return round(50 + 50 * min(max(share, -1.0), 1.0), 2)

    @property
    def ticks(self) -> tuple[tuple[float, str], ...]:
        ratios = (1 / self.limit, exp(-log(self.limit) / 2), 1.0, exp(log(self.limit) / 2), self.limit)
        return tuple((self.at(r - 1), "0" if r == 1 else f"{100 * (r - 1):+.0f}".replace("-", "−")) for r in ratios)


def scale_of(lifts: Iterable[Lift]) -> Scale:
    """The smallest scale on which all intervals fit."""
    ends = [abs(log1p(end)) for one in lifts for end in (one.value, one.low, one.high) if end is not None and end > -1]
    most = max(ends, default=0.0)
    return Scale(limit=next((ratio for ratio in _SCALES if log(ratio) >= most), _SCALES[-1]))


class Lifts:
    """The lifts of one study's comparisons, computed when they are asked for and kept."""

    def __init__(self, comparisons: pl.DataFrame, band: float) -> None:
        self._rated = judged(comparisons)
        self._metrics = lift_metrics(band)
        self._found: dict[tuple[str, ...], dict[tuple[str, ...], dict[str, float]]] = {}

    def of(self, label: str, anchor: str | None = None, **group: str) -> Lift:
        """The lift of the comparisons in which every column of `group` has the given value."""
        by = tuple(sorted(group))
        if by not in self._found:
            frame = estimates(self._rated, "rho", self._metrics, list(by)) if self._rated.height else pl.DataFrame()
            self._found[by] = {tuple(row[name] for name in by): row for row in frame.iter_rows(named=True)}
        row = self._found[by].get(tuple(group[name] for name in by))
        return Lift(label=label, anchor=anchor, n=0, problems=0) if row is None else _lift(label, anchor, row)

    def each(self, column: str, values: Sequence[str], **group: str) -> list[Lift]:
        """One lift a value of `column`, for those that have comparisons."""
        found = [self.of(value, **{column: value}, **group) for value in values]
        return [one for one in found if one.n]


def _lift(label: str, anchor: str | None, row: dict[str, float]) -> Lift:
    return Lift(
        label=label,
        anchor=anchor,
        n=int(row["n"]),
        problems=int(row["problems"]),
        value=row["lift"],
        low=row["lift_low"],
        high=row["lift_high"],
        help=row["help"],
        neutral=row["neutral"],
        harm=row["harm"],
    )
