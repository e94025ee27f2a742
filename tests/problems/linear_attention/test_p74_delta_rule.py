"""p74 against the delta rule one token at a time, and the mistakes that the contract refuses."""

import pytest
import torch

from metakernelbench.problems.linear_attention import p74_delta_rule as p74
from tests.problems.linear_attention.recurrent import delta_rule, promoted
from tests.problems.support import case
from tests.problems.workloads import tf32


def _by_token(q, k, v, beta, state, *, normalise=True, scale=True, from_zero=False, transposed=False, strength=True,
              **mistakes):  # fmt: skip
    rounded = q.dtype
    q, k, v, beta, state = promoted(q, k, v, beta, state)
    if normalise:
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    q = q / q.shape[-1] ** 0.5 if scale else q
    state = torch.zeros_like(state) if from_zero else state.mT if transposed else state
    beta = beta if strength else torch.ones_like(beta)
    output, last = delta_rule(q, k, v, torch.zeros_like(beta).unsqueeze(-1), beta, state, **mistakes)
    return output.to(rounded), last.to(torch.promote_types(rounded, torch.float32))


@pytest.mark.parametrize("seed", [7, 8])
def test_anchor_is_the_recurrence(seed):
    problem = case("p74", seed)
    for anchor, expected in zip(problem.anchor, _by_token(*promoted(*problem.inputs)), strict=True):
        torch.testing.assert_close(anchor, expected, rtol=1e-10, atol=1e-12)


def test_the_recurrence_and_the_chunked_form_are_accepted():
    problem = case("p74")
    assert problem.accepts(_by_token)
    assert problem.accepts(p74.vectorized)


@pytest.mark.parametrize(
    "mistake",
    [
        {"normalise": False},
        {"scale": False},
        {"from_zero": True},
        {"transposed": True},
        {"strength": False},
        {"read_early": True},
    ],
    ids=lambda mistake: next(iter(mistake)),
)
def test_a_wrong_rule_is_refused(mistake):
    assert not case("p74").accepts(lambda *inputs: _by_token(*inputs, **mistake))


def test_one_step_fewer_is_refused():
    def one_fewer(q, k, v, beta, state):
        output, _ = p74.vectorized(q, k, v, beta, state)
        return output, p74.vectorized(q[:, :, :-1], k[:, :, :-1], v[:, :, :-1], beta[:, :, :-1], state)[1]

    assert not case("p74").accepts(one_fewer)


def test_a_state_that_went_through_tf32_is_refused():
    def rounded_state(*inputs):
        output, state = p74.vectorized(*inputs)
        return output, tf32(state.contiguous())

    assert not case("p74").accepts(rounded_state)


def test_cost_is_that_of_the_fact_sheet():
    cost = p74.cost(p74.FULL)
    assert cost.bytes == 151_257_088
    assert cost.flops["fp32_matrix"] == pytest.approx(8.6e9, rel=2e-3)
    assert sum(cost.flops.values()) == pytest.approx(12.9e9, rel=2e-3)
