"""p64 against the recurrence over tokens, and the mistakes that the contract refuses."""

from dataclasses import replace

import pytest
import torch

from metakernelbench.problems.linear_attention import p64_mamba_chunk_scan as p64
from tests.problems.linear_attention.recurrent import promoted, spread, state_space
from tests.problems.support import case
from tests.problems.workloads import case_at


def _by_token(x, A, B, C, D, state, *, tiled=False, skip=True, from_zero=False, swap=False):
    rounded = x.dtype
    x, A, B, C, D, state = promoted(x, A, B, C, D, state)
    heads = x.shape[2]
    B, C = (spread(y, heads, 2, tiled=tiled) for y in ((C, B) if swap else (B, C)))
    state = torch.zeros_like(state) if from_zero else state
    y, last = state_space(x, A.transpose(1, 2), B, C, state)
    y = y + D[:, None] * x if skip else y
    return y.flatten(2).to(rounded), last.to(rounded)


@pytest.mark.parametrize("groups", [1, 2])
def test_anchor_is_the_recurrence(groups):
    problem = case_at("p64", replace(p64.SMOKE, groups=groups))
    for anchor, expected in zip(problem.anchor, _by_token(*promoted(*problem.inputs)), strict=True):
        torch.testing.assert_close(anchor, expected, rtol=1e-9, atol=1e-10)
    assert problem.accepts(_by_token)


@pytest.mark.parametrize(
    "mistake",
    [{"tiled": True}, {"skip": False}, {"from_zero": True}, {"swap": True}],
    ids=lambda mistake: next(iter(mistake)),
)
def test_a_wrong_scan_is_refused(mistake):
    assert not case("p64").accepts(lambda *inputs: _by_token(*inputs, **mistake))


def test_the_skip_cannot_be_left_out_at_the_full_state_size():
    problem = case_at("p64", replace(p64.FULL, batch=1, length=256, heads=2))
    assert problem.accepts(_by_token)
    assert not problem.accepts(lambda *inputs: _by_token(*inputs, skip=False))


def test_one_step_fewer_in_the_final_state_is_refused():
    def one_fewer(x, A, B, C, D, state):
        y, _ = p64.reference(x, A, B, C, D, state)
        return y, p64.reference(x[:, :-1], A[..., :-1], B[:, :-1], C[:, :-1], D, state)[1]

    assert not case("p64").accepts(one_fewer)


def test_without_decay_the_outputs_are_refused():
    assert not case("p64").accepts(lambda x, A, *rest: p64.reference(x, torch.zeros_like(A), *rest))


def test_smoke_has_a_ragged_last_chunk():
    assert p64.SMOKE.length > 2 * p64.CHUNK and p64.SMOKE.length % p64.CHUNK


def test_cost_is_that_of_the_fact_sheet():
    cost = p64.cost(p64.FULL)
    assert cost.bytes == 50_593_824
    assert cost.flops["bf16"] == pytest.approx(8.59e9, rel=1e-3)
