"""p72 against the gated delta rule in its one-update form, and the mistakes that the contract refuses."""

import pytest
import torch

from metakernelbench.problems.linear_attention import p72_gdn_decode as p72
from tests.problems.support import case


def _delta_rule(
    q, k, v, state, A_log, a, dt_bias, b, scale, *, decay_on=True, beta_on=True, read_before=False, swap_heads=False
):
    """S ← d·S + k ⊗ β(v − (d·S)ᵀk), o = scale·Sᵀq, by contractions over all requests and heads."""
    compute = torch.promote_types(q.dtype, torch.float32)
    ratio = v.shape[2] // q.shape[2]
    spread = (lambda x: x.repeat(1, ratio, 1)) if swap_heads else (lambda x: x.repeat_interleave(ratio, 1))
    queries, keys = spread(q[:, 0].to(compute)), spread(k[:, 0].to(compute))
    rate = A_log.to(compute).exp() * torch.log1p(torch.exp(a[:, 0].to(compute) + dt_bias.to(compute)))
    decayed = state.to(compute) * (torch.exp(-rate) if decay_on else torch.ones_like(rate))[..., None, None]
    beta = torch.sigmoid(b[:, 0].to(compute)) if beta_on else torch.ones_like(rate)
    update = beta[..., None] * (v[:, 0].to(compute) - torch.einsum("bhvk,bhk->bhv", decayed, keys))
    new = decayed + torch.einsum("bhv,bhk->bhvk", update, keys)
    output = scale * torch.einsum("bhvk,bhk->bhv", decayed if read_before else new, queries)
    return output[:, None].to(q.dtype), new


@pytest.mark.parametrize("seed", range(3))
def test_reference_is_the_gated_delta_rule_in_float64(seed):
    problem = case("p72", seed)
    promoted = [x.double() if isinstance(x, torch.Tensor) else x for x in problem.inputs]
    for anchor, other in zip(problem.anchor, _delta_rule(*promoted), strict=True):
        assert anchor.dtype == torch.float64
        torch.testing.assert_close(anchor, other, rtol=1e-12, atol=1e-15)


def test_the_one_update_form_and_the_vectorized_form_are_accepted():
    problem = case("p72")
    assert problem.accepts(_delta_rule)
    assert problem.accepts(p72.vectorized)


@pytest.mark.parametrize(
    "mistake",
    [{"decay_on": False}, {"beta_on": False}, {"read_before": True}, {"swap_heads": True}],
    ids=lambda mistake: next(iter(mistake)),
)
def test_a_wrong_step_is_refused(mistake):
    assert not case("p72").accepts(lambda *inputs: _delta_rule(*inputs, **mistake))


def test_a_state_kept_in_bfloat16_is_refused():
    def half_state(*inputs):
        output, state = p72.vectorized(*inputs)
        return output, state.bfloat16().float()

    assert not case("p72").accepts(half_state)


def test_the_incoming_state_is_left_as_it_was():
    problem = case("p72")
    state = problem.inputs[3].clone()
    p72.reference(*problem.inputs)
    p72.vectorized(*problem.inputs)
    assert torch.equal(problem.inputs[3], state)


def test_cost_is_that_of_the_fact_sheet():
    cost = p72.cost(p72.FULL)
    assert cost.bytes == 135_008_384
    assert cost.flops == {"fp32": 6 * 128 * 128 * 1024}
