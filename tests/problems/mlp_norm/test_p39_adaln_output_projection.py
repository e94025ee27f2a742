import torch
from torch.nn.functional import layer_norm, linear, silu

from metakernelbench.grading.compare import promote
from metakernelbench.problems.mlp_norm import p39_adaln_output_projection as p39
from tests.problems.mistakes import accepted, altered
from tests.problems.support import case


def folded(x, conditioning, mod_weight, mod_bias, proj_weight, proj_bias, eps, activation=silu):
    """In float64, item by item, with scale and shift folded into the projection's weight and bias."""
    outputs = []
    for tokens, condition in zip(x.double(), conditioning.double(), strict=True):
        modulation = linear(activation(condition), mod_weight.double(), mod_bias.double())
        scale, shift = modulation[: x.shape[-1]], modulation[x.shape[-1] :]
        weight = proj_weight.double() * (1 + scale)
        bias = proj_weight.double() @ shift + proj_bias.double()
        outputs.append(linear(layer_norm(tokens, x.shape[-1:], eps=eps), weight, bias))
    return torch.stack(outputs).to(x.dtype)


def swapped_halves(w):
    return torch.cat(w.chunk(2)[::-1])


def test_agrees_with_modulation_folded_into_the_projection():
    draw = case("p39")
    assert draw.accepts(folded)
    torch.testing.assert_close(draw.anchor[0], folded(*promote(draw.inputs)))


def test_cost_is_that_of_the_sheet():
    cost = p39.cost(p39.FULL)
    assert (cost.bytes_read, cost.bytes_written) == (177_365_248, 2_097_152)
    assert cost.flops == {"fp32_matrix": 4_429_185_024}


def test_wrong_implementations_are_rejected():
    draw = case("p39")
    wrong = {
        "shift before scale": altered(p39.reference, mod_weight=swapped_halves, mod_bias=swapped_halves),
        "scale without the 1": altered(p39.reference, mod_bias=lambda b: torch.cat((b[:48] - 1, b[48:]))),
        "no activation of the conditioning": lambda *x: folded(*x, activation=lambda c: c),
        "conditioning of another item": altered(p39.reference, conditioning=lambda c: c.roll(1, 0)),
        "another eps": altered(p39.reference, eps=lambda _: 1e-5),
        "no bias in the projection": altered(p39.reference, proj_bias=torch.zeros_like),
        "operands rounded to ten bits, as TF32 does": altered(p39.reference, proj_weight=lambda w: w.half().float()),
        "modulation in bf16": altered(p39.reference, mod_weight=lambda w: w.bfloat16().float()),
    }
    assert accepted(draw, wrong) == []
