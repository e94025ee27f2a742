"""p66 against explicit weighted sums in float64, and the mistakes that the contract refuses."""

from dataclasses import replace

import pytest
import torch

from metakernelbench.problems.linear_attention import p66_wkv_recurrence as p66
from tests.problems.linear_attention.recurrent import promoted
from tests.problems.support import case
from tests.problems.workloads import case_at


def _by_sums(time_decay, key, time_first, value, num, top, den, *, bonus=True, late=False, squared=False):
    """Every output as one weighted mean over all earlier tokens, the state and the token itself."""
    time_decay, key, time_first, value, num, top, den = promoted(time_decay, key, time_first, value, num, top, den)
    w, length = -torch.exp(time_decay), key.shape[1]
    w = 2 * w if squared else w
    outputs = []
    for t in range(length):
        age = torch.arange(t - 1, -1, -1, dtype=key.dtype)[:, None]
        weight = torch.exp(key[:, :t] + age * w)
        state, own = torch.exp(top + t * w), torch.exp(key[:, t] + (time_first if bonus else 0))
        above = state * num + (weight * value[:, :t]).sum(1) + own * value[:, t]
        below = state * den + weight.sum(1) + own
        if late:  # the token counted once as absorbed, and once more with its bonus
            above, below = above + torch.exp(key[:, t]) * value[:, t], below + torch.exp(key[:, t])
        outputs.append(above / below)
    age = torch.arange(length - 1, -1, -1, dtype=key.dtype)[:, None]
    exponents = torch.cat([(top + length * w)[:, None], key + age * w], dim=1)
    largest = exponents.amax(dim=1)
    weight = torch.exp(exponents - largest[:, None])
    numbers, ones = torch.cat([num[:, None], value], dim=1), torch.cat([den[:, None], torch.ones_like(value)], dim=1)
    return torch.stack(outputs, dim=1), (weight * numbers).sum(1), (weight * ones).sum(1), largest


@pytest.mark.parametrize("seed", [7, 8])
def test_anchor_is_the_weighted_mean(seed):
    problem = case("p66", seed)
    for anchor, expected in zip(problem.anchor, _by_sums(*problem.inputs), strict=True):
        torch.testing.assert_close(anchor, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128])
def test_vectorized_is_accepted_at_every_kind_of_last_block(length):
    assert case_at("p66", replace(p66.SMOKE, length=length)).accepts(p66.vectorized)


def _single(outputs):
    return tuple(x.float() for x in outputs)


@pytest.mark.parametrize(
    "mistake", [{"bonus": False}, {"late": True}, {"squared": True}], ids=lambda mistake: next(iter(mistake))
)
def test_a_wrong_recurrence_is_refused(mistake):
    problem = case("p66")
    assert problem.accepts(lambda *inputs: _single(_by_sums(*inputs)))
    assert not problem.accepts(lambda *inputs: _single(_by_sums(*inputs, **mistake)))


def test_one_step_fewer_is_refused():
    def one_fewer(w, k, u, v, *states):
        output = p66.reference(w, k, u, v, *states)[0]
        return output, *p66.reference(w, k[:, :-1], u, v[:, :-1], *states)[1:]

    assert not case("p66").accepts(one_fewer)


def test_half_precision_inputs_on_the_way_are_refused():
    assert not case("p66").accepts(lambda w, k, *rest: p66.reference(w, k.bfloat16().float(), *rest))


def test_states_are_left_as_they_were():
    problem = case("p66")
    before = [x.clone() for x in problem.inputs]
    p66.reference(*problem.inputs)
    p66.vectorized(*problem.inputs)
    assert all(torch.equal(a, b) for a, b in zip(problem.inputs, before, strict=True))


def test_cost_is_that_of_the_fact_sheet():
    cost = p66.cost(p66.FULL)
    assert cost.bytes == 2_710_061_056
    assert cost.flops["fp32"] == 14 * 225_574_912
