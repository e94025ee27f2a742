"""p70 against the recurrence and the chunked form, and the mistakes that the contract refuses."""

import pytest
import torch

from metakernelbench.problems.formats.chunked import chunked_accumulation
from metakernelbench.problems.linear_attention import p70_multiscale_retention as p70
from tests.problems.linear_attention.recurrent import accumulation, promoted
from tests.problems.support import case


def _by_token(q, k, v, *, form=accumulation, first=5, scale=True):
    rounded = q.dtype
    q, k, v = promoted(q, k, v)
    heads, length = q.shape[1:3]
    gamma = torch.tensor([1 - 2.0 ** (-first - head) for head in range(heads)], dtype=torch.float64)
    log_decay = gamma.log().view(1, heads, 1, 1).expand(len(q), heads, length, 1)
    return form(q / q.shape[-1] ** 0.5 if scale else q, k, v, log_decay).to(rounded)


@pytest.mark.parametrize("form", [accumulation, lambda *args: chunked_accumulation(*args, 8)])
def test_anchor_is_the_recurrence_and_the_chunked_form(form):
    problem = case("p70")
    expected = _by_token(*promoted(*problem.inputs), form=form)
    torch.testing.assert_close(problem.anchor[0], expected, rtol=1e-11, atol=1e-12)
    assert problem.accepts(lambda *inputs: _by_token(*inputs, form=form))


@pytest.mark.parametrize("mistake", [{"first": 4}, {"first": 6}, {"scale": False}], ids=str)
def test_a_wrong_decay_is_refused(mistake):
    assert not case("p70").accepts(lambda *inputs: _by_token(*inputs, **mistake))


def test_scores_of_later_tokens_are_refused():
    def not_causal(q, k, v):
        return ((q.float() / 4) @ k.float().mT @ v.float()).bfloat16()

    assert not case("p70").accepts(not_causal)


def test_decays_of_the_eight_heads_are_those_of_the_fact_sheet():
    q = torch.zeros(1, 8, 2, 1, dtype=torch.float64)
    q[..., 1, 0] = 1
    k = torch.zeros_like(q)
    k[..., 0, 0] = 1
    decays = p70.reference(q, k, torch.ones_like(q))[0, :, 1, 0].tolist()
    assert decays[0] == pytest.approx(0.96875) and decays[7] == pytest.approx(0.999755859375)


def test_cost_is_that_of_the_fact_sheet():
    cost = p70.cost(p70.FULL)
    assert cost.bytes == 201_326_592
    assert cost.flops["bf16"] == pytest.approx(34.4e9, rel=2e-3)
