"""p63 against the layer written token by token in float64, and the mistakes that the contract refuses."""

import pytest
import torch

from metakernelbench.problems.linear_attention import p63_mamba2_layer as p63
from tests.problems.linear_attention.recurrent import promoted, spread, state_space
from tests.problems.support import case


def _silu(x):
    return x / (1 + torch.exp(-x))


def _by_token(
    hidden, in_proj, conv_weight, conv_bias, dt_bias, A_log, D, norm_weight, out_proj, low, high, eps, *,
    tiled=False, reset=None, gate_late=False, one_group=False, skip=True, scaled_skip=False, reversed_taps=False,
    only_x_activated=False, double_step=True
):  # fmt: skip
    assert (low, high) == (0.0, 1e6)
    rounded = hidden.dtype
    hidden, in_proj, conv_weight, conv_bias, dt_bias, A_log, D, norm_weight, out_proj = promoted(
        hidden, in_proj, conv_weight, conv_bias, dt_bias, A_log, D, norm_weight, out_proj
    )
    batch, length, _ = hidden.shape
    heads, inner, channels = len(A_log), len(norm_weight), len(conv_weight)
    z = hidden @ in_proj.t()
    gate, xbc, dt = z[..., :inner], z[..., inner : inner + channels], z[..., inner + channels :]
    padded = torch.cat([torch.zeros(batch, 3, channels, dtype=z.dtype), xbc], dim=1)
    taps = conv_weight[:, 0].flip(1) if reversed_taps else conv_weight[:, 0]
    convolved = sum(taps[:, i] * padded[:, i : i + length] for i in range(4)) + conv_bias
    xbc = _silu(convolved)
    if only_x_activated:
        xbc = torch.cat([xbc[..., :inner], convolved[..., inner:]], dim=-1)
    groups = p63.GROUPS
    x = xbc[..., :inner].view(batch, length, heads, -1)
    B, C = xbc[..., inner:].chunk(2, dim=-1)
    B, C = (spread(y.view(batch, length, groups, -1), heads, 2, tiled=tiled) for y in (B, C))
    step = torch.log1p(torch.exp(dt + dt_bias))
    a = -torch.exp(A_log) * step
    stepped = x * step.unsqueeze(-1) if double_step else x
    pieces = []
    for start in range(0, length, reset or length):
        end = start + (reset or length)
        state = torch.zeros(batch, heads, x.shape[-1], B.shape[-1], dtype=x.dtype)
        pieces.append(state_space(stepped[:, start:end], a[:, start:end], B[:, start:end], C[:, start:end], state)[0])
    y = torch.cat(pieces, dim=1)
    if skip:
        y = y + D[:, None] * (stepped if scaled_skip else x)
    y = y.flatten(2)
    normed = (y if gate_late else y * _silu(gate)).view(batch, length, 1 if one_group else groups, -1)
    normed = (normed / (normed.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(2) * norm_weight
    return ((normed * _silu(gate) if gate_late else normed) @ out_proj.t()).to(rounded)


def test_anchor_is_the_layer_token_by_token():
    problem = case("p63")
    expected = _by_token(*promoted(*problem.inputs))
    torch.testing.assert_close(problem.anchor[0], expected, rtol=1e-9, atol=1e-11)
    assert problem.accepts(_by_token)


@pytest.mark.parametrize(
    "mistake",
    [
        {"tiled": True},
        {"reset": p63.CHUNK},
        {"gate_late": True},
        {"one_group": True},
        {"skip": False},
        {"scaled_skip": True},
        {"reversed_taps": True},
        {"only_x_activated": True},
        {"double_step": False},
    ],
    ids=lambda mistake: next(iter(mistake)),
)
def test_a_wrong_layer_is_refused(mistake):
    assert not case("p63").accepts(lambda *inputs: _by_token(*inputs, **mistake))


def test_smoke_has_a_ragged_last_chunk():
    assert p63.SMOKE.length > 2 * p63.CHUNK and p63.SMOKE.length % p63.CHUNK


def test_cost_is_that_of_the_fact_sheet():
    cost = p63.cost(p63.FULL)
    assert cost.bytes == 1_011_066_368
    assert cost.flops["bf16"] == pytest.approx(3.591e12 + 68.7e9, rel=1e-3)
