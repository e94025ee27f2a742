"""What the records decide, what is asked, and which cause comes first."""

from __future__ import annotations

from typing import Any

import pytest

from metakernelbench.annotation.answers import Malformed, cause_label_of
from metakernelbench.annotation.causes import EDGE, Fact, cause_by, facts, open_steps
from metakernelbench.annotation.labels import CauseLabel
from metakernelbench.annotation.questions import Asked, about_cause
from metakernelbench.annotation.rubric import taxonomy
from metakernelbench.grading.codes import DEPENDENCE_CODES, RULE_CODES
from tests.annotation.support import NOTE, attempt, step, submission, verdict

BETWEEN = ("faulty_execution", "budget_or_artifact", "toolchain_friction", "unverified_adoption")


def steps_of(established: tuple[Fact, ...]) -> list[str]:
    return [fact.step for fact in established]


@pytest.mark.parametrize("code", sorted({*RULE_CODES, *DEPENDENCE_CODES}))
def test_a_broken_rule_is_the_cause_whatever_else_happened(code: str) -> None:
    record = attempt(final=verdict(code=code), ended="budget")
    label = about_cause(record, NOTE, 10)
    assert isinstance(label, CauseLabel)
    assert (label.cause, label.step, label.decided_by) == ("rule_or_precision", "rule_violation", "records")
    assert code in (label.evidence or "")


def test_a_missing_kernel_is_decided_by_the_record() -> None:
    label = about_cause(attempt(kernel=None, final=None, ended="budget"), NOTE, 10)
    assert isinstance(label, CauseLabel)
    assert (label.cause, label.evidence) == ("budget_or_artifact", "no kernel.py was there at the end")


def test_a_passing_version_that_was_not_left_in_place_is_decided_by_the_record() -> None:
    passed = submission(2, verdict(passed=True), source="the good one")
    label = about_cause(attempt(submissions=(submission(1, verdict()), passed)), NOTE, 10)
    assert isinstance(label, CauseLabel)
    assert label.evidence == "submission 2 passed, and another file was there at the end"


def test_a_kernel_that_passed_once_and_then_failed_is_no_mismanagement() -> None:
    record = attempt(submissions=(submission(1, verdict(passed=True), source="def solve(x): ..."),))
    assert steps_of(facts(record, 10)) == []


@pytest.mark.parametrize(("error", "edge"), [(1.01, True), (EDGE, True), (10.1, False), (3e8, False)])
def test_an_error_within_an_order_of_the_allowance_is_the_edge(error: float, edge: bool) -> None:
    found = steps_of(facts(attempt(final=verdict(error=error)), 10))
    assert found == (["tolerance_edge"] if edge else [])


def test_an_integer_output_has_no_edge() -> None:
    comparison: dict[str, Any] = {"comparisons": (verdict(error=2.0).comparisons[0],)}
    exact = comparison["comparisons"][0].__class__(
        output="ids", error=None, allowance=None, mismatches=1, elements=8, passed=False
    )
    assert facts(attempt(final=verdict(comparisons=(*comparison["comparisons"], exact))), 10) == ()


def test_at_the_edge_whatever_comes_before_is_asked_and_goes_before() -> None:
    record = attempt(step("I took over the fast exponential from the notes."), final=verdict(error=3.0))
    asked = about_cause(record, NOTE, 10)
    assert isinstance(asked, Asked)
    for word in BETWEEN:
        assert f"`{word}`" in asked.instruction
    for word in ("rule_violation", "tolerance_edge", "search_truncation"):
        assert f"`{word}`" not in asked.instruction
    nothing = asked.check('{"causes": []}')
    assert isinstance(nothing, CauseLabel)
    assert (nothing.cause, nothing.step, nothing.decided_by) == ("rule_or_precision", "tolerance_edge", "records")
    claim = asked.check(
        '{"causes": [{"step": "unverified_adoption", "evidence": "I took over the fast exponential from the notes."}]}'
    )
    assert isinstance(claim, CauseLabel)
    assert (claim.cause, claim.decided_by) == ("unverified_adoption", "annotator")


def test_all_submissions_used_or_the_clock_run_out_is_truncation_unless_something_comes_before() -> None:
    used = attempt(submissions=tuple(submission(n, verdict()) for n in range(1, 11)))
    assert steps_of(facts(used, 10)) == ["search_truncation"]
    assert open_steps(used, facts(used, 10)) == BETWEEN
    late = attempt(ended="budget", final=verdict(passed=True))
    assert steps_of(facts(late, 10)) == ["search_truncation"]
    assert open_steps(late, facts(late, 10)) == BETWEEN[1:]


def test_nothing_ever_submitted_is_mismanagement_unless_execution_comes_before() -> None:
    record = attempt(submissions=(submission(None, None),))
    assert steps_of(facts(record, 10)) == ["budget_or_artifact"]
    assert open_steps(record, facts(record, 10)) == ("faulty_execution",)
    assert facts(record, 0) == ()


def test_the_order_of_precedence_decides_between_claims() -> None:
    claims = dict.fromkeys(("search_truncation", "toolchain_friction", "unverified_adoption"), "e")
    assert cause_by((), claims).cause == "toolchain_friction"
    assert cause_by((Fact("budget_or_artifact", "r"),), claims).decided_by == "records"
    for earlier, later in zip(taxonomy().steps, taxonomy().steps[1:], strict=False):
        assert cause_by((Fact(later, "r"),), {earlier: "e"}).step == earlier


def test_a_treatment_that_passed_may_have_no_cause_and_one_that_failed_may_not() -> None:
    passed = attempt(final=verdict(passed=True))
    asked = about_cause(passed, NOTE, 10)
    assert isinstance(asked, Asked)
    label = asked.check('{"causes": []}')
    assert isinstance(label, CauseLabel)
    assert (label.cause, label.step) == ("none", None)
    failed = about_cause(attempt(final=verdict(code="runtime-error")), NOTE, 10)
    assert isinstance(failed, Asked)
    with pytest.raises(Malformed, match="needs at least one entry"):
        failed.check('{"causes": []}')


def test_a_step_that_was_not_asked_about_is_refused() -> None:
    with pytest.raises(Malformed, match="`rule_violation` is none of toolchain_friction"):
        cause_label_of(
            '{"causes": [{"step": "rule_violation", "evidence": "it broke the rules"}]}',
            steps=["toolchain_friction"],
            established=(),
            attempt="it broke the rules",
            failed=True,
        )
