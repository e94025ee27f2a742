import torch
from torch.nn.functional import rms_norm

from metakernelbench.grading.compare import promote
from metakernelbench.problems.mlp_norm import p36_rmsnorm_h128 as p36
from tests.problems.mistakes import accepted, altered
from tests.problems.support import case


def by_torch(hidden_states, weight, eps=p36.EPS):
    return rms_norm(hidden_states.double(), weight.shape, weight.double(), eps).to(hidden_states.dtype)


def mean_removed(hidden_states, weight):
    x = hidden_states.float()
    return by_torch((x - x.mean(dim=-1, keepdim=True)).to(hidden_states.dtype), weight)


def mean_over_half(hidden_states, weight):
    x = hidden_states.float()
    half = x[:, : x.shape[1] // 2].square().mean(dim=1, keepdim=True)
    return (x * torch.rsqrt(half + p36.EPS) * weight.float()).to(hidden_states.dtype)


def test_agrees_with_torch_rms_norm_in_float64():
    draw = case("p36")
    assert draw.accepts(by_torch)
    torch.testing.assert_close(draw.anchor[0], by_torch(*promote(draw.inputs)))


def test_cost_is_that_of_the_sheet():
    cost = p36.cost(p36.FULL)
    assert (cost.bytes_read, cost.bytes_written, cost.flops) == (133_153_024, 133_152_768, {})


def test_wrong_implementations_are_rejected():
    draw = case("p36")
    wrong = {
        "no weight": altered(p36.reference, weight=torch.ones_like),
        "weight applied as 1 + weight": altered(p36.reference, weight=lambda w: w + 1),
        "LayerNorm": mean_removed,
        "mean over half the width": mean_over_half,
        "sum of squares instead of their mean": lambda *x: by_torch(*x) / p36.WIDTH**0.5,
        "eps of another scale": lambda *x: by_torch(*x, eps=0.3),
        "first row repeated": lambda *x: by_torch(*x)[[0, *range(36)]],
    }
    assert accepted(draw, wrong) == []
