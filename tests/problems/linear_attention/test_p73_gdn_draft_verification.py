"""p73 against the gated delta rule per request, and the mistakes that the contract refuses."""

import pytest
import torch

from metakernelbench.problems.linear_attention import p73_gdn_draft_verification as p73
from tests.problems.linear_attention.recurrent import delta_rule, promoted, spread
from tests.problems.support import case


def _by_request(
    q, k, v, pool, indices, A_log, a, dt_bias, b, scale, *, tiled=False, unindexed=False, transposed=False, decay=True,
    update_pool=False, restart=False, **mistakes
):  # fmt: skip
    rounded, kept = q.dtype, pool
    q, k, v, pool, A_log, a, dt_bias, b = promoted(q, k, v, pool, A_log, a, dt_bias, b)
    q, k = (spread(x, v.shape[2], 2, tiled=tiled).transpose(1, 2) for x in (q, k))
    log_decay = -torch.exp(A_log) * torch.log1p(torch.exp(a + dt_bias)) * decay
    v, log_decay, beta = v.transpose(1, 2), log_decay.transpose(1, 2).unsqueeze(-1), torch.sigmoid(b).transpose(1, 2)
    rows = torch.arange(len(q)) if unindexed else indices.long()
    start = pool[rows] if transposed else pool[rows].mT
    if restart:  # every token from the pool's state
        parts = [[x[:, :, t : t + 1] for x in (scale * q, k, v, log_decay, beta)] for t in range(q.shape[2])]
        output = torch.cat([delta_rule(*part, start, **mistakes)[0] for part in parts], dim=2)
    else:
        output, last = delta_rule(scale * q, k, v, log_decay, beta, start, **mistakes)
    if update_pool:
        kept = kept.clone()
        kept[rows] = last.mT.to(kept.dtype)
    return output.transpose(1, 2).to(rounded), kept


@pytest.mark.parametrize("seed", [7, 8])
def test_anchor_is_the_recurrence(seed):
    problem = case("p73", seed)
    for anchor, expected in zip(problem.anchor, _by_request(*promoted(*problem.inputs)), strict=True):
        torch.testing.assert_close(anchor, expected, rtol=1e-9, atol=1e-13)


def test_the_recurrence_and_the_vectorized_form_are_accepted():
    problem = case("p73")
    assert problem.accepts(_by_request)
    assert problem.accepts(p73.vectorized)


@pytest.mark.parametrize(
    "mistake",
    ["tiled", "unindexed", "transposed", "update_pool", "restart", "decay_late", "read_early"],
)
def test_a_wrong_verification_is_refused(mistake):
    assert not case("p73").accepts(lambda *inputs: _by_request(*inputs, **{mistake: True}))


def test_without_decay_the_outputs_are_refused():
    assert not case("p73").accepts(lambda *inputs: _by_request(*inputs, decay=False))


def test_the_reference_returns_a_copy_of_the_pool():
    problem = case("p73")
    _, final_state = p73.reference(*problem.inputs)
    assert final_state.data_ptr() != problem.inputs[3].data_ptr()
    assert torch.equal(final_state, problem.inputs[3])


def test_indices_are_distinct_rows_of_the_pool():
    drawn = [case("p73", seed).inputs[4] for seed in range(6)]
    assert all(len(set(row.tolist())) == 3 and row.dtype == torch.int32 for row in drawn)
    assert len({tuple(row.tolist()) for row in drawn}) > 1


def test_cost_is_that_of_the_fact_sheet():
    cost = p73.cost(p73.FULL)
    assert cost.bytes == 35_135_744
    assert cost.flops["fp32"] == pytest.approx(0.20e9, rel=0.01)
