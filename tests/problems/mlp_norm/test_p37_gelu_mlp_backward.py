import torch
from torch.nn.functional import gelu, linear

from metakernelbench.problems.mlp_norm import p37_gelu_mlp_backward as p37
from tests.problems.mistakes import accepted, altered, one_output_off
from tests.problems.support import case


def test_gradients_agree_with_autograd_where_the_activations_are_consistent():
    grad_output, x, w1, w2, *_ = (t.double() for t in case("p37").inputs)
    torch.manual_seed(0)
    b1, b2 = torch.randn(w1.shape[0], dtype=torch.float64), torch.randn(w2.shape[0], dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (x, w1, b1, w2, b2)]
    a = linear(x, w1, b1)
    g = gelu(a, approximate="tanh")
    gradients = torch.autograd.grad(linear(g, w2, b2), leaves, grad_output)
    with torch.no_grad():
        actual = p37.reference(grad_output, x, w1, w2, a, g)
    for value, expected in zip(actual, gradients, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


def test_cost_is_that_of_the_sheet():
    cost = p37.cost(p37.FULL)
    assert (cost.bytes_read, cost.bytes_written) == (805_306_368, 201_367_552)
    assert cost.flops == {"fp32_matrix": 1_099_511_627_776}


def derivative_of_exact_gelu(grad, x, w1, w2, a, g):
    exact = 0.5 * (1 + torch.erf(a / 2**0.5)) + a * torch.exp(-(a**2) / 2) / (2 * torch.pi) ** 0.5
    grad_a = linear(grad, w2.T) * exact
    right = p37.reference(grad, x, w1, w2, a, g)
    return linear(grad_a, w1.T), *right[1:]


def test_wrong_implementations_are_rejected():
    draw = case("p37")
    wrong = {
        "derivative of the exact GELU": derivative_of_exact_gelu,
        "gelu_output recomputed, though it is independent": lambda *x: p37.reference(
            *x[:5], gelu(x[4], approximate="tanh")
        ),
        "fc1_output recomputed, though it is independent": lambda *x: p37.reference(*x[:4], linear(x[1], x[2]), x[5]),
        "no derivative of the activation": altered(p37.reference, fc1_output=lambda a: a + 100),
        "bias gradient averaged": one_output_off(p37.reference, 4, lambda g: g / 12),
        "last token left out of a bias gradient": lambda *x: (
            *p37.reference(*x)[:4],
            p37.reference(*x)[4] - x[0][-1, -1],
        ),
        "operands rounded to bf16": altered(p37.reference, x=lambda x: x.bfloat16().float()),
        "operands rounded to ten bits, as TF32 does": altered(p37.reference, fc1_weight=lambda w: w.half().float()),
    }
    assert accepted(draw, wrong) == []
