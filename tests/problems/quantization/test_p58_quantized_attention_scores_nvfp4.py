import torch

from metakernelbench.problems.formats import nvfp4
from metakernelbench.problems.quantization import p58_quantized_attention_scores_nvfp4 as p58
from tests.problems.mistakes import accepted, altered, one_output_off
from tests.problems.quantization.nvfp4_changed import through_nvfp4
from tests.problems.support import case


def head_by_head(q, k, v, mask, quantize=through_nvfp4, along_channels=False, scale=None):
    """In float64 without roundings to bf16, one head at a time; every tensor is quantised whole, before it is split."""
    group = q.shape[1] // k.shape[1]
    queries, keys = quantize(q), quantize(k)
    turned = v.transpose(-1, -2)
    values = through_nvfp4(v) if along_channels else through_nvfp4(turned).transpose(-1, -2)
    probabilities = torch.empty(*q.shape[:3], k.shape[2], dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            scores = queries[b, h] @ keys[b, h // group].T * (scale or q.shape[-1] ** -0.5)
            exponentials = torch.exp(scores) * (mask[b, 0] == 0)
            probabilities[b, h] = exponentials / exponentials.sum(-1, keepdim=True)
    output = through_nvfp4(probabilities) @ values.repeat_interleave(group, dim=1)
    return output.to(q.dtype), probabilities.to(q.dtype)


def test_agrees_with_heads_done_one_at_a_time():
    draw = case("p58")
    assert draw.accepts(head_by_head)
    q, k, v, mask = draw.inputs
    for actual, expected in zip(draw.anchor, head_by_head(q.double(), k.double(), v.double(), mask), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_probabilities_have_largest_element_one_and_blocks_of_zeros():
    probabilities = case("p58").expected[1]
    codes, scales, number = nvfp4.quantize(probabilities)
    assert probabilities.max() == 1 and float(number) == torch.tensor(1 / 2688).float()
    masked = probabilities.reshape(*probabilities.shape[:-1], -1, 16).count_nonzero(dim=-1) == 0
    assert masked.float().mean() == 0.25
    assert (scales.float()[masked] == 0).all() and codes.view(torch.uint8).reshape(*masked.shape, 8)[masked].sum() == 0


def test_cost_is_that_of_the_sheet():
    cost = p58.cost(p58.FULL)
    assert cost.bytes == 738_197_504
    assert f"{cost.flops['nvfp4'] / 2:.3e}" == "2.156e+10"


def test_wrong_implementations_are_rejected():
    draw = case("p58")
    wrong = {
        "queries and keys not quantised": lambda *x: head_by_head(*x, quantize=torch.Tensor.double),
        "no mask": altered(p58.reference, attention_mask=torch.zeros_like),
        "mask one position late": altered(p58.reference, attention_mask=lambda m: m.triu(2)),
        "not scaled": lambda *x: head_by_head(*x, scale=1.0),
        "scaled twice": lambda *x: head_by_head(*x, scale=1 / 32),
        "key/value heads interleaved": lambda q, k, v, m: p58.reference(q, *(t.repeat(1, 2, 1, 1) for t in (k, v)), m),
        "probabilities returned quantised": one_output_off(p58.reference, 1, through_nvfp4),
        "values of another head": altered(p58.reference, value_states=lambda v: v.flip(1)),
        "values not averaged": lambda q, k, v, m: (v.repeat_interleave(2, 1), p58.reference(q, k, v, m)[1]),
    }
    assert accepted(draw, wrong) == []
