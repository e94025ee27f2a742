import math

import torch

from metakernelbench.grading.compare import promote
from metakernelbench.problems.mlp_norm import p29_gelu_feedforward as p29
from tests.problems.mistakes import accepted, altered
from tests.problems.support import case


def tanh_gelu(x, cubic=0.044715):
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + cubic * x**3)))


def erf_gelu(x):
    return x / 2 * (1 + torch.erf(x / math.sqrt(2)))


def feedforward(x, w1, b1, w2, b2, activation=tanh_gelu):
    """In float64, from formulas."""
    inner = activation(x.double() @ w1.double().T + b1.double())
    return (inner @ w2.double().T + b2.double()).to(x.dtype)


def test_agrees_with_the_formula_in_float64():
    draw = case("p29")
    assert draw.accepts(feedforward)
    torch.testing.assert_close(draw.anchor[0], feedforward(*promote(draw.inputs)))


def test_cost_is_that_of_the_sheet():
    cost = p29.cost(p29.FULL)
    assert (cost.bytes_read, cost.bytes_written) == (503_377_920, 201_326_592)
    assert cost.flops == {"fp32_matrix": 2_473_901_162_496}


def test_wrong_implementations_are_rejected():
    draw = case("p29")
    wrong = {
        "exact GELU": lambda *x: feedforward(*x, activation=erf_gelu),
        "sigmoid GELU": lambda *x: feedforward(*x, activation=lambda y: y * torch.sigmoid(1.702 * y)),
        "cubic coefficient with two digits": lambda *x: feedforward(*x, activation=lambda y: tanh_gelu(y, 0.045)),
        "first bias missing": altered(p29.reference, fc1_bias=torch.zeros_like),
        "second bias missing": altered(p29.reference, fc2_bias=torch.zeros_like),
        "operands rounded to bf16": altered(p29.reference, fc1_weight=lambda w: w.bfloat16().float()),
        "operands rounded to ten bits, as TF32 does": altered(p29.reference, fc2_weight=lambda w: w.half().float()),
        "result rounded to bf16": lambda *x: p29.reference(*x).bfloat16().float(),
    }
    assert accepted(draw, wrong) == []
