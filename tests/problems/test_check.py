"""The checks of a problem: a sound one passes all, each kind of unsound one fails the check that is meant for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from metakernelbench.errors import UnknownName
from metakernelbench.problems.catalog import load, problem_ids
from metakernelbench.problems.check import check, check_problem
from metakernelbench.problems.problem import Cost, Problem


def failures(problem: Problem) -> dict[str, str]:
    return {failure.name: failure.detail for failure in check(problem).failures}


def p28(**changes: Any) -> Problem:
    return replace(load("p28"), **changes)


def reference_then(change: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    """p28's reference with something done to its output."""
    return lambda hidden_states, residual, weight: change(load("p28").reference(hidden_states, residual, weight))


@pytest.mark.parametrize("id", problem_ids())
def test_every_problem_of_the_catalogue_passes_every_check(id):
    report = check_problem(id)
    assert report.failures == ()
    assert report.passed
    assert len(report.checks) == 15
    assert all(c.detail for c in report.checks)


def test_an_unknown_problem_is_no_report():
    with pytest.raises(UnknownName, match="unknown problem `p2`; nearest:"):
        check_problem("p2")


def test_a_module_that_does_not_load_is_reported(monkeypatch):
    def incomplete(id: str) -> Problem:
        raise AttributeError(f"module of {id} has no attribute 'cost'")

    monkeypatch.setattr("metakernelbench.problems.check.load", incomplete)
    (failure,) = check_problem("p28").failures
    assert failure.name == "loads" and "no attribute 'cost'" in failure.detail


def test_a_reference_that_raises_is_reported_and_ends_the_report():
    def broken(hidden_states, residual, weight):  # noqa: ARG001
        raise ValueError("no such thing")

    report = check(p28(reference=broken))
    assert [(c.name, c.passed, c.detail) for c in report.checks] == [("runs", False, "ValueError: no such thing")]


def test_wrong_number_of_inputs_names_what_is_expected():
    problem = p28(make_inputs=lambda workload, device: load("p28").make_inputs(workload, device)[:2])
    assert "hidden_states, residual, weight" in failures(problem)["runs"]


def test_outputs_must_be_named_once_each():
    assert "name each once" in failures(p28(outputs=("a", "b")))["outputs"]


def test_outputs_have_the_same_shape_in_every_draw():
    def as_many_as_are_positive(hidden_states, residual, weight):
        normalised = load("p28").reference(hidden_states, residual, weight)
        return normalised[: 1 + int((hidden_states[:, 0] > 0).sum())]

    assert "dtype or shape" in failures(p28(reference=as_many_as_are_positive))["outputs"]


def test_a_generator_of_its_own_breaks_determinism():
    generator = torch.Generator()

    def own(workload, device):
        hidden, residual, weight = load("p28").make_inputs(workload, device)
        return torch.randn(hidden.shape, generator=generator).bfloat16(), residual, weight

    assert "`hidden_states` differs" in failures(p28(make_inputs=own))["determinism"]


def test_a_constant_input_must_be_declared_and_only_then():
    def constant_weight(workload, device):
        hidden, residual, weight = load("p28").make_inputs(workload, device)
        return hidden, residual, torch.linspace(0.5, 1.5, len(weight)).bfloat16()

    assert "FIXED = ('weight',)" in failures(p28(make_inputs=constant_weight))["fresh inputs"]
    assert failures(p28(make_inputs=constant_weight, fixed=("weight",))) == {}
    assert "remove it" in failures(p28(fixed=("weight",)))["fresh inputs"]
    assert "no input tensor" in failures(p28(fixed=("weights",)))["fresh inputs"]


def test_a_named_dtype_shows_in_the_anchor_unless_declared():
    named = reference_then(lambda y: y.to(torch.bfloat16))
    assert "CAST_OUTPUTS = ('normalised',)" in failures(p28(reference=named))["anchor"]
    assert failures(p28(reference=named, cast_outputs=("normalised",))) == {}


