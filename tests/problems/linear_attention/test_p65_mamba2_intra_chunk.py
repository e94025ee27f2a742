"""p65 against the recurrence from an empty state in each chunk, and the mistakes that the contract refuses."""

import pytest
import torch

from metakernelbench.problems.linear_attention import p65_mamba2_intra_chunk as p65
from tests.problems.linear_attention.recurrent import promoted, spread, state_space
from tests.problems.support import case


def _by_token(x, a, B, C, *, tiled=False, as_cumulative=False, carry=False, reverse=False):
    """Each chunk is a scan of its own."""
    rounded, shape = x.dtype, x.shape
    x, a, B, C = promoted(x, a, B, C)
    B, C = (spread(y, shape[-2], -2, tiled=tiled) for y in (B, C))
    a = a.permute(0, 2, 3, 1)  # batch, chunk, time, head
    if as_cumulative:
        a = a.diff(dim=2, prepend=a[:, :, :1])
    join = (lambda y: y.flatten(1, 2)) if carry else (lambda y: y.flatten(0, 1))
    x, a, B, C = (join(y) for y in (x, a, B, C))
    if reverse:
        x, a, B, C = (y.flip(1) for y in (x, a, B, C))
    state = torch.zeros(len(x), shape[-2], shape[-1], B.shape[-1], dtype=x.dtype)
    y, _ = state_space(x, a, B, C, state)
    return (y.flip(1) if reverse else y).view(shape).to(rounded)


@pytest.mark.parametrize("seed", [7, 8])
def test_anchor_is_the_recurrence(seed):
    problem = case("p65", seed)
    torch.testing.assert_close(problem.anchor[0], _by_token(*promoted(*problem.inputs)), rtol=1e-11, atol=1e-11)
    assert problem.accepts(_by_token)


@pytest.mark.parametrize("mistake", ["tiled", "as_cumulative", "carry", "reverse"])
def test_a_wrong_block_is_refused(mistake):
    assert not case("p65").accepts(lambda *inputs: _by_token(*inputs, **{mistake: True}))


def test_cost_is_that_of_the_fact_sheet():
    cost = p65.cost(p65.FULL)
    assert cost.bytes == 143_130_624
    assert cost.flops["bf16"] == pytest.approx(4.60e9, rel=0.02)
