import torch
from torch.nn.functional import linear, silu

from metakernelbench.problems.mlp_norm import p34_swiglu_mlp_backward as p34
from tests.problems.mistakes import accepted, altered, one_output_off
from tests.problems.support import case


def test_gradients_agree_with_autograd_where_the_activations_are_consistent():
    torch.manual_seed(0)
    grad_output, x, *_, gate_weight, up_weight, down_weight = (t.double() for t in case("p34").inputs)
    leaves = [t.requires_grad_() for t in (x, gate_weight, up_weight, down_weight)]
    gate, up = linear(x, gate_weight), linear(x, up_weight)
    gradients = torch.autograd.grad(linear(silu(gate) * up, down_weight), leaves, grad_output)
    with torch.no_grad():
        actual = p34.reference(grad_output, x, gate, silu(gate), up, gate_weight, up_weight, down_weight)
    for a, expected in zip(actual, gradients, strict=True):
        torch.testing.assert_close(a, expected, rtol=1e-12, atol=1e-12)


def test_cost_is_that_of_the_sheet():
    cost = p34.cost(p34.FULL)
    assert (cost.bytes_read, cost.bytes_written) == (8_388_608_000, 5_502_926_848)
    assert cost.flops == {"bf16": 85_761_906_966_528}


def activation_recomputed(grad, x, gate_pre, _, *others):
    return p34.reference(grad, x, gate_pre, silu(gate_pre), *others)


def gate_projected_again(grad, x, _, activated, up, gate_weight, *others):
    return p34.reference(grad, x, linear(x, gate_weight), activated, up, gate_weight, *others)


def derivative_of_the_sigmoid(grad, x, gate_pre, *others):
    sigmoid = torch.sigmoid(gate_pre.float())
    _, up, _, _, down_weight = others
    grad_gate = ((grad @ down_weight) * up * (sigmoid * (1 - sigmoid))).bfloat16()
    right = p34.reference(grad, x, gate_pre, *others)
    return right[0], grad_gate.flatten(0, 1).T @ x.flatten(0, 1), *right[2:]


def test_wrong_implementations_are_rejected():
    draw = case("p34")
    wrong = {
        "activation recomputed instead of read": activation_recomputed,
        "gate recomputed instead of read": gate_projected_again,
        "gate and up weights swapped": lambda *x: p34.reference(*x[:5], x[6], x[5], x[7]),
        "derivative of the sigmoid for that of silu": derivative_of_the_sigmoid,
        "up path missing from the input gradient": altered(p34.reference, up_weight=torch.zeros_like),
        "gate path missing from the input gradient": altered(p34.reference, gate_weight=torch.zeros_like),
        "down gradient from the gate alone": lambda *x: p34.reference(*x[:4], torch.ones_like(x[4]), *x[5:]),
        "last token left out of a weight gradient": lambda *x: (
            *p34.reference(*x)[:3], p34.reference(x[0][:, :-1], *(t[:, :-1] for t in x[1:5]), *x[5:])[3],
        ),
        "gradients of gate and up swapped": lambda *x: tuple(p34.reference(*x)[i] for i in (0, 2, 1, 3)),
        "input gradient 5% too large": one_output_off(p34.reference, 0, lambda g: 1.05 * g),
    }  # fmt: skip
    assert accepted(draw, wrong) == []
