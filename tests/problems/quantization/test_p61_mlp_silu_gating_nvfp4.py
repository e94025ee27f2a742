import torch
from torch.nn.functional import gelu, linear, silu

from metakernelbench.problems.formats.nvfp4 import Nvfp4
from metakernelbench.problems.quantization import p61_mlp_silu_gating_nvfp4 as p61
from tests.problems.mistakes import accepted, altered
from tests.problems.quantization.nvfp4_changed import (
    of_the_row_above,
    ones_for_scales,
    swapped_nibbles,
    through_nvfp4,
    values,
)
from tests.problems.support import case


def mlp(x, *weights, quantize_x=through_nvfp4, activation=silu):
    """In float64 without roundings to bf16, on weights dequantised first."""
    gate, up, down = (values(Nvfp4(*weights[i : i + 3]))[0] for i in (0, 3, 6))
    tokens = quantize_x(x.flatten(0, 1))
    gated = activation(linear(tokens, gate)) * linear(tokens, up)
    return linear(through_nvfp4(gated), down).reshape(x.shape).to(x.dtype)


def test_agrees_with_a_float64_mlp_on_dequantised_tensors():
    draw = case("p61")
    assert draw.accepts(mlp)
    x, *weights = draw.inputs
    torch.testing.assert_close(draw.anchor[0], mlp(x.double(), *weights))


def test_cost_is_that_of_the_sheet():
    cost = p61.cost(p61.FULL)
    assert cost.bytes == 353_370_112
    assert cost.flops == {"nvfp4": 3 * 2 * 16384 * 4096 * 12288}


def test_wrong_implementations_are_rejected():
    draw = case("p61")
    wrong = {
        "input not quantised": lambda *x: mlp(*x, quantize_x=torch.Tensor.double),
        "gate and up swapped": lambda x, *w: p61.reference(x, *w[3:6], *w[:3], *w[6:]),
        "no activation": lambda *x: mlp(*x, activation=lambda g: g),
        "GELU gate": lambda *x: mlp(*x, activation=gelu),
        "block scales ignored": altered(p61.reference, down_block_scales=ones_for_scales),
        "block scales of the row above": altered(p61.reference, up_block_scales=of_the_row_above),
        "elements of a byte swapped": altered(p61.reference, gate_weight=swapped_nibbles),
        "a global scale left out": altered(p61.reference, down_global_scale=lambda _: 1.0),
    }
    assert accepted(draw, wrong) == []
