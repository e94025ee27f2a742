import torch
from torch.nn.functional import gelu, linear

from metakernelbench.grading.compare import promote
from metakernelbench.problems.mlp_norm import p30_gelu_grn_mlp as p30
from tests.problems.mistakes import accepted, altered
from tests.problems.support import case


def image_by_image(x, w1, b1, gamma, beta, w2, b2, eps, approximate="none", residual=1, plane=(0, 1)):
    """In float64, one image at a time, with torch's own norm."""
    outputs = []
    for image in x.double():
        h = gelu(linear(image, w1.double(), b1.double()), approximate=approximate)
        norm = torch.linalg.vector_norm(h, dim=plane, keepdim=True)
        response = norm / (norm.sum(dim=-1, keepdim=True) / norm.shape[-1] + eps)
        h = gamma.double()[0] * h * response + beta.double()[0] + residual * h
        outputs.append(linear(h, w2.double(), b2.double()))
    return torch.stack(outputs).to(x.dtype)


def norm_over_the_batch(x, *parameters):
    images, height, breadth, channels = x.shape
    tall = x.reshape(1, images * height, breadth, channels)
    return p30.reference(tall, *parameters).reshape(x.shape)


def test_agrees_with_images_done_one_at_a_time_in_float64():
    draw = case("p30")
    assert draw.accepts(image_by_image)
    torch.testing.assert_close(draw.anchor[0], image_by_image(*promote(draw.inputs)))


def test_cost_is_that_of_the_sheet():
    cost = p30.cost(p30.FULL)
    assert (cost.bytes_read, cost.bytes_written) == (103_291_392, 102_760_448)
    assert cost.flops == {"fp32_matrix": 52_613_349_376}


def test_wrong_implementations_are_rejected():
    draw = case("p30")
    wrong = {
        "tanh GELU": lambda *x: image_by_image(*x, approximate="tanh"),
        "response left out of the residual sum": lambda *x: image_by_image(*x, residual=0),
        "norm over rows only": lambda *x: image_by_image(*x, plane=(0,)),
        "norm over the whole batch": norm_over_the_batch,
        "response not weighted": altered(p30.reference, grn_weight=torch.ones_like),
        "response not shifted": altered(p30.reference, grn_bias=torch.zeros_like),
        "first bias missing": altered(p30.reference, pwconv1_bias=torch.zeros_like),
        "second bias missing": altered(p30.reference, pwconv2_bias=torch.zeros_like),
        "another eps": altered(p30.reference, eps=lambda _: 1e-3),
        "operands rounded to bf16": altered(p30.reference, pwconv1_weight=lambda w: w.bfloat16().float()),
    }
    assert accepted(draw, wrong) == []
