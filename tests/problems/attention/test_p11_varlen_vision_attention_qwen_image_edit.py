from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from metakernelbench.problems.attention import p11_varlen_vision_attention_qwen_image_edit as p11
from tests.problems.mistakes import altered
from tests.problems.support import case


def independent(
    hidden, ends, cos, sin, qkv_weight, qkv_bias, proj_weight, proj_bias, *, causal=False, scale=None, packed=True
):
    """float64 throughout: complex rotation, and one attention over all tokens with a mask of equal sequences."""
    tokens, heads, size = cos.shape
    x = hidden.double() @ qkv_weight.double().T + qkv_bias.double()
    q, k, v = x.view(tokens, 3, heads, size).permute(1, 2, 0, 3)
    turn = torch.complex(cos.double(), sin.double())[..., : size // 2].transpose(0, 1)

    def rotated(y):
        y = torch.complex(y[..., : size // 2], y[..., size // 2 :]) * turn
        return torch.cat([y.real, y.imag], dim=-1)

    sequence = torch.searchsorted(ends, torch.arange(tokens), right=True)
    same = sequence[:, None] == sequence if packed else torch.ones(tokens, tokens, dtype=torch.bool)
    mask = same.tril() if causal else same
    attended = scaled_dot_product_attention(rotated(q), rotated(k), v, attn_mask=mask, scale=scale)
    y = attended.transpose(0, 1).flatten(1) @ proj_weight.double().T + proj_bias.double()
    return y.to(hidden.dtype)


def test_reference_agrees_with_torch_attention_under_a_block_mask():
    draw = case("p11")
    assert draw.accepts(independent)
    exact = independent(*(x.double() if x.is_floating_point() else x for x in draw.inputs))
    assert torch.allclose(exact, draw.anchor[0], atol=1e-12)


def test_positions_restart_in_every_sequence():
    cos = case("p11").inputs[2]
    assert torch.equal(cos[7], cos[0])
    assert torch.equal(cos[10], cos[0])
    assert torch.equal(cos[:, 0], cos[:, 3])
    assert not torch.equal(cos[1], cos[0])


def test_vectorized_passes_the_contract():
    assert case("p11").accepts(p11.vectorized)


def test_cost_is_that_of_the_sheet():
    cost = p11.cost(p11.FULL)
    assert cost.bytes == 76_686_560
    assert f"{cost.flops['bf16']:.3e}" == "8.818e+10"


def test_wrong_implementations_are_rejected():
    draw = case("p11")
    wrong = {
        "causal": partial(independent, causal=True),
        "across sequences": partial(independent, packed=False),
        "boundary off by one": altered(p11.reference, cu_seqlens=lambda x: torch.cat([x[:-1] - 1, x[-1:]])),
        "scale of the width": partial(independent, scale=32**-0.5),
        "no rotation": altered(p11.reference, cos=torch.ones_like, sin=torch.zeros_like),
        "rotation backwards": altered(p11.reference, sin=lambda x: -x),
        "no QKV bias": altered(p11.reference, qkv_bias=torch.zeros_like),
        "no output bias": altered(p11.reference, proj_bias=torch.zeros_like),
        "weight in FP8": altered(p11.reference, qkv_weight=lambda x: x.to(torch.float8_e4m3fn).to(x.dtype)),
    }
    assert [name for name, implementation in wrong.items() if draw.accepts(implementation)] == []
