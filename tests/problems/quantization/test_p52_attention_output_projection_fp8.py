import torch

from metakernelbench.problems.quantization import p52_attention_output_projection_fp8 as p52
from tests.problems.mistakes import accepted, altered
from tests.problems.quantization import fp8_by_blocks as blocks
from tests.problems.support import case


def projection(x, w, bias, change_x=lambda q: q, change_w=lambda q: q):
    """In float64, block after block."""
    y = blocks.product(change_x(blocks.activation(x)), change_w(blocks.weight(w)))
    return (y + bias.double()).to(x.dtype)


def test_agrees_with_products_of_blocks_in_float64():
    draw = case("p52")
    assert draw.accepts(projection)
    x, w, bias = draw.inputs
    exact = blocks.product(blocks.activation(x), blocks.weight(w)) + bias.double()
    torch.testing.assert_close(draw.anchor[0], exact)


def test_cost_is_that_of_the_sheet():
    cost = p52.cost(p52.FULL)
    assert cost.bytes == 621_296_640
    assert cost.flops == {"fp8": 2 * 16384 * 7680 * 7680}


def test_wrong_implementations_are_rejected():
    draw = case("p52")
    wrong = {
        "no bias": altered(p52.reference, o_proj_bias=torch.zeros_like),
        "one scale for the whole weight": lambda *x: projection(*x, change_w=blocks.unscaled),
        "weight scales of the block before": lambda *x: projection(*x, change_w=blocks.neighbour_scales),
        "weight scales transposed": lambda *x: projection(*x, change_w=lambda q: (q[0], q[1].T.reshape(q[1].shape))),
        "one scale for all activations": lambda *x: projection(*x, change_x=blocks.unscaled),
        "activation scales of the block before": lambda *x: projection(*x, change_x=blocks.neighbour_scales),
        "only the first block of columns": lambda x, w, b: projection(x[:, :128], w[:, :128], b),
        "nothing quantised": lambda x, w, b: x @ w.T + b,
    }
    assert accepted(draw, wrong) == []
