"""The first screen of a report: what was compared, what came out, and what that can and cannot show, in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from metakernelbench.analysis import figures, outcome
from metakernelbench.analysis.caveats import caveats
from metakernelbench.analysis.outcome import ALL
from metakernelbench.analysis.resampling import MIN_PROBLEMS
from metakernelbench.analysis.tables import MISSING, number
from metakernelbench.report import names
from metakernelbench.report.comparison_view import heat_of_lift
from metakernelbench.report.lifts import Lift, Lifts, Scale, scale_of
from metakernelbench.report.names import Link
from metakernelbench.report.study import Study


@dataclass(frozen=True, kw_only=True)
class Card:
    """One headline number."""

    label: str
    value: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class LiftCell:
    """One group in a matrix of lifts."""

    link: Link
    heat: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class LiftMatrix:
    """Lifts by family (rows) and model, or by family and direction where there is one model."""

    heads: tuple[Link, ...]
    rows: tuple[tuple[Link, tuple[LiftCell, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class Overview:
    """The first screen."""

    rehearsal: str | None
    progress: str | None
    """How far the experiment has come, where it is not finished."""
    compared: str
    verdict: str
    """The answer in a few words."""
    outcome: str
    meaning: tuple[str, ...]
    """The same in plain words, a sentence each."""
    caveats: tuple[str, ...]
    cards: tuple[Card, ...]
    whole: Lift
    lifts: tuple[tuple[str, tuple[Lift, ...]], ...]
    """Groups of lifts, each with a title; the first is the whole."""
    scale: Scale
    matrix: LiftMatrix | None
    problems: tuple[tuple[str, tuple[Link, ...]], ...]
    """The problems of each family."""


def overview(study: Study, lifts: Lifts, *, left_out: str | None = None) -> Overview:
    """`left_out` says what the report has no room for."""
    reasons = study.rehearsal()
    whole = lifts.of("all comparisons")
    groups = _groups(study, lifts, whole)
    return Overview(
        rehearsal=", ".join(reasons) if reasons else None,
        progress=_progress(study),
        compared=_compared(study),
        verdict=_verdict(whole, planned=study.main.height > 0),
        outcome=_outcome(whole, rehearsal=bool(reasons)) if study.main.height else "Nothing has been planned.",
        meaning=tuple(_meaning(whole)),
        caveats=(*_caveats(study), *([left_out] if left_out else [])),
        cards=tuple(_cards(study, whole)),
        whole=whole,
        lifts=groups,
        scale=scale_of(one for _, group in groups for one in group),
        matrix=_matrix(study, lifts) if whole.n else None,
        problems=tuple(
            (name, tuple(Link(anchor=names.problem(p), text=p) for p in sorted(part["problem"].unique())))
            for name in figures.families_in_order(study.main)
            for part in [study.main.filter(pl.col("family") == name)]
        ),
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _progress(study: Study) -> str | None:
    planned, done = len(study.plan.attempts), len(study.records)
    if done >= planned and not study.running:
        return None
    running = f", {len(study.running)} running" if study.running else ""
    return f"{done:,} of {planned:,} attempts are finished{running}."


def _compared(study: Study) -> str:
    frame = study.attempts
    models = study.models
    by = models[0] if len(models) == 1 else f"each of {len(models)} models"
    dsls = sorted(frame["dsl"].unique())
    problems = frame["problem"].n_unique()
    return (
        f"{_count(problems, 'problem')} {'was' if problems == 1 else 'were'} attempted by {by} alone in "
        f"{' and '.join(dsls)}. Each attempt was asked to write down what it learned, as a skill. A fresh attempt at "
        "the same problem in another DSL then got that skill. A comparison sets the attempt that had the skill (the "
        "treatment) against the one that had not (the baseline)."
    )


def _verdict(whole: Lift, *, planned: bool) -> str:
    if not planned:
        return "Nothing to read yet"
    if whole.value is None:
        return "Nothing has been judged yet"
    if whole.low is None:
        return "Too few problems to say"
    return {"help": "Skills helped", "harm": "Skills harmed", "neutral": "No clear effect overall"}[whole.kind]


def _outcome(whole: Lift, *, rehearsal: bool) -> str:
    if whole.value is None:
        return "No comparison has been judged yet."
    over = f"{'In this rehearsal, over' if rehearsal else 'Over'} {_count(whole.n, 'comparison')}"
    said = f"{over}, the paired lift ΔGM is {whole.shown}"
    if whole.low is None:
        return (
            f"{said}. It describes these comparisons only: with {_count(whole.problems, 'problem')} there "
            f"is no interval (that takes {MIN_PROBLEMS} problems that differ)."
        )
    conclusion = {
        "help": ": on the whole, skills helped.",
        "harm": ": on the whole, skills harmed.",
        "neutral": ". The interval includes zero: these data do not show whether skills help or harm overall.",
    }[whole.kind]
    return f"{said} (95 % interval {whole.interval}){conclusion}"


def _meaning(whole: Lift) -> list[str]:
    """What the headline numbers say, for whoever has not read the definitions."""
    if whole.value is None:
        return []
    counts = {name: count for name, _, count in whole.shares}
    speed = f"{abs(100 * whole.value):.1f} % {'faster' if whole.value >= 0 else 'slower'}"
    found = [
        f"A typical kernel written with a skill at hand was {speed} than the one written without it; where only one of "
        "the two worked, that counts as four times.",
        f"Of {_count(whole.n, 'comparison')}, {counts['help']:,} got faster with the skill, {counts['harm']:,} slower, "
        f"and {counts['neutral']:,} stayed within the noise that we call none.",
    ]
    if whole.low is not None:
        found.append(
            f"Another set of {whole.problems} problems of this kind would give another number; "
            f"{whole.interval} is where it could well lie."
        )
    return found


def _caveats(study: Study) -> list[str]:
    found = [caveat.text for caveat in caveats(study.frames)]
    if study.faults:
        found.append(f"{_count(study.faults, 'fault')} of the infrastructure came up; none of them counts anywhere.")
    return found


def _cards(study: Study, whole: Lift) -> list[Card]:
    """How attempts did alone, in each DSL, and what became of the verdicts."""
    cards = []
    for dsl in sorted(study.attempts["dsl"].unique()):
        solo = study.attempts.filter((pl.col("arm") == "solo") & (pl.col("dsl") == dsl))
        row = outcome.solo(solo.with_columns(pl.lit(ALL).alias("model"))).frame.row(0, named=True)
        if not row["n"]:
            continue
        interval = _between(row["P_low"], row["P_high"])
        cards.append(
            Card(
                label=f"passed alone in {dsl}",
                value=number(row["P"], "share"),
                detail=f"{row['passed']:,} of {row['n']:,}{interval}; typical speedup {number(row['GM'], 'factor')}",
            )
        )
    if whole.n:
        changes = study.main["change"]
        rescued, broken = int((changes == "rescue").sum()), int((changes == "break").sum())
        cards.append(
            Card(label="rescued / broken", value=f"{rescued:,} / {broken:,}", detail="passed only with, only without")
        )
    return [card for card in cards if card.value != MISSING]


def _between(low: float | None, high: float | None) -> str:
    return "" if low is None else f", {number(low, 'share')} to {number(high, 'share')}"


def _groups(study: Study, lifts: Lifts, whole: Lift) -> tuple[tuple[str, tuple[Lift, ...]], ...]:
    """The rows of the picture of lifts."""
    if not whole.n:
        return ()
    found: list[tuple[str, Sequence[Lift]]] = [("all", [whole])]
    found.append(("by direction", lifts.each("direction", study.directions)))
    if len(study.models) > 1:
        found.append(
            ("by model", [lifts.of(m, names.scope(m, None), model=m) for m in study.models])
        )  # fmt: skip
    families = figures.families_in_order(study.main)
    found.append(("by family", [lifts.of(f, names.scope(None, f), family=f) for f in families]))
    if len(study.frames.contrasts) > 1:  # a lift beside its controls
        asked = study.comparisons.with_columns(pl.format("{}: {}", "design", "arm").alias("question"))
        names_of = [f"{design}: {arm}" for design, arm in study.frames.contrasts]
        found.append(("by question", Lifts(asked, study.band).each("question", names_of)))
    return tuple((title, tuple(one for one in group if one.n)) for title, group in found if any(o.n for o in group))


def _matrix(study: Study, lifts: Lifts) -> LiftMatrix:
    several = len(study.models) > 1
    columns = study.models if several else study.directions
    rows = []
    for family in figures.families_in_order(study.main):
        cells = []
        for column in columns:
            group = {"family": family, "model" if several else "direction": column}
            anchor = names.scope(column if several else study.models[0], family)
            one = lifts.of(f"{family}, {column}", anchor, **group)
            said = f"{one.label}: {one.shown}, {one.interval}, {_count(one.n, 'comparison')}"
            cells.append(LiftCell(link=Link(anchor=anchor, text=one.shown), heat=heat_of_lift(one.value), detail=said))
        rows.append((Link(anchor=names.scope(None, family), text=family), tuple(cells)))
    heads = tuple(Link(anchor=names.scope(c, None) if several else "comparisons", text=c) for c in columns)
    return LiftMatrix(heads=heads, rows=tuple(rows))
