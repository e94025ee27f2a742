import torch
from torch.nn.functional import rms_norm

from metakernelbench.grading.compare import promote
from metakernelbench.problems.mlp_norm import p41_qkv_per_head_rmsnorm as p41
from tests.problems.mistakes import accepted, altered, one_output_off
from tests.problems.support import case


def head_by_head(x, q_weight, k_weight, v_weight, q_norm, k_norm, eps):
    """In float64, one head at a time, with torch's own RMS norm."""
    size = q_norm.shape[0]
    outputs = []
    for weight, norm in ((q_weight, q_norm), (k_weight, k_norm), (v_weight, None)):
        heads = []
        for start in range(0, weight.shape[0], size):
            head = x.double() @ weight[start : start + size].double().T
            heads.append(head if norm is None else rms_norm(head, (size,), norm.double(), eps))
        outputs.append(torch.stack(heads, dim=2).to(x.dtype))
    return tuple(outputs)


def norm_over_all_heads(x, q_weight, k_weight, v_weight, q_norm, k_norm, eps):
    right = p41.reference(x, q_weight, k_weight, v_weight, q_norm, k_norm, eps)
    flat = x @ q_weight.T
    query = rms_norm(flat, flat.shape[-1:], q_norm.repeat(4), eps).reshape(right[0].shape)
    return query, *right[1:]


def test_agrees_with_heads_done_one_at_a_time():
    draw = case("p41")
    assert draw.accepts(head_by_head)
    for actual, expected in zip(draw.anchor, head_by_head(*promote(draw.inputs)), strict=True):
        torch.testing.assert_close(actual, expected)


def test_cost_is_that_of_the_sheet():
    cost = p41.cost(p41.FULL)
    assert (cost.bytes_read, cost.bytes_written) == (46_138_368, 100_663_296)
    assert cost.flops == {"fp32_matrix": 51_539_607_552}


def test_wrong_implementations_are_rejected():
    draw = case("p41")
    wrong = {
        "norm over all heads together": norm_over_all_heads,
        "norm weights swapped": lambda *x: p41.reference(*x[:4], x[5], x[4], x[6]),
        "norm weight applied as 1 + weight": altered(p41.reference, k_norm_weight=lambda w: w + 1),
        "values normalised too": one_output_off(p41.reference, 2, lambda v: rms_norm(v, v.shape[-1:])),
        "keys 1% too large": one_output_off(p41.reference, 1, lambda k: k * 1.01),
        "another eps": altered(p41.reference, eps=lambda _: 1e-5),
        "queries and keys swapped": lambda *x: tuple(p41.reference(*x)[i] for i in (1, 0, 2)),
        "heads interleaved": altered(
            p41.reference, v_weight=lambda w: w.reshape(16, 4, -1).transpose(0, 1).flatten(0, 1)
        ),
        "operands rounded to ten bits, as TF32 does": altered(p41.reference, v_weight=lambda w: w.half().float()),
    }
    assert accepted(draw, wrong) == []
