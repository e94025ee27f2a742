import torch
from torch.nn.functional import group_norm

from metakernelbench.grading.compare import promote
from metakernelbench.problems.mlp_norm import p31_group_norm as p31
from tests.problems.mistakes import accepted, altered
from tests.problems.support import case


def by_torch(x, weight, bias, eps, groups=32):
    return group_norm(x.double(), groups, weight.double(), bias.double(), eps).to(x.dtype)


def unbiased(x, weight, bias, eps):
    size = x[0].numel() / 32
    normalised = by_torch(x, torch.ones_like(weight), torch.zeros_like(bias), eps) * ((size - 1) / size) ** 0.5
    return normalised * weight[:, None, None] + bias[:, None, None]


def interleaved_groups(x, weight, bias, eps):
    order = torch.arange(x.shape[1]).reshape(-1, 32).T.flatten()
    back = order.argsort()
    return by_torch(x[:, order], weight[order], bias[order], eps)[:, back]


def test_agrees_with_torch_group_norm_in_float64():
    draw = case("p31")
    assert draw.accepts(by_torch)
    torch.testing.assert_close(draw.anchor[0], by_torch(*promote(draw.inputs)))


def test_cost_is_that_of_the_sheet():
    cost = p31.cost(p31.FULL)
    assert (cost.bytes_read, cost.bytes_written, cost.flops) == (10_496_000, 10_485_760, {})


def test_wrong_implementations_are_rejected():
    draw = case("p31")
    wrong = {
        "16 groups": lambda *x: by_torch(*x, groups=16),
        "groups of channels that lie apart": interleaved_groups,
        "unbiased variance": unbiased,
        "another eps": altered(p31.reference, eps=lambda _: 1e-6),
        "no weight": altered(p31.reference, weight=torch.ones_like),
        "no bias": altered(p31.reference, bias=torch.zeros_like),
        "bf16 inside": altered(p31.reference, x=lambda x: x.bfloat16().float()),
    }
    assert accepted(draw, wrong) == []
