import torch
from torch.nn.functional import scaled_dot_product_attention

from metakernelbench.problems.formats.nvfp4 import Nvfp4
from metakernelbench.problems.quantization import p57_qkvo_attention_block_nvfp4 as p57
from tests.problems.mistakes import accepted, altered
from tests.problems.quantization.nvfp4_changed import ones_for_scales, swapped_nibbles, through_nvfp4, values
from tests.problems.support import case


def block(x, cos, sin, *weights, quantize_input=through_nvfp4, causal=True, repeat=torch.repeat_interleave):
    """In float64 without roundings to bf16: complex rotation, torch's own attention."""
    q, k, v, o = (values(Nvfp4(*weights[i : i + 3])) for i in (0, 3, 6, 9))
    batch, length, size = cos.shape
    tokens = quantize_input(x.flatten(0, 1))
    query, key, value = ((tokens @ w.T).reshape(batch, length, -1, size).transpose(1, 2) for w in (q, k, v))

    def rotated(heads):
        first, second = heads.chunk(2, dim=-1)
        (cos_a, cos_b), (sin_a, sin_b) = (t.double()[:, None].chunk(2, dim=-1) for t in (cos, sin))
        return torch.cat((first * cos_a - second * sin_a, second * cos_b + first * sin_b), dim=-1)

    group = query.shape[1] // key.shape[1]
    key, value = repeat(rotated(key), group, 1), repeat(value, group, 1)
    attended = scaled_dot_product_attention(rotated(query), key, value, is_causal=causal)
    attended = attended.transpose(1, 2).reshape(batch * length, -1)
    return (through_nvfp4(attended) @ o.T).reshape(x.shape).to(x.dtype)


def heads_interleaved(x, group, dim):
    return torch.cat([x] * group, dim=dim)


def test_agrees_with_torch_attention_in_float64():
    draw = case("p57")
    assert draw.accepts(block)
    promoted = (x.double() if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 else x for x in draw.inputs)
    torch.testing.assert_close(draw.anchor[0], block(*promoted))


def test_cost_is_that_of_the_sheet():
    cost = p57.cost(p57.FULL)
    assert cost.bytes == 357_564_416
    assert f"{cost.flops['nvfp4']:.4e}" == "2.4739e+12"
    assert f"{cost.flops['bf16'] / 2:.3e}" == "8.657e+09"


def test_wrong_implementations_are_rejected():
    draw = case("p57")
    wrong = {
        "input not quantised": lambda *x: block(*x, quantize_input=torch.Tensor.double),
        "not causal": lambda *x: block(*x, causal=False),
        "key/value heads interleaved": lambda *x: block(*x, repeat=heads_interleaved),
        "rotation backwards": altered(p57.reference, sin=torch.neg),
        "no rotation": altered(p57.reference, cos=torch.ones_like, sin=torch.zeros_like),
        "both halves of cos taken as alike": altered(p57.reference, cos=lambda c: c[..., :32].repeat(1, 1, 2)),
        "cos of another sequence": altered(p57.reference, cos=lambda c: c.flip(0)),
        "keys and values swapped": lambda *x: p57.reference(*x[:6], *x[9:12], *x[6:9], *x[12:]),
        "block scales of the output weight ignored": altered(p57.reference, o_scale=ones_for_scales),
        "global scale of the values left out": altered(p57.reference, v_global=lambda _: 1.0),
        "elements of a byte swapped": altered(p57.reference, v_weight=swapped_nibbles),
        "scores not scaled": altered(p57.reference, q_global=lambda g: 8 * g),
    }
    assert accepted(draw, wrong) == []