def test_an_anchor_that_overflows_is_found():
    overflowing = reference_then(lambda y: y / (y.dtype != torch.float64))
    assert "not finite" in failures(p28(reference=overflowing))["anchor"]


def test_a_discrete_output_that_hangs_on_rounding_is_found():
    """The sum of a row and its mirror image is zero but for rounding, which then decides its sign."""

    def sign_of_sum(x, weight):
        return ((x @ weight.t()).sum(dim=-1) > 0).long()

    def balanced(workload, device):  # noqa: ARG001
        half = torch.randn(64, 8)
        return torch.cat([half, -half], dim=-1), torch.ones(3, 16) + torch.randn(3, 1)

    def unbalanced(workload, device):
        x, weight = balanced(workload, device)
        return x + x.sum(dim=-1, keepdim=True).sign() + torch.randn(64, 1).sign(), weight

    found = failures(p28(reference=sign_of_sum, make_inputs=balanced, outputs=("sign",)))
    assert "one unit in the last place" in found["discrete stability"]
    found = failures(p28(reference=sign_of_sum, make_inputs=unbalanced, outputs=("sign",)))
    assert "discrete stability" not in found


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (torch.zeros_like, "is zero"),
        (torch.ones_like, "the same value everywhere"),
        (lambda y: torch.full_like(y, torch.nan), "nowhere finite"),
        (lambda y: torch.arange(y.numel(), dtype=y.dtype).view(y.shape), "the same in 3 draws"),
    ],
)
def test_an_output_that_says_nothing_is_found(change, what):
    assert what in failures(p28(reference=reference_then(change)))["nontrivial outputs"]


def test_an_input_that_changes_nothing_is_found():
    deaf = lambda hidden_states, residual, weight: hidden_states * weight  # noqa: E731, ARG005
    assert "no output changes when `residual` does" in failures(p28(reference=deaf))["uses every input"]


def test_a_reference_that_reads_or_sets_precision_is_found():
    def sets(hidden_states, residual, weight):
        torch.set_float32_matmul_precision("high")
        return load("p28").reference(hidden_states, residual, weight)

    assert "leave torch's global settings alone" in failures(p28(reference=sets))["precision settings"]


def test_an_input_may_be_changed_only_where_it_is_returned():
    def scribbles(hidden_states, residual, weight):
        result = load("p28").reference(hidden_states, residual, weight)
        residual.zero_()
        return result

    def in_place(hidden_states, residual, weight):
        residual.copy_(load("p28").reference(hidden_states, residual, weight))
        return residual

    assert "changes input `residual`" in failures(p28(reference=scribbles))["inputs unmodified"]
    assert failures(p28(reference=in_place)) == {}


def test_a_vectorized_form_is_held_to_the_contract():
    wrong = reference_then(lambda y: 1.1 * y)
    tupled = reference_then(lambda y: (y,))
    assert "allowance" in failures(p28(vectorized=wrong))["vectorized"]
    assert "container" in failures(p28(vectorized=tupled))["vectorized"]
    assert failures(p28(vectorized=load("p28").reference)) == {}


def test_a_slow_smoke_workload_is_found(monkeypatch):
    monkeypatch.setattr("metakernelbench.problems.check_rules.SMOKE_SECONDS", 0.01)

    def slow(hidden_states, residual, weight):
        start = time.process_time()
        while time.process_time() < start + 0.02:
            pass
        return load("p28").reference(hidden_states, residual, weight)

    assert "make SMOKE smaller" in failures(p28(reference=slow))["smoke time"]


@pytest.mark.parametrize(
    ("cost", "what"),
    [
        (Cost(bytes_read=0, bytes_written=1), "not positive"),
        (Cost(bytes_read=10**9, bytes_written=1), "bytes read, more than"),
        (Cost(bytes_read=1, bytes_written=10**9), "bytes written, more than"),
    ],
)
def test_an_impossible_cost_is_found(cost, what):
    assert what in failures(p28(cost=lambda _: cost))["cost"]


def test_a_subject_must_be_one_sentence():
    assert "one sentence" in failures(p28(subject="It adds. Then it normalises."))["description"]
