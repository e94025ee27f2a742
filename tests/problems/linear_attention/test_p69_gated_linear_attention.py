"""p69 against the recurrence one token at a time, and the mistakes that the contract refuses."""

import pytest
import torch

from metakernelbench.problems.linear_attention import p69_gated_linear_attention as p69
from tests.problems.linear_attention.recurrent import accumulation, promoted
from tests.problems.support import case


def _by_token(q, k, v, gk, *, scale=True, decay="channel", normalise=False, shifted=False):
    rounded = q.dtype
    q, k, v, gk = (x.transpose(1, 2) for x in promoted(q, k, v, gk))
    q = q / q.shape[-1] ** 0.5 if scale else q
    if normalise:
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    if shifted:  # the decay of a token applied after it was absorbed
        gk = gk.roll(1, dims=2)
    gk = {"channel": gk, "head": gk.mean(-1, keepdim=True), "none": torch.zeros_like(gk)}[decay]
    return accumulation(q, k, v, gk).transpose(1, 2).to(rounded)


@pytest.mark.parametrize("seed", [7, 8])
def test_anchor_is_the_recurrence(seed):
    problem = case("p69", seed)
    torch.testing.assert_close(problem.anchor[0], _by_token(*promoted(*problem.inputs)), rtol=1e-11, atol=1e-11)


def test_the_recurrence_and_the_chunked_form_are_accepted():
    problem = case("p69")
    assert problem.accepts(_by_token)
    assert problem.accepts(p69.vectorized)


@pytest.mark.parametrize(
    "mistake",
    [{"scale": False}, {"decay": "head"}, {"decay": "none"}, {"normalise": True}, {"shifted": True}],
    ids=str,
)
def test_a_wrong_accumulation_is_refused(mistake):
    assert not case("p69").accepts(lambda *inputs: _by_token(*inputs, **mistake))


def test_cost_is_that_of_the_fact_sheet():
    cost = p69.cost(p69.FULL)
    assert cost.bytes == 117_440_512
    assert cost.flops["bf16"] == pytest.approx(17.2e9, rel=2e-3)
