"""Each design plans what its question needs, shares what it can with the others, and never the same key twice."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from metakernelbench.errors import MkbError, SpecError, UnknownName, UserError
from metakernelbench.experiments import designs
from metakernelbench.experiments.designs import Plan, PlannedAttempt, PlannedComparison
from metakernelbench.experiments.planned import merged
from metakernelbench.experiments.registry import Design, design_names, load_design
from metakernelbench.problems.catalog import family_of

PROBLEMS, DSLS, MODELS = ("p01", "p02", "p44", "p45"), ("cute", "tirx"), ("a/one", "b/two")
CELLS = len(PROBLEMS) * len(MODELS) * 2
"""Two replicates."""
OPTIONS: Mapping[str, Mapping[str, Any]] = {"ablate": {"categories": ["work_partition", "workload_fact"]}}


def planned(name: str, **changes: Any) -> Plan:
    values = {"problems": PROBLEMS, "dsls": DSLS, "models": MODELS, "replicates": 2, "options": OPTIONS.get(name, {})}
    return merged([load_design(name).plan(**(values | changes))])


def attempts_of(plan: Plan) -> dict[str, PlannedAttempt]:
    return {attempt.key: attempt for attempt in plan.attempts}


def arms(plan: Plan) -> dict[str, int]:
    return dict(Counter(comparison.arm for comparison in plan.comparisons))


@pytest.mark.parametrize("name", design_names())
def test_every_design_plans_a_graph_that_can_be_run(name: str) -> None:
    plan = planned(name)
    assert plan.comparisons
    seen: set[str] = set()
    for attempt in plan.attempts:
        assert (attempt.source is None) == (attempt.arm == "solo")
        assert attempt.source is None or attempt.source in seen
        assert attempt.key not in seen
        seen.add(attempt.key)
    attempts = attempts_of(plan)
    for comparison in plan.comparisons:
        baseline, treatment = attempts[comparison.baseline], attempts[comparison.treatment]
        for attempt in (baseline, treatment):
            assert (attempt.problem, attempt.dsl, attempt.model, attempt.replicate) == (
                comparison.problem,
                comparison.target_dsl,
                comparison.model,
                comparison.replicate,
            )
        assert comparison.design == name
        assert treatment.source == comparison.source
    assert {attempt.replicate for attempt in plan.attempts} == {0, 1}


@pytest.mark.parametrize("name", design_names())
def test_every_design_is_a_pure_function_that_asks_a_question(name: str) -> None:
    assert planned(name) == planned(name)
    assert load_design(name).question.endswith("?")


def test_cross_dsl_is_the_benchmarks_experiment() -> None:
    plan = planned("cross-dsl")
    assert len(plan.attempts) == 4 * CELLS
    assert len(plan.comparisons) == 2 * CELLS
    assert {comparison.direction for comparison in plan.comparisons} == {"cute→tirx", "tirx→cute"}
    assert len(planned("cross-dsl", dsls=("cute",)).attempts) == CELLS


def test_retry_compares_two_attempts_that_nothing_distinguishes() -> None:
    plan = planned("retry", dsls=("cute",))
    assert {attempt.label for attempt in plan.attempts} == {"solo", "again"}
    assert all(comparison.source is None for comparison in plan.comparisons)
    assert {comparison.direction for comparison in plan.comparisons} == {"cute"}


def test_same_dsl_does_not_measure_a_source_against_itself() -> None:
    for comparison in planned("same-dsl").comparisons:
        assert comparison.source_dsl == comparison.target_dsl
        assert len({comparison.source, comparison.baseline, comparison.treatment}) == 3


def test_a_placebo_is_from_another_family_and_stays_when_most_problems_are_added() -> None:
    few, more = (placebo_of(problems) for problems in (PROBLEMS, (*PROBLEMS, "p19")))
    assert all(family_of(problem) != family_of(other) for problem, other in more.items())
    assert sum(few[problem] != more[problem] for problem in few) < len(few)
    with pytest.raises(UserError, match="problems of two families"):
        planned("placebo", problems=("p01", "p02"))


def placebo_of(problems: tuple[str, ...]) -> dict[str, str]:
    plan = planned("placebo", problems=problems)
    return {comparison.problem: str(comparison.source).split("/")[0] for comparison in plan.comparisons}


def test_a_related_problem_is_another_one_of_the_family() -> None:
    plan = planned("related", problems=("p01", "p02", "p44"))
    donors = {comparison.problem: str(comparison.source).split("/")[0] for comparison in plan.comparisons}
    assert donors == {"p01": "p02", "p02": "p01"}
    with pytest.raises(UserError, match="two problems of one family"):
        planned("related", problems=("p01", "p44"))


def test_cross_model_takes_the_skill_of_every_other_model() -> None:
    plan = planned("cross-model")
    assert arms(plan) == {"by a/one": CELLS, "by b/two": CELLS}
    treatment = plan.comparisons[0].treatment
    assert treatment == "p01/tirx/a/one/0/from-cute-by-b~two"
    with pytest.raises(UserError, match="two models"):
        planned("cross-model", models=("a/one",))


def test_a_chain_hands_on_what_the_round_before_kept() -> None:
    plan = planned("chain", problems=("p01",), models=("a/one",), replicates=1, options={"rounds": 3})
    by_round = {(c.arm, c.source_dsl): (c.source, c.treatment) for c in plan.comparisons if c.target_dsl}
    first = by_round["round 1", "cute"][1]
    assert first == "p01/tirx/a/one/0/from-cute"
    assert by_round["round 2", "tirx"] == (first, "p01/cute/a/one/0/chain-cute-2")
    assert arms(plan) == {"round 1": 2, "round 2": 2, "round 3": 2}
    for rounds in (0, 100_000_000):
        with pytest.raises(UserError, match=f"at least one round and takes at most 1000, not {rounds}"):
            planned("chain", options={"rounds": rounds})


def test_ablate_measures_a_part_against_the_whole() -> None:
    plan = planned("ablate")
    attempts = attempts_of(plan)
    for comparison in plan.comparisons:
        whole, part = attempts[comparison.baseline], attempts[comparison.treatment]
        assert (whole.source, whole.without) == (part.source, None)
        assert comparison.arm == f"without {part.without}"
    with pytest.raises(UnknownName, match="unknown category `nonsense`"):
        planned("ablate", options={"categories": ["nonsense"]})
    with pytest.raises(UserError, match="needs at least one category"):
        planned("ablate", options={"categories": []})
    with pytest.raises(SpecError, match=r"needs `categories` in \[options\.ablate\]"):
        planned("ablate", options={})


def test_content_gives_four_kinds_of_material() -> None:
    plan = planned("content")
    assert set(arms(plan)) == {"skill", "implementation", "trajectory", "none"}
    attempts = attempts_of(plan)
    for comparison in plan.comparisons:
        expected = "skill" if comparison.arm == "none" else comparison.arm
        assert attempts[comparison.treatment].material == expected


def test_format_differs_in_how_the_source_is_asked_for_its_skill() -> None:
    plan = planned("format")
    attempts = attempts_of(plan)
    for comparison in plan.comparisons:
        assert attempts[str(comparison.source)].skill_form == comparison.arm
        assert attempts[comparison.treatment].skill_form == "free"


def test_designs_share_what_is_the_same() -> None:
    """All ten cost less than the sum: solo attempts, second solo attempts and whole-skill treatments are common."""
    plans = [planned(name) for name in design_names()]
    together = merged(plans)
    assert len(together.attempts) == len({attempt.key for plan in plans for attempt in plan.attempts})
    assert sum(attempt.label == "again" for attempt in together.attempts) == 2 * CELLS
    assert len(together.comparisons) == sum(len(plan.comparisons) for plan in plans)


@pytest.mark.parametrize("name", sorted(set(design_names()) - {"cross-dsl", "retry", "same-dsl"}))
def test_a_design_that_crosses_dsls_says_that_one_is_not_enough(name: str) -> None:
    with pytest.raises(UserError, match=f"the design `{name}` needs two DSLs"):
        planned(name, dsls=("cute",))


# What a third party's design may do wrong

SOLO = PlannedAttempt(problem="p28", dsl="tirx", model="m")


def given(source: str, dsl: str = "tirx") -> PlannedAttempt:
    return PlannedAttempt(problem="p28", dsl=dsl, model="m", arm="conditioned", source=source)


def test_a_skill_of_an_attempt_that_is_not_planned_is_one_sentence() -> None:
    with pytest.raises(UserError, match="is to be given the skill of `p28/cute/m/0/solo`, which is not planned"):
        merged([Plan(attempts=(given("p28/cute/m/0/solo"),), comparisons=())])


def test_a_cycle_is_named() -> None:
    one, other = given("p28/cute/m/0/from-tirx"), given("p28/tirx/m/0/from-cute", dsl="cute")
    with pytest.raises(UserError, match="wait for each other, so that none can start: `p28/") as caught:
        merged([Plan(attempts=(one, other), comparisons=())])
    assert "from-cute` ← `" in caught.value.message


def test_an_order_that_runs_a_source_late_is_put_right() -> None:
    treatment = given(SOLO.key)
    plan = merged([Plan(attempts=(treatment, SOLO), comparisons=())])
    assert plan.attempts == (SOLO, treatment)


def test_a_comparison_of_what_is_not_planned_is_one_sentence() -> None:
    comparison = PlannedComparison(
        problem="p28",
        model="m",
        replicate=0,
        source_dsl="tirx",
        target_dsl="tirx",
        source=None,
        baseline=SOLO.key,
        treatment="p28/tirx/m/0/again",
        design="mine",
    )
    with pytest.raises(UserError, match="the design `mine` compares `p28/tirx/m/0/again`, which it does not plan"):
        merged([Plan(attempts=(SOLO,), comparisons=(comparison,))])


def test_one_key_for_two_attempts_is_refused() -> None:
    impostor = PlannedAttempt(problem="p28", dsl="tirx", model="m", skill_form="structured")
    with pytest.raises(UserError, match="two different attempts are planned under the key `p28/tirx/m/0/solo`"):
        merged([Plan(attempts=(SOLO,), comparisons=()), Plan(attempts=(impostor,), comparisons=())])


def mine(problems: Any, dsls: Any, models: Any, replicates: int, *, factor: int = 2) -> Plan:
    """Is this a design?"""
    if factor == 3:
        raise KeyError("three")
    return designs.retry(problems, dsls, models, replicates) if factor == 2 else None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factor": "2"}, '[options.mine]: `factor` is "2"; allowed: a valid integer'),
        ({"facter": 2}, "[options.mine]: unknown option `facter`; nearest: `factor`"),
        ({"factor": 3}, "the design `mine` (somewhere:mine) failed: KeyError: 'three'"),
        ({"factor": 4}, "the design `mine` (somewhere:mine) returned NoneType, not a Plan"),
    ],
)
def test_a_mistake_in_an_option_or_a_design_is_one_sentence(options: dict[str, Any], message: str) -> None:
    design = Design(name="mine", function=mine, origin="somewhere:mine")
    with pytest.raises(MkbError) as caught:
        design.plan(PROBLEMS, DSLS, MODELS, 1, options)
    assert caught.value.message == message


def test_an_option_for_a_design_without_any_is_refused() -> None:
    with pytest.raises(SpecError, match=r"\[options\.retry\]: the design `retry` has no options, so no `rounds`"):
        load_design("retry").checked({"rounds": 2})


def test_the_documentations_table_names_every_design_and_its_arms() -> None:
    page = (Path(__file__).parents[2] / "docs" / "designs.md").read_text()
    rows = dict(re.findall(r"^\| `([\w-]+)` \|.*\| (.*) \|$", page, re.MULTILINE))
    assert sorted(rows) == design_names()
    for name in set(rows) - {"cross-model", "ablate", "chain"}:
        assert re.findall(r"`([^`]+)`", rows[name]) == sorted(arms(planned(name)), key=rows[name].index)
