import torch
from torch.nn.functional import gelu, silu

from metakernelbench.problems.quantization import p53_mlp_gate_up_projection_fp8 as p53
from tests.problems.mistakes import accepted, altered
from tests.problems.quantization import fp8_by_blocks as blocks
from tests.problems.support import case


def gated(x, scale_x, gate, scale_gate, up, scale_up, activation=silu):
    """In float64, block after block, rounded once."""
    tokens = x.double(), scale_x.double()
    g = blocks.product(tokens, (gate.double(), scale_gate.double()))
    u = blocks.product(tokens, (up.double(), scale_up.double()))
    return (activation(g) * u).to(torch.bfloat16)


def up_scales_for_both(x, scale_x, gate, _, up, scale_up):
    return p53.reference(x, scale_x, gate, scale_up, up, scale_up)


def test_agrees_with_products_of_blocks_in_float64():
    draw = case("p53")
    assert torch.equal(draw.anchor[0], gated(*draw.inputs))
    assert draw.accepts(gated)


def test_cost_is_that_of_the_sheet():
    cost = p53.cost(p53.FULL)
    assert cost.bytes == 497_770_880
    assert cost.flops == {"fp8": 2 * 2 * 8704 * 3584 * 18944}


def test_wrong_implementations_are_rejected():
    draw = case("p53")
    wrong = {
        "gate and up swapped": lambda x, s, *w: p53.reference(x, s, *w[2:], *w[:2]),
        "scales of up for both": up_scales_for_both,
        "no activation": lambda *x: gated(*x, activation=lambda g: g),
        "GELU gate": lambda *x: gated(*x, activation=gelu),
        "activation scales ignored": altered(p53.reference, scale_x=torch.ones_like),
        "activation scales of the block before": altered(p53.reference, scale_x=lambda s: s.roll(1, 1)),
        "gate scales of the block above": altered(p53.reference, scale_gate=lambda s: s.roll(1, 0)),
        "up scales transposed": altered(p53.reference, scale_up=lambda s: s.T.reshape(s.shape)),
    }
    assert accepted(draw, wrong) == []
