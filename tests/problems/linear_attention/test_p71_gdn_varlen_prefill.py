"""p71 against the gated delta rule per sequence, and the mistakes that the contract refuses."""

from dataclasses import replace

import pytest
import torch

from metakernelbench.problems.linear_attention import p71_gdn_varlen_prefill as p71
from tests.problems.linear_attention.recurrent import delta_rule, promoted, spread
from tests.problems.support import case
from tests.problems.workloads import case_at, tf32


def _by_sequence(
    q, k, v, state, A_log, a, dt_bias, b, boundaries, scale, *, tiled=False, run_on=False, transposed=False, decay=True,
    **mistakes
):  # fmt: skip
    rounded = q.dtype
    q, k, v, state, A_log, a, dt_bias, b = promoted(q, k, v, state, A_log, a, dt_bias, b)
    heads = v.shape[1]
    q, k = (spread(x, heads, 1, tiled=tiled).transpose(0, 1) for x in (q, k))
    log_decay = -torch.exp(A_log) * torch.log1p(torch.exp(a + dt_bias)) * decay
    v, log_decay, beta = v.transpose(0, 1), log_decay.t().unsqueeze(-1), torch.sigmoid(b).t()
    outputs, states = [], []
    for i, (begin, end) in enumerate(zip(boundaries.tolist()[:-1], boundaries.tolist()[1:], strict=True)):
        start = state[i] if transposed else state[i].mT
        start = states[-1].mT if run_on and i else start
        parts = (x[:, begin:end] for x in (scale * q, k, v, log_decay, beta))
        o, last = delta_rule(*parts, start, **mistakes)
        outputs.append(o)
        states.append(last if transposed else last.mT)
    output = torch.cat(outputs, dim=1).transpose(0, 1).to(rounded)
    return output, torch.stack(states).to(torch.promote_types(rounded, torch.float32))


@pytest.mark.parametrize("seed", [7, 8])
def test_anchor_is_the_recurrence(seed):
    problem = case("p71", seed)
    for anchor, expected in zip(problem.anchor, _by_sequence(*promoted(*problem.inputs)), strict=True):
        torch.testing.assert_close(anchor, expected, rtol=1e-9, atol=1e-13)


def test_the_recurrence_and_the_chunked_form_are_accepted():
    problem = case("p71")
    assert problem.accepts(_by_sequence)
    assert problem.accepts(p71.vectorized)


def test_the_chunked_form_is_accepted_with_all_decays_of_the_record():
    sizes = replace(p71.SMOKE, query_heads=8, key_heads=8, value_heads=16, size=32, boundaries=(0, 19, 50, 240))
    assert case_at("p71", sizes).accepts(p71.vectorized)


@pytest.mark.parametrize(
    "mistake",
    [
        {"tiled": True},
        {"run_on": True},
        {"transposed": True},
        {"decay": False},
        {"decay_late": True},
        {"read_early": True},
    ],
    ids=lambda mistake: next(iter(mistake)),
)
def test_a_wrong_prefill_is_refused(mistake):
    assert not case("p71").accepts(lambda *inputs: _by_sequence(*inputs, **mistake))


def test_single_tf32_products_on_the_way_to_the_state_are_refused():
    def rounded_state(q, k, v, state, *rest):
        return p71.vectorized(q, k, v, tf32(state), *rest)

    assert not case("p71").accepts(rounded_state)


def test_one_step_fewer_is_refused():
    def one_fewer(q, k, v, state, A_log, a, dt_bias, b, boundaries, scale):
        output, _ = p71.vectorized(q, k, v, state, A_log, a, dt_bias, b, boundaries, scale)
        shorter = boundaries.clone()
        shorter[-1] -= 1
        parts = (q[:-1], k[:-1], v[:-1], state, A_log, a[:-1], dt_bias, b[:-1])
        return output, p71.vectorized(*parts, shorter, scale)[1]

    assert not case("p71").accepts(one_fewer)


def test_an_empty_sequence_returns_its_state():
    problem = case_at("p71", replace(p71.SMOKE, boundaries=(0, 3, 3, 9)))
    assert torch.equal(problem.expected[1][1], problem.inputs[3][1])
    assert problem.accepts(p71.vectorized)


def test_cost_is_that_of_the_fact_sheet():
    cost = p71.cost(p71.FULL)
    assert cost.bytes == 20_234_344
    assert sum(cost.flops.values()) == pytest.approx(1.51e9, rel=2e-3)
