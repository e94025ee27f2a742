"""Several annotators: the majority decides, disagreement is kept."""

from __future__ import annotations

from metakernelbench.annotation.consensus import cause_consensus, skill_consensus, uptake_consensus
from metakernelbench.annotation.labels import CategoryUptake, CauseLabel, Handed, SkillLabels, UptakeLabels
from tests.annotation.test_statements import SKILL, labelled


def vote(*labels: tuple[str, str], supported: bool = False) -> SkillLabels:
    found = [s for category, quote in labels for s in labelled(SKILL, category, quote)]
    return SkillLabels(statements=tuple(s.model_copy(update={"supported": supported}) for s in found))


SUM, ROWS = "The sum stays in float32", "One worker takes several rows."


def test_a_category_needs_more_than_half_of_the_votes() -> None:
    votes = [vote(("numerics_guidance", SUM)), vote(("numerics_guidance", SUM), ("work_partition", ROWS)), vote()]
    found = skill_consensus(SKILL, votes)
    assert found.labels.categories == {"numerics_guidance"}
    assert (found.votes, found.disputed) == (3, ("numerics_guidance", "work_partition"))
    assert skill_consensus(SKILL, votes[:2]).labels.categories == {"numerics_guidance"}
    assert skill_consensus(SKILL, votes[1:]).labels.categories == frozenset()


def test_quotes_of_one_sentence_agree() -> None:
    first, second = vote(("numerics_guidance", SUM)), vote(("numerics_guidance", "until the last product"))
    (statement,) = skill_consensus(SKILL, [first, second]).labels.statements
    assert statement.quote == "The sum stays in float32, e.g. until the last product."
    assert SKILL[statement.start : statement.end] == statement.quote


def test_where_votes_agree_on_the_category_alone_all_named_most_often_stand_for_it() -> None:
    found = skill_consensus(SKILL, [vote(("numerics_guidance", SUM)), vote(("numerics_guidance", ROWS))])
    assert [s.quote[:8] for s in found.labels.statements] == ["The sum ", "One work"]


def test_evidence_needs_more_than_half_of_those_who_name_the_statement() -> None:
    yes, no = vote(("work_partition", ROWS), supported=True), vote(("work_partition", ROWS))
    assert skill_consensus(SKILL, [yes, yes, no]).labels.statements[0].supported
    assert not skill_consensus(SKILL, [yes, no]).labels.statements[0].supported


def test_a_single_vote_is_its_own_majority() -> None:
    found = skill_consensus(SKILL, [vote(("work_partition", ROWS))])
    assert (found.labels.categories, found.disputed) == ({"work_partition"}, ())


def uptake(word: str, *handed: Handed) -> UptakeLabels:
    label = CategoryUptake(category="work_partition", uptake=word, evidence=None)
    return UptakeLabels(uptake=(label,), propagated=handed)


def test_uptake_without_a_majority_is_left_out_and_called_disputed() -> None:
    split = uptake_consensus([uptake("ignored"), uptake("followed_fully")])
    assert (split.labels.uptake, split.disputed) == ((), ("work_partition",))
    agreed = uptake_consensus([uptake("ignored"), uptake("followed_fully"), uptake("ignored")])
    assert agreed.labels.uptake[0].uptake == "ignored"


def test_a_claim_is_handed_on_where_most_say_so() -> None:
    handed = Handed(source="a claim here", own="a claim here")
    assert uptake_consensus([uptake("ignored", handed), uptake("ignored", handed), uptake("ignored")]).labels.propagated
    split = uptake_consensus([uptake("ignored", handed), uptake("ignored")])
    assert (split.labels.propagated, split.disputed) == ((), ("propagation",))


def test_a_cause_without_a_majority_is_open() -> None:
    causes = [
        CauseLabel(cause=cause, step=cause, decided_by="annotator", evidence="e")
        for cause in ("toolchain_friction", "faulty_execution", "toolchain_friction")
    ]
    found = cause_consensus(causes)
    assert found.labels is not None
    assert (found.labels.cause, found.disputed) == ("toolchain_friction", ("cause",))
    assert cause_consensus(causes[:2]).labels is None
