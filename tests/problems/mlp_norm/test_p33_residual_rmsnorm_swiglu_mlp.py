import torch
from torch.nn.functional import gelu, rms_norm, silu

from metakernelbench.grading.compare import promote
from metakernelbench.problems.mlp_norm import p33_residual_rmsnorm_swiglu_mlp as p33
from tests.problems.mistakes import accepted, altered
from tests.problems.support import case


def block(x, residual, norm_weight, gate, up, down, eps, activation=lambda z: z / (1 + torch.exp(-z))):
    """In float64 without any rounding inside, from torch's own RMS norm and the formula of the gate."""
    normalised = rms_norm(x.double() + residual.double(), norm_weight.shape, norm_weight.double(), eps)
    inner = activation(normalised @ gate.double().T) * (normalised @ up.double().T)
    return (inner @ down.double().T).to(x.dtype)


def test_agrees_with_the_formula_in_float64():
    draw = case("p33")
    assert draw.accepts(block)
    torch.testing.assert_close(draw.anchor[0], block(*promote(draw.inputs)))


def test_the_sum_and_the_normalised_value_are_rounded_on_the_way():
    x, residual, weight, gate, up, down, eps = case("p33").inputs
    total = (x.float() + residual.float()).bfloat16().float()
    rounded = rms_norm(total, weight.shape, eps=eps).bfloat16() * weight
    expected = (silu(rounded @ gate.T) * (rounded @ up.T)) @ down.T
    torch.testing.assert_close(p33.reference(*case("p33").inputs), expected, rtol=2**-6, atol=2**-7)


def without_norm(x, residual, norm_weight, gate, up, down, _):
    total = norm_weight * (x + residual)
    return (silu(total @ gate.T) * (total @ up.T)) @ down.T


def test_cost_is_that_of_the_sheet():
    cost = p33.cost(p33.FULL)
    assert (cost.bytes_read, cost.bytes_written) == (5_771_395_072, 268_435_456)
    assert cost.flops == {"bf16": 42_880_953_483_264}


def test_wrong_implementations_are_rejected():
    draw = case("p33")
    wrong = {
        "no residual": altered(p33.reference, residual=torch.zeros_like),
        "residual added to the result": lambda x, r, *others: p33.reference(x, r, *others) + r,
        "no norm weight": altered(p33.reference, norm_weight=torch.ones_like),
        "no norm": without_norm,
        "gate and up swapped": lambda x, r, w, gate, up, *others: p33.reference(x, r, w, up, gate, *others),
        "GELU gate": lambda *x: block(*x, activation=gelu),
        "no activation": lambda *x: block(*x, activation=lambda z: z),
        "eps of another scale": altered(p33.reference, eps=lambda _: 0.3),
    }
    assert accepted(draw, wrong) == []
