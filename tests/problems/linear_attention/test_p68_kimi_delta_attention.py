"""p68 against the delta rule one token at a time, and the mistakes that the contract refuses."""

import pytest
import torch

from metakernelbench.problems.linear_attention import p68_kimi_delta_attention as p68
from tests.problems.linear_attention.recurrent import delta_rule, promoted, spread
from tests.problems.support import case


def _by_token(q, k, v, g, beta, *, normalise=True, scale=True, tiled=False, decay="channel", strength=True, **mistakes):
    rounded = v.dtype
    q, k, v, g, beta = (x.transpose(1, 2) for x in promoted(q, k, v, g, beta))
    if normalise:
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    q = q / q.shape[-1] ** 0.5 if scale else q
    q, k = (spread(x, v.shape[1], 1, tiled=tiled) for x in (q, k))
    g = {"channel": g, "head": g.mean(-1, keepdim=True), "none": torch.zeros_like(g)}[decay]
    state = torch.zeros(*v.shape[:2], q.shape[-1], v.shape[-1], dtype=q.dtype)
    beta = beta if strength else torch.ones_like(beta)
    return delta_rule(q, k, v, g, beta, state, **mistakes)[0].transpose(1, 2).to(rounded)


@pytest.mark.parametrize("seed", [7, 8])
def test_anchor_is_the_recurrence(seed):
    problem = case("p68", seed)
    torch.testing.assert_close(problem.anchor[0], _by_token(*promoted(*problem.inputs)), rtol=1e-10, atol=1e-12)


def test_the_recurrence_and_the_chunked_form_are_accepted():
    problem = case("p68")
    assert problem.accepts(_by_token)
    assert problem.accepts(p68.vectorized)


@pytest.mark.parametrize(
    "mistake",
    [
        {"normalise": False},
        {"scale": False},
        {"tiled": True},
        {"decay": "head"},
        {"decay": "none"},
        {"strength": False},
        {"decay_late": True},
        {"read_early": True},
    ],
    ids=str,
)
def test_a_wrong_rule_is_refused(mistake):
    assert not case("p68").accepts(lambda *inputs: _by_token(*inputs, **mistake))


def test_cost_is_that_of_the_fact_sheet():
    cost = p68.cost(p68.FULL)
    assert cost.bytes == 168_034_304
    assert cost.flops["bf16"] == pytest.approx(12.9e9, rel=2e-3)
