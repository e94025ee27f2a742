import torch
from torch.nn.functional import rms_norm

from metakernelbench.problems.quantization import p54_qkv_projection_qk_norm_fp8 as p54
from tests.problems.mistakes import accepted, altered, one_output_off
from tests.problems.quantization import fp8_by_blocks as blocks
from tests.problems.support import case


def head_by_head(x, q_weight, k_weight, v_weight, q_bias, k_bias, v_bias, q_norm, k_norm, eps, change=lambda q: q):
    """In float64 without roundings to bf16, one head at a time, with torch's own RMS norm."""
    tokens, outputs = blocks.activation(x.reshape(-1, x.shape[-1])), []
    for weight, bias, norm in ((q_weight, q_bias, q_norm), (k_weight, k_bias, k_norm), (v_weight, v_bias, None)):
        y = blocks.product(tokens, change(blocks.weight(weight))) + bias.double()
        heads = []
        for head in y.split(128, dim=1):
            normalised = head if norm is None else rms_norm(head, norm.shape, norm.double(), eps)
            heads.append(normalised.reshape(*x.shape[:2], 128))
        outputs.append(torch.stack(heads, dim=1).to(x.dtype))
    return tuple(outputs)


def test_agrees_with_heads_done_one_at_a_time_in_float64():
    draw = case("p54")
    assert draw.accepts(head_by_head)
    promoted = (x.double() if isinstance(x, torch.Tensor) else x for x in draw.inputs)
    for actual, expected in zip(draw.anchor, head_by_head(*promoted), strict=True):
        torch.testing.assert_close(actual, expected)


def test_cost_is_that_of_the_sheet():
    cost = p54.cost(p54.FULL)
    assert cost.bytes == 719_867_392
    assert cost.flops == {"fp8": 2 * 16384 * 7680 * (7680 + 2048)}


def test_wrong_implementations_are_rejected():
    draw = case("p54")
    wrong = {
        "no query bias": altered(p54.reference, q_bias=torch.zeros_like),
        "no value bias": altered(p54.reference, v_bias=torch.zeros_like),
        "norm weights swapped": lambda *x: p54.reference(*x[:7], x[8], x[7], x[9]),
        "query norm weight ignored": altered(p54.reference, q_norm_weight=torch.ones_like),
        "values normalised": one_output_off(p54.reference, 2, lambda v: rms_norm(v, v.shape[-1:])),
        "bias added after the norm": lambda *x: one_output_off(
            altered(p54.reference, k_bias=torch.zeros_like), 1, lambda k: k + x[5]
        )(*x),
        "keys and values swapped": lambda *x: tuple(p54.reference(*x)[i] for i in (0, 2, 1)),
        "one scale for a whole weight": lambda *x: head_by_head(*x, change=blocks.unscaled),
        "weight scales of the block before": lambda *x: head_by_head(*x, change=blocks.neighbour_scales),
        "eps of another scale": altered(p54.reference, eps=lambda _: 0.5),
        "heads in another order": one_output_off(p54.reference, 0, lambda q: q.roll(1, 1)),
    }
    assert accepted(draw, wrong) == []
