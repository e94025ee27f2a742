"""An attempt's submissions as a small picture: when each was sent, how fast it was, and the best so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import log

from markupsafe import Markup

from metakernelbench.analysis.tables import number
from metakernelbench.attempts.record import AttemptRecord

_WIDTH, _HEIGHT = 320.0, 120.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 34.0, 312.0, 10.0, 84.0
_FAILED_Y = 98.0
_AXIS_Y = 116.0


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Common to the attempts of a cell, so that their pictures can be laid side by side."""

    seconds: float
    """Where the time axis ends."""
    low: float
    high: float
    """The speedups at the bottom and the top, low < high; the scale is logarithmic."""

    def x(self, seconds: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * min(max(seconds / self.seconds, 0.0), 1.0)

    def y(self, speedup: float) -> float:
        share = log(speedup / self.low) / log(self.high / self.low)
        return _BOTTOM - (_BOTTOM - _TOP) * min(max(share, 0.0), 1.0)


def axes_of(records: Iterable[AttemptRecord]) -> Axes:
    """Axes on which all the attempts' submissions have room; 1× and 2× are always on them."""
    seconds, speedups = [60.0], [1.0, 2.0]
    for record in records:
        seconds += [s.requested_at_s for s in record.submissions] + [record.seconds.get("agent", 0.0)]
        judged = [s.verdict for s in record.submissions] + [record.final]
        speedups += [verdict.speedup for verdict in judged if verdict and verdict.speedup]
    return Axes(seconds=max(seconds), low=min(speedups) / 1.2, high=max(speedups) * 1.2)


def drawn(record: AttemptRecord, axes: Axes) -> Markup | None:
    """The picture as SVG; None where nothing was submitted and nothing graded."""
    if not record.submissions and record.final is None:
        return None
    marks, path, best = [], [], 0.0
    for submission in record.submissions:
        x, speedup = axes.x(submission.requested_at_s), submission.verdict.speedup if submission.verdict else None
        if speedup is None:
            marks.append(_cross(x))
            continue
        if speedup > best:
            path += [f"L{x:.1f} {axes.y(best):.1f}" if best else f"M{x:.1f} {axes.y(speedup):.1f}"]
            path += [f"L{x:.1f} {axes.y(speedup):.1f}"] if best else []
            best = speedup
        marks.append(f'<circle class="pass" cx="{x:.1f}" cy="{axes.y(speedup):.1f}" r="4"/>')
    last = max((submission.requested_at_s for submission in record.submissions), default=0.0)
    end = axes.x(max(last, record.seconds.get("agent", axes.seconds)))
    if best:
        path.append(f"L{end:.1f} {axes.y(best):.1f}")
    marks.append(_final(record, axes, end))
    line = f'<path class="best-so-far" d="{"".join(path)}"/>' if path else ""
    said = _said(record, best)
    return Markup(
        f'<svg class="clockwork" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="{said}">'
        f"{_grid(axes)}{line}{''.join(marks)}</svg>"
    )


def _cross(x: float) -> str:
    return f'<path class="fail" d="M{x - 3.5:.1f} {_FAILED_Y - 3.5}l7 7m0 -7l-7 7"/>'


def _final(record: AttemptRecord, axes: Axes, x: float) -> str:
    """The final verdict: a diamond at its speedup, or a cross in a ring."""
    if record.final is None:
        return ""
    if record.final.speedup is None:
        return f'{_cross(x - 1)}<circle class="ring" cx="{x - 1:.1f}" cy="{_FAILED_Y:g}" r="7"/>'
    return f'<path class="final" d="M{x:.1f} {axes.y(record.final.speedup) - 6:.1f}l6 6l-6 6l-6 -6z"/>'


def _grid(axes: Axes) -> str:
    """Lines at 1× and 2×, the label of the lane of failures, and the ends of the time axis."""
    lines = "".join(
        f'<path class="grid" d="M{_LEFT} {axes.y(at):.1f}H{_RIGHT}"/>'
        f'<text x="{_LEFT - 5}" y="{axes.y(at) + 3.5:.1f}" text-anchor="end">{at}×</text>'
        for at in _apart(axes)
    )
    return (
        f'{lines}<text x="{_LEFT - 5}" y="{_FAILED_Y + 3.5}" text-anchor="end">fail</text>'
        f'<path class="grid" d="M{_LEFT} {_AXIS_Y - 10}H{_RIGHT}"/><text x="{_LEFT}" y="{_AXIS_Y}">0</text>'
        f'<text x="{_RIGHT}" y="{_AXIS_Y}" text-anchor="end">{_time(axes.seconds)}</text>'
    )


def _apart(axes: Axes) -> tuple[int, ...]:
    """1× and 2×, or only 1× where the two would be on top of each other."""
    return (1, 2) if axes.y(1) - axes.y(2) >= 11 else (1,)


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


def _said(record: AttemptRecord, best: float) -> str:
    count = len(record.submissions)
    fastest = f", the fastest {number(best, 'factor')}" if best else ""
    final = record.final
    end = "no final kernel" if final is None else f"in the end {_outcome(final.speedup)}"
    return f"{count} submission{'' if count == 1 else 's'}{fastest}; {end}"


def _outcome(speedup: float | None) -> str:
    return "failed" if speedup is None else f"passed at {number(speedup, 'factor')}"
