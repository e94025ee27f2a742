import torch
from torch.nn.functional import rms_norm

from metakernelbench.problems.mlp_norm import p38_residual_rmsnorm_backward as p38
from tests.problems.mistakes import accepted, altered, one_output_off
from tests.problems.support import case


def test_gradients_agree_with_autograd():
    torch.manual_seed(0)
    hidden, residual, grad = torch.randn(3, 2, 9, 64, dtype=torch.float64)
    weight = torch.randn(64, dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in (hidden, residual, weight)]
    z = rms_norm(leaves[0] + leaves[1], weight.shape, leaves[2], 1e-6)
    gradients = torch.autograd.grad(z, leaves, grad)

    rstd = torch.rsqrt((hidden + residual).square().mean(-1, keepdim=True) + 1e-6)
    actual = p38.reference(grad, (hidden + residual) * rstd, rstd, weight)
    for value, expected in zip(actual, gradients, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


def test_saved_rows_have_mean_square_one_and_different_scales():
    _, normalized, rstd, _ = case("p38").inputs
    torch.testing.assert_close(normalized.square().mean(-1), torch.ones(2, 9))
    assert rstd.max() > 1.3 * rstd.min()


def test_the_same_tensor_may_be_returned_for_both_gradients_which_is_why_the_cost_counts_it_once():
    draw = case("p38")
    grad_hidden, _, grad_weight = p38.reference(*draw.inputs)
    assert draw.accepts_outputs((grad_hidden, grad_hidden, grad_weight))


def test_cost_is_that_of_the_sheet():
    cost = p38.cost(p38.FULL)
    assert (cost.bytes_read, cost.bytes_written, cost.flops) == (8_055_171_072, 2_684_364_800, {})


def test_wrong_implementations_are_rejected():
    draw = case("p38")
    grad, normalized = draw.inputs[0].float(), draw.inputs[1]
    wrong = {
        "no projection on the normalised row": lambda g, n, r, w: (
            *[(r * g.float() * w).to(g.dtype)] * 2, (g.float() * n).sum((0, 1)),
        ),
        "scale of the row ignored": altered(p38.reference, rstd=torch.ones_like),
        "weight ignored": altered(p38.reference, weight=torch.ones_like),
        "weight gradient of the last row left out": one_output_off(
            p38.reference, 2, lambda g: g - (grad * normalized)[-1, -1]
        ),
        "weight gradient rounded to bf16": one_output_off(p38.reference, 2, lambda g: g.bfloat16()),
        "weight gradient averaged": one_output_off(p38.reference, 2, lambda g: g / 18),
        "normalised rows in bf16": altered(p38.reference, normalized=lambda n: n.bfloat16().float()),
        "no gradient at the residual": one_output_off(p38.reference, 1, torch.zeros_like),
    }  # fmt: skip
    assert accepted(draw, wrong) == []
