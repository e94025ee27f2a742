"""What the templates show of one attempt: values made ready, nothing left to decide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from markupsafe import Markup

from metakernelbench.analysis.tables import MISSING, number
from metakernelbench.attempts.record import AttemptRecord, Submission
from metakernelbench.experiments.designs import PlannedAttempt
from metakernelbench.grading.verdict import Verdict
from metakernelbench.report import names, texts
from metakernelbench.report.names import Link
from metakernelbench.report.packing import Detail
from metakernelbench.report.study import Study
from metakernelbench.report.timeline import Axes, drawn
from metakernelbench.report.trajectory import Turn, turns
from metakernelbench.text import harmless

type Facts = tuple[tuple[str, str], ...]

_ENDINGS = {
    "completed": "the agent said that it was done",
    "budget": "the clock ran out",
    "agent_exit": "the agent left the terminal",
    "agent_error": "the agent failed for a reason of its own",
    "skipped": "not run: the source kept no skill",
}


@dataclass(frozen=True, kw_only=True)
class Badge:
    """How something stands: a word, and the kind that gives it its colour and sign."""

    kind: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Step:
    """One submission on the time line."""

    number: str
    at: str
    badge: Badge
    best: bool
    """Whether it was the fastest passing one so far."""
    answer: Markup
    source: Markup | None


@dataclass(frozen=True, kw_only=True)
class Ruling:
    """A verdict in full."""

    badge: Badge
    findings: tuple[tuple[str, str, int | None], ...]
    facts: Facts
    outputs: tuple[tuple[str, ...], ...]
    printed: Markup | None


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """An instruction as sent: what all attempts at the variant were told, and then what only this one was."""

    variant: str | None
    """The page that has the common part; None where there is none."""
    rest: tuple[Markup | Link, ...]
    """Texts, and in their midst the source whose skill stands there word for word."""


@dataclass(frozen=True, kw_only=True)
class AttemptView:
    """One attempt's page. Of an attempt without a record, only what was planned is there."""

    anchor: str
    key: str
    title: str
    problem: Link
    badge: Badge
    running: str | None
    """What a running attempt is doing."""
    source: Link | None
    facts: Facts = ()
    instruction: Instruction | None = None
    picture: Markup | None = None
    steps: tuple[Step, ...] = ()
    kernel: Markup | None = None
    skill: Markup | None = None
    ruling: Ruling | None = None
    turns: tuple[Turn, ...] = ()


def verdict_badge(verdict: Verdict | None, *, ended: str | None = None) -> Badge:
    """The badge of a verdict: passed with its speedup, or the code of the first finding."""
    if ended == "skipped":
        return Badge(kind="skipped", text="skipped")
    if verdict is None:
        return Badge(kind="failed", text="failed: no kernel")
    if verdict.passed:
        return Badge(kind="passed", text=f"passed {number(verdict.speedup, 'factor')}")
    return Badge(kind="failed", text=f"failed: {harmless(verdict.code or '')}")


def state_badge(state: str, speedup: float | None) -> Badge:
    """The badge of an attempt's state in a comparison."""
    return Badge(kind=state, text=f"passed {number(speedup, 'factor')}" if state == "passed" else state)


def attempt_view(
    planned: PlannedAttempt, study: Study, axes: Axes, detail: Detail, base: str | None = None
) -> AttemptView:
    """The page of one attempt, at the detail that the report has room for.

    `base` is the text that the instructions of its variant have in common; the page of the variant has it.
    """
    view = _planned_view(planned, study)
    record, running = study.records.get(planned.key), study.running.get(planned.key)
    if record is None:
        so_far = turns(running.trajectory, detail.turn) if running and detail.turn else ()
        return replace(view, turns=so_far)
    return replace(
        view,
        badge=verdict_badge(record.final, ended=record.ended),
        facts=_facts(record),
        instruction=_instruction(planned, study, base),
        picture=drawn(record, axes),
        steps=_steps(record.submissions, sources=detail.submissions),
        kernel=texts.python(record.kernel) if record.kernel is not None else None,
        skill=texts.markdown(record.skill) if record.skill is not None else None,
        ruling=_ruling(record.final) if record.final else None,
        turns=turns(record.trajectory, detail.turn) if detail.turn else (),
    )


def _planned_view(planned: PlannedAttempt, study: Study) -> AttemptView:
    source = study.planned.get(planned.source) if planned.source else None
    running = study.running.get(planned.key)
    return AttemptView(
        anchor=names.attempt(planned),
        key=planned.key,
        title=f"{planned.problem} in {planned.dsl}, {given(planned, source)}",
        problem=Link(anchor=names.problem(planned.problem), text=planned.problem),
        badge=_waiting(planned, study),
        running=running.sentence if running else None,
        source=Link(anchor=names.attempt(source), text=source.key) if source else None,
    )


def given(planned: PlannedAttempt, source: PlannedAttempt | None) -> str:
    """What an attempt was given: `alone`, `with the skill from cute`, `with the implementation of p03 from cute`."""
    if source is None:
        return "alone" if planned.label == "solo" else f"alone ({planned.label})"
    of = [source.dsl, *([source.model] if source.model != planned.model else [])]
    about = f" of {source.problem}" if source.problem != planned.problem else ""
    without = f", without its {planned.without}" if planned.without else ""
    return f"with the {planned.material}{about} from {', '.join(of)}{without}"


