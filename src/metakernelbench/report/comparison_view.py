"""What the templates show of one comparison: the three attempts, ρ and where it comes from, and a sentence about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np

from metakernelbench.analysis.comparisons import MEASURED
from metakernelbench.analysis.metrics import RATIO_LIMIT, paired_ratio
from metakernelbench.analysis.tables import MISSING, number
from metakernelbench.report import names
from metakernelbench.report.attempt_view import Badge, milliseconds, state_badge
from metakernelbench.report.names import Link
from metakernelbench.report.notes_view import Notes, notes
from metakernelbench.report.study import Study

ROLES = ("source", "baseline", "treatment")
type Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Role:
    """One of the three attempts of a comparison."""

    name: str
    explained: str
    link: Link
    badge: Badge
    time: str
    used: str
    """Submissions, turns, minutes and cost on one line."""


@dataclass(frozen=True, kw_only=True)
class ComparisonView:
    """One comparison's page."""

    anchor: str
    title: str
    above: tuple[Link, ...]
    """The pages that it is part of, widest first."""
    rho: str
    outcome: Badge
    sentence: str
    notes: tuple[str, ...]
    annotations: Notes | None
    roles: tuple[Role, ...]
    before: Link | None
    after: Link | None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A comparison in a table: a link, ρ in a few signs, and a class for its colour."""

    link: Link
    heat: str
    said: str
    """For whoever does not see the colour."""


def outcome_badge(row: Row) -> Badge:
    name = row["outcome"] or ("running" if row.get("running") else "unjudged")
    return Badge(kind=name, text=name)


def cell(row: Row) -> Cell:
    """A comparison in a matrix."""
    rho = row["rho"]
    return Cell(
        link=Link(anchor=names.comparison(row), text=_short(row)),
        heat=heat(rho, row["outcome"]),
        said=f"{row['problem']}, {row['model']}, {row['direction']}: {row['outcome'] or 'unjudged'}, {row['change']}",
    )


_SIGNS = {"rescue": "▲", "break": "▼", "both fail": "✚", "skipped": "∅", "unjudged": "…"}


def _short(row: Row) -> str:
    sign = _SIGNS.get(row["change"])
    return sign if sign else f"{row['rho']:.2f}"


def heat(rho: float | None, outcome: str | None) -> str:
    """A class from `h-3` (harmed most) over `h0` to `h3` (helped most); `none` where there is no ratio."""
    if rho is None:
        return "none"
    if outcome == "neutral":
        return "h0"
    size = 1 + sum(abs(log(rho)) > log(step) for step in (1.3, 2.0))
    return f"h{size if rho > 1 else -size}"


def heat_of_lift(lift: float | None) -> str:
    """The same for a lift: its classes change at 2 %, 10 % and 25 %."""
    if lift is None:
        return "none"
    size = sum(abs(log(max(1 + lift, 0.01))) > log(step) for step in (1.02, 1.1, 1.25))
    return f"h{size if lift > 0 else -size}"


def comparison_view(row: Row, study: Study, before: Row | None, after: Row | None) -> ComparisonView:
    """The page of one comparison, between the ones that come before and after it in the table of all."""
    return ComparisonView(
        anchor=names.comparison(row),
        title=f"{row['problem']}, {row['direction']}",
        above=_above(row),
        rho=number(row["rho"], "number"),
        outcome=outcome_badge(row),
        sentence=sentence(row, study.band, _what(row, study)),
        notes=tuple(_notes(row, study)),
        annotations=notes(row["source"], row["treatment"], study.annotations) if _what(row, study) == "skill" else None,
        roles=tuple(_role(name, row, study) for name in ROLES if row[name] is not None),
        before=None if before is None else Link(anchor=names.comparison(before), text=_name(before)),
        after=None if after is None else Link(anchor=names.comparison(after), text=_name(after)),
    )


def _name(row: Row) -> str:
    return f"{row['problem']} {row['direction']} {row['model']}"


def _above(row: Row) -> tuple[Link, ...]:
    model, family, problem = row["model"], row["family"], row["problem"]
    return (
        Link(anchor=names.scope(model, None), text=model),
        Link(anchor=names.scope(model, family), text=family),
        Link(anchor=names.problem(problem), text=problem),
    )


def _role(name: str, row: Row, study: Study) -> Role:
    planned = study.planned[row[name]]
    state, speedup = row[f"{name}_state"], row[f"{name}_speedup"]
    running = study.running.get(planned.key)
    badge = Badge(kind="running", text=running.sentence) if running else state_badge(state, speedup)
    return Role(
        name=name,
        explained=_explained(name, row, study),
        link=Link(anchor=names.attempt(planned), text=f"{planned.dsl}, {planned.label}"),
        badge=badge,
        time=MISSING if state != "passed" else milliseconds(row[f"{name}_ms"]),
        used=_used(planned.key, study),
    )


def _used(key: str, study: Study) -> str:
    record = study.records.get(key)
    if record is None or record.ended == "skipped":
        return ""
    counted = sum(submission.number is not None for submission in record.submissions)
    seconds, cost = record.seconds.get("agent"), record.usage.cost_usd
    parts = [
        f"{counted} submission{'' if counted == 1 else 's'}",
        f"{record.usage.turns} turns" if record.usage.turns else None,
        f"{seconds / 60:.0f} min" if seconds and seconds >= 120 else f"{seconds:.0f} s" if seconds else None,
        f"${cost:.2f}" if cost is not None else None,
    ]
    return " · ".join(part for part in parts if part)


def _explained(name: str, row: Row, study: Study) -> str:
    """What an attempt is in this comparison, after its role."""
    if row["source"] is None:
        return {"baseline": "came first", "treatment": "was given nothing either"}[name]
    what = _what(row, study)
    return {"source": f"left the {what}", "baseline": "was not given it", "treatment": "was given it"}[name]


def _what(row: Row, study: Study) -> str | None:
    """What the treatment was given: `skill`, `implementation` or `trajectory`; None for nothing."""
    return None if row["source"] is None else study.planned[row["treatment"]].material


def sentence(row: Row, band: float, what: str | None) -> str:
    """What came out of one comparison, in words. `what` was handed over, None for nothing."""
    limit = f"{RATIO_LIMIT:g}"
    without, having = ("at first", "the second time") if what is None else (f"without the {what}", f"with the {what}")
    match row["change"]:
        case "unjudged":
            return "Not both attempts have a verdict yet, so this comparison counts nowhere."
        case "skipped":
            return f"The source kept no {what}, so there was nothing to hand over: the ratio is 1 by definition."
        case "rescue":
            return f"{_upper(without)} no kernel passed, {having} one did. A rescue counts as {limit}."
        case "break":
            return f"{_upper(without)} a kernel passed, {having} none did. A break counts as 1/{limit}."
        case "both fail":
            return f"No kernel passed, {without} or {having}: the ratio is 1 by definition."
    kept = "" if 1 / RATIO_LIMIT < row["rho"] < RATIO_LIMIT else f" (kept between 1/{limit} and {limit})"
    verdict = {
        "help": f"faster {having}",
        "harm": f"slower {having}",
        "neutral": f"no difference beyond the band of {100 * band:g} %",
    }[row["outcome"]]
    return (
        f"The kernel took {milliseconds(row['baseline_ms'])} {without} and {milliseconds(row['treatment_ms'])} "
        f"{having}: ρ = {number(row['rho'], 'number')}{kept}, {verdict}."
    )


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _notes(row: Row, study: Study) -> list[str]:
    found = [_measured(row), _without_rules(row, study)]
    if study.replicates == 1:
        found.append("One attempt each: what differs is what was given and chance together.")
    return [note for note in found if note]


def _measured(row: Row) -> str | None:
    """Where ρ is from, and what it would be from the other source."""
    if row["rho_from"] != MEASURED:
        return "ρ is from the medians of two gradings." if row["change"] == "both pass" else None
    low, high = row["measured_low"], row["measured_high"]
    interval = "" if low is None else f" (95 % interval {number(low, 'number')} to {number(high, 'number')})"
    medians = number(row["rho_medians"], "number")
    return f"ρ is from timing both kernels in one session{interval}; the medians of their two gradings give {medians}."


def _without_rules(row: Row, study: Study) -> str | None:
    """What ρ would be if violations of rules were passes, where a rule alone kept a right and timed kernel out."""
    times, said = [], []
    for name in ("baseline", "treatment"):
        codes, timed = study.violations.get(row[name], (None, None))
        if codes and timed is not None:
            said.append(f"the {name}'s kernel was right and took {milliseconds(timed)}, but broke a rule ({codes})")
        ms = timed if codes else row[f"{name}_ms"]
        times.append(np.array([np.nan if ms is None else ms]))
    if not said or row["change"] in ("unjudged", "skipped"):
        return None
    ratio = float(paired_ratio(times[0], times[1], np.array([False]))[0])
    return f"{_upper(' and '.join(said))}. With such violations counted as passes ρ would be {number(ratio, 'number')}."
