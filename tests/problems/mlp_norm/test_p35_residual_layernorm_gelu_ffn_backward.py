import torch
from torch.nn.functional import gelu, layer_norm, linear

from metakernelbench.problems.mlp_norm import p35_residual_layernorm_gelu_ffn_backward as p35
from tests.problems.mistakes import accepted, altered, one_output_off
from tests.problems.support import case


def by_autograd(grad_output, h, w1, _a, _g, w2, _n, _var, gamma, eps):
    """Through torch's own LayerNorm and GELU in float64, with zero biases, ignoring what was saved."""
    leaves = [h, w1, torch.zeros(w1.shape[0]), w2, torch.zeros(w2.shape[0]), gamma, torch.zeros_like(gamma)]
    with torch.enable_grad():
        x, w1, b1, w2, b2, gamma, beta = leaves = [t.double().requires_grad_() for t in leaves]
        y = linear(gelu(linear(x, w1, b1), approximate="tanh"), w2, b2) + x
        z = layer_norm(y, gamma.shape, gamma, beta, eps)
        gradients = torch.autograd.grad(z, leaves, grad_output.double())
    return tuple(g.to(grad_output.dtype) for g in gradients)


def consistent_in_float64(inputs):
    grad_output, h, w1, _, _, w2, _, _, gamma, eps = (x.double() if isinstance(x, torch.Tensor) else x for x in inputs)
    a = linear(h, w1)
    g = gelu(a, approximate="tanh")
    y = linear(g, w2) + h
    var = y.var(dim=-1, correction=0, keepdim=True)
    n = layer_norm(y, y.shape[-1:], eps=eps)
    return grad_output, h, w1, a, g, w2, n, var, gamma, eps


def test_gradients_agree_with_autograd():
    inputs = consistent_in_float64(case("p35").inputs)
    for actual, expected in zip(p35.reference(*inputs), by_autograd(*inputs), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_saved_tensors_follow_from_the_others():
    draw = case("p35")
    exact = consistent_in_float64(draw.inputs)
    for place in (3, 4, 6, 7):
        torch.testing.assert_close(draw.inputs[place].double(), exact[place], rtol=2e-5, atol=2e-6)


def test_gelu_output_may_be_recomputed_which_is_why_the_cost_leaves_it_out():
    def recomputed(*inputs):
        return p35.reference(*inputs[:4], gelu(inputs[3], approximate="tanh"), *inputs[5:])

    assert case("p35").accepts(recomputed)


def test_cost_is_that_of_the_sheet():
    cost = p35.cost(p35.FULL)
    assert cost.bytes == 1_156_873_984
    assert cost.flops == {"fp32_matrix": 583_578_681_344}


def test_wrong_implementations_are_rejected():
    draw = case("p35")
    width = draw.inputs[8].shape[0]
    wrong = {
        "no residual path": one_output_off(p35.reference, 0, lambda g: g - residual_path(*draw.inputs)),
        "no projection on the normalised row": altered(p35.reference, normalized=torch.zeros_like),
        "weight of the norm ignored": altered(p35.reference, ln_weight=torch.ones_like),
        "variance not brought in": altered(p35.reference, var=torch.ones_like),
        "unbiased variance": altered(p35.reference, var=lambda v: v * width / (width - 1)),
        "derivative of the exact GELU": derivative_of_exact_gelu,
        "norm weight gradient without the normalised row": one_output_off(p35.reference, 5, lambda g: g * 0 + 1),
        "bias gradients swapped": lambda *x: tuple(p35.reference(*x)[i] for i in (0, 1, 2, 3, 6, 5, 4)),
        "operands rounded to bf16": altered(p35.reference, fc2_weight=lambda w: w.bfloat16().float()),
        "operands rounded to ten bits, as TF32 does": altered(p35.reference, gelu_output=lambda g: g.half().float()),
        "eps of another scale": altered(p35.reference, eps=lambda _: 1e-4),
    }
    assert accepted(draw, wrong) == []


def residual_path(grad_output, _h, _w1, _a, _g, _w2, n, var, gamma, eps):
    grad_n = grad_output * gamma
    centred = grad_n - grad_n.mean(-1, keepdim=True) - n * (grad_n * n).mean(-1, keepdim=True)
    return centred * torch.rsqrt(var + eps)


def derivative_of_exact_gelu(*inputs):
    a = inputs[3]
    exact = 0.5 * (1 + torch.erf(a / 2**0.5)) + a * torch.exp(-(a**2) / 2) / (2 * torch.pi) ** 0.5
    grad_a = linear(residual_path(*inputs), inputs[5].T) * exact
    right = p35.reference(*inputs)
    return *right[:2], grad_a.sum((0, 1)), *right[3:]
