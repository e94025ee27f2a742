import torch
from torch.nn.functional import rms_norm

from metakernelbench.grading.compare import promote
from metakernelbench.problems.mlp_norm import p28_fused_add_rmsnorm as p28
from tests.problems.mistakes import accepted, altered
from tests.problems.support import case


def by_torch(hidden_states, residual, weight, eps=p28.EPS):
    x = hidden_states.double() + residual.double()
    return rms_norm(x, weight.shape, weight.double(), eps).to(hidden_states.dtype)


def mean_over_half(hidden_states, residual, weight):
    x = hidden_states.float() + residual.float()
    half = x[:, : x.shape[1] // 2].square().mean(dim=1, keepdim=True)
    return (x * torch.rsqrt(half + p28.EPS) * weight.float()).to(hidden_states.dtype)


def test_agrees_with_torch_rms_norm_in_float64():
    draw = case("p28")
    assert draw.accepts(by_torch)
    torch.testing.assert_close(draw.anchor[0], by_torch(*promote(draw.inputs)))


def test_cost_is_that_of_the_sheet():
    cost = p28.cost(p28.FULL)
    assert (cost.bytes_read, cost.bytes_written, cost.flops) == (237_723_648, 118_857_728, {})


def test_wrong_implementations_are_rejected():
    draw = case("p28")
    wrong = {
        "no residual": altered(p28.reference, residual=torch.zeros_like),
        "residual subtracted": altered(p28.reference, residual=torch.neg),
        "no weight": altered(p28.reference, weight=torch.ones_like),
        "weight applied as 1 + weight": altered(p28.reference, weight=lambda w: w + 1),
        "eps of another scale": lambda *x: by_torch(*x, eps=0.1),
        "sum returned instead": lambda h, r, _: h + r,
        "sum of squares instead of their mean": lambda h, *x: by_torch(h, *x) / h.shape[1] ** 0.5,
        "mean over half the width": mean_over_half,
        "last row repeats the one before": lambda *x: by_torch(*x)[[*range(12), 11]],
    }
    assert accepted(draw, wrong) == []
