"""What went wrong on the target's side: what the records decide, what is left to ask, and which of several comes first.

The records decide whatever they can. An annotator is asked only about steps that come before the first one that the
records establish, and only where that step can apply at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from metakernelbench.annotation.labels import CauseLabel
from metakernelbench.annotation.rubric import NO_CAUSE, taxonomy
from metakernelbench.attempts.record import AttemptRecord
from metakernelbench.grading.codes import DEPENDENCE_CODES, RULE_CODES
from metakernelbench.grading.verdict import Comparison, Verdict

EDGE = 10.0
"""An error up to so many times the allowance, one order of magnitude, is a lost hair and not a wrong computation."""
_BY_RECORDS_ALONE = frozenset({"rule_violation", "tolerance_edge"})
"""Steps that nobody is asked about: verdicts state them."""


@dataclass(frozen=True)
class Fact:
    """A step that the records establish."""

    step: str
    evidence: str


def facts(record: AttemptRecord, max_submissions: int) -> tuple[Fact, ...]:
    """The steps that a treatment's record establishes, in the order of precedence."""
    order = taxonomy().steps
    return tuple(sorted(_facts(record, max_submissions), key=lambda fact: order.index(fact.step)))


def _facts(record: AttemptRecord, max_submissions: int) -> Iterator[Fact]:
    final = record.final
    counted = [submission for submission in record.submissions if submission.number is not None]
    failed = final is None or not final.passed
    if final is not None and (broken := _rules_broken(final)):
        yield Fact("rule_violation", f"the final kernel breaks the rule `{broken}`")
    if record.kernel is None:
        yield Fact("budget_or_artifact", "no kernel.py was there at the end")
    elif failed and (number := _passing_version(record)) is not None:
        yield Fact("budget_or_artifact", f"submission {number} passed, and another file was there at the end")
    elif failed and not counted and max_submissions > 0:
        yield Fact("budget_or_artifact", "nothing was ever submitted")
    if final is not None and (edge := _edge(final)) is not None:
        yield Fact("tolerance_edge", f"the largest error is {edge:.3g} times the allowance")
    if record.ended == "budget":
        yield Fact("search_truncation", "the clock ran out")
    elif max_submissions > 0 and len(counted) >= max_submissions:
        yield Fact("search_truncation", f"all {max_submissions} submissions were used")


def _rules_broken(final: Verdict) -> str | None:
    return next((f.code for f in final.findings if f.code in RULE_CODES or f.code in DEPENDENCE_CODES), None)


def _passing_version(record: AttemptRecord) -> int | None:
    """The last submission that passed, where the final kernel is another file."""
    passed = [s for s in record.submissions if s.verdict is not None and s.verdict.passed and s.number is not None]
    if not passed or any(submission.source == record.kernel for submission in passed):
        return None
    return passed[-1].number


def _edge(final: Verdict) -> float | None:
    """Error over allowance of the worst output, where the verdict was lost by less than an order of magnitude."""
    wrong = [comparison for comparison in final.comparisons if not comparison.passed]
    if final.code != "wrong-output" or not wrong:
        return None
    ratios = [_excess(comparison) for comparison in wrong]
    worst = max(ratio if ratio is not None else float("inf") for ratio in ratios)
    return worst if worst <= EDGE else None


def _excess(comparison: Comparison) -> float | None:
    """None for an integer output, of which every difference is wrong."""
    if comparison.error is None or not comparison.allowance:
        return None
    return comparison.error / comparison.allowance


def open_steps(record: AttemptRecord, established: tuple[Fact, ...]) -> tuple[str, ...]:
    """The steps that an annotator still has to be asked about; empty where the records decide."""
    order = taxonomy().steps
    first = order.index(established[0].step) if established else len(order)
    return tuple(step for step in order[:first] if step not in _BY_RECORDS_ALONE and _possible(step, record))


def _possible(step: str, record: AttemptRecord) -> bool:
    """A faulty execution needs a final kernel that fails and no passing version before it."""
    if step != "faulty_execution":
        return True
    failed = record.final is not None and not record.final.passed
    return record.kernel is not None and failed and _passing_version(record) is None


def cause_by(established: tuple[Fact, ...], claims: Mapping[str, str]) -> CauseLabel:
    """The cause, from what the records establish and what an annotator claims (step → evidence)."""
    from_records = {fact.step: fact.evidence for fact in reversed(established)}
    for step in taxonomy().steps:
        if step in from_records:
            cause = taxonomy().cause_of(step)
            return CauseLabel(cause=cause, step=step, decided_by="records", evidence=from_records[step])
        if step in claims:
            cause = taxonomy().cause_of(step)
            return CauseLabel(cause=cause, step=step, decided_by="annotator", evidence=claims[step])
    return CauseLabel(cause=NO_CAUSE, decided_by="annotator")