def _waiting(planned: PlannedAttempt, study: Study) -> Badge:
    if planned.key in study.running:
        return Badge(kind="running", text="running")
    return Badge(kind="unjudged", text="not finished")


def _instruction(planned: PlannedAttempt, study: Study, base: str | None) -> Instruction | None:
    text = study.records[planned.key].instruction
    if not text:
        return None
    common = base if base and text.startswith(base) else ""
    return Instruction(
        variant=names.variant(planned.problem, planned.dsl) if common else None,
        rest=tuple(_without_the_skill(text.removeprefix(common), planned, study)),
    )


def _without_the_skill(text: str, planned: PlannedAttempt, study: Study) -> Iterator[Markup | Link]:
    """A text, with a link to the source in place of its skill: a report shows no text twice."""
    source = study.planned.get(planned.source or "")
    record = study.records.get(planned.source or "")
    if source and record and record.skill and record.skill.strip() in text:
        before, after = text.split(record.skill.strip(), 1)
        yield from (texts.plain(before), Link(anchor=names.attempt(source), text=source.key), texts.plain(after))
    elif text:
        yield texts.plain(text)


def _facts(record: AttemptRecord) -> Facts:
    usage = record.usage
    facts: list[tuple[str, str | None]] = [
        ("ended", _ENDINGS[record.ended]),
        ("turns", f"{usage.turns:,}" if usage.turns else None),
        ("tokens", _tokens(record)),
        ("cost", f"${usage.cost_usd:.2f}" if usage.cost_usd is not None else None),
        ("wall clock", ", ".join(f"{name} {seconds:,.1f} s" for name, seconds in record.seconds.items()) or None),
        ("tries", str(record.tries) if record.tries > 1 else None),
        ("started", record.started_at),
    ]
    return tuple((name, harmless(value)) for name, value in facts if value)


def _tokens(record: AttemptRecord) -> str | None:
    usage = record.usage
    parts = {"in": usage.input_tokens, "cached": usage.cached_tokens, "out": usage.output_tokens}
    return ", ".join(f"{count:,} {name}" for name, count in parts.items() if count is not None) or None


def _steps(submissions: tuple[Submission, ...], *, sources: bool) -> tuple[Step, ...]:
    steps, best = [], 0.0
    for submission in submissions:
        speedup = (submission.verdict.speedup if submission.verdict else None) or 0.0
        counted = f"submission {submission.number}" if submission.number is not None else "not counted"
        badge = verdict_badge(submission.verdict) if submission.verdict else Badge(kind="skipped", text="not graded")
        steps.append(
            Step(
                number=counted,
                at=_clock(submission),
                badge=badge,
                best=speedup > best,
                answer=texts.plain(submission.answer),
                source=texts.python(submission.source) if sources and submission.source is not None else None,
            )
        )
        best = max(best, speedup)
    return tuple(steps)


def _clock(submission: Submission) -> str:
    asked = f"{int(submission.requested_at_s) // 60}:{int(submission.requested_at_s) % 60:02d}"
    if submission.answered_at_s is None:
        return f"{asked}, the attempt ended before an answer"
    return f"{asked}, answered after {submission.answered_at_s - submission.requested_at_s:.1f} s"


def _ruling(verdict: Verdict) -> Ruling:
    return Ruling(
        badge=verdict_badge(verdict),
        findings=tuple((harmless(f.code), harmless(f.message), f.line) for f in verdict.findings),
        facts=tuple((name, harmless(value)) for name, value in _ruling_facts(verdict) if value),
        outputs=tuple(
            (
                harmless(c.output),
                number(c.error, "number"),
                number(c.allowance, "number"),
                f"{c.mismatches:,} of {c.elements:,}",
                "yes" if c.passed else "no",
            )
            for c in verdict.comparisons
        ),
        printed=texts.plain(verdict.submission_output) if verdict.submission_output else None,
    )


def _ruling_facts(verdict: Verdict) -> list[tuple[str, str | None]]:
    timing = verdict.timing
    facts: list[tuple[str, str | None]] = [("ended at", verdict.ended_at), ("graded on", _where(verdict))]
    if timing:
        low, high = timing.speedup_interval or (None, None)
        interval = "" if low is None else f" (95 % interval {number(low, 'factor')} to {number(high, 'factor')})"
        facts += [
            ("speedup over eager", f"{number(timing.speedup, 'factor')}{interval}"),
            ("implementation", f"{milliseconds(timing.implementation_median_ms)}, median"),
            ("eager", f"{milliseconds(timing.eager_median_ms)}, median"),
        ]
        if timing.vectorized_median_ms is not None:
            facts.append(("vectorized eager", f"{milliseconds(timing.vectorized_median_ms)}, median"))
        if timing.roofline_fraction is not None:
            facts.append(("of the roofline bound", number(timing.roofline_fraction, "share")))
    facts += [
        ("isolation", "; ".join((verdict.isolation.method, *verdict.isolation.notes))),
        ("versions", ", ".join(f"{name} {version}" for name, version in verdict.versions.items())),
        ("wall clock", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in verdict.seconds.items())),
        ("kernel SHA-256", verdict.source_sha256),
    ]
    return facts


def milliseconds(value: float | None) -> str:
    """A time as people read it; a dash where there is none."""
    return MISSING if value is None else f"{number(value, 'number')} ms"


def _where(verdict: Verdict) -> str:
    return f"{verdict.device}, {verdict.workload} workload, contract {verdict.contract_version}"
