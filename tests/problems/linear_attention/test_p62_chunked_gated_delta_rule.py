"""p62 against the gated delta rule one token at a time, and the mistakes that the contract refuses."""

import pytest
import torch

from metakernelbench.problems.linear_attention import p62_chunked_gated_delta_rule as p62
from tests.problems.linear_attention.recurrent import delta_rule, promoted, spread
from tests.problems.support import case


def _by_token(
    query, key, value, g, beta, scale, *, normalise=True, decay=True, strength=True, tiled=False, reset=None, **mistakes
):
    query, key, value, g, beta = promoted(query, key, value, g, beta)
    if normalise:
        query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    heads = value.shape[1]
    q, k = (spread(x, heads, 1, tiled=tiled) for x in (query, key))
    log_decay = (g if decay else torch.zeros_like(g)).unsqueeze(-1)
    beta = beta if strength else torch.ones_like(beta)
    pieces = []
    for start in range(0, q.shape[2], reset or q.shape[2]):
        end = start + (reset or q.shape[2])
        state = torch.zeros(*value.shape[:2], q.shape[-1], value.shape[-1], dtype=q.dtype)
        parts = (x[:, :, start:end] for x in (scale * q, k, value, log_decay, beta))
        pieces.append(delta_rule(*parts, state, **mistakes)[0])
    return torch.cat(pieces, dim=2).transpose(1, 2)


@pytest.mark.parametrize("seed", [7, 8])
def test_anchor_is_the_recurrence(seed):
    problem = case("p62", seed)
    torch.testing.assert_close(problem.anchor[0], _by_token(*problem.inputs), rtol=1e-9, atol=1e-12)


def test_the_recurrence_and_the_vectorized_form_are_accepted():
    problem = case("p62")
    assert problem.accepts(lambda *inputs: _by_token(*inputs).bfloat16())
    assert problem.accepts(p62.vectorized)


@pytest.mark.parametrize(
    "mistake",
    [
        {"normalise": False},
        {"decay": False},
        {"strength": False},
        {"tiled": True},
        {"reset": p62.CHUNK},
        {"decay_late": True},
        {"read_early": True},
    ],
    ids=lambda mistake: next(iter(mistake)),
)
def test_a_wrong_rule_is_refused(mistake):
    assert not case("p62").accepts(lambda *inputs: _by_token(*inputs, **mistake).bfloat16())


def test_smoke_has_a_ragged_last_chunk():
    assert p62.SMOKE.length > 2 * p62.CHUNK and p62.SMOKE.length % p62.CHUNK


def test_cost_is_that_of_the_fact_sheet():
    cost = p62.cost(p62.FULL)
    assert cost.bytes == 42_205_184
    assert cost.flops["bf16"] == pytest.approx(6.44e9, rel=1e-3)
