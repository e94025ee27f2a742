from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention, softplus

from metakernelbench.problems.attention import p12_relative_position_local_attention_gemma3n as p12
from tests.problems.mistakes import altered
from tests.problems.support import case


def independent(
    x, mask, q_weight, k_weight, v_weight, pos_weight, scale, inverse, cap, *, window=12, cosines_first=False
):
    """The closed form: all pairs of frames, of which a band is admitted; float64."""
    x, inverse = x.double(), inverse.double()
    batch, frames, _ = x.shape
    heads = (-1, scale.shape[0])
    q, k, v = ((x @ w.double().T).unflatten(-1, heads).transpose(1, 2) for w in (q_weight, k_weight, v_weight))
    q = q / scale.shape[0] ** 0.5 * torch.log2(1 + scale.double().exp())  # softplus / ln 2, from its definition
    distance = torch.arange(frames)[:, None] - torch.arange(frames)
    parts = [torch.sin(distance[..., None] * inverse), torch.cos(distance[..., None] * inverse)]
    table = torch.cat(parts[::-1] if cosines_first else parts, dim=-1)
    relative = (table @ pos_weight.double().T).unflatten(-1, heads)
    logits = q @ k.mT + torch.einsum("bhtd,tshd->bhts", q, relative)
    admitted = (distance >= 0) & (distance <= window) & ~mask[:, None, None, :]
    bias = torch.where(admitted, cap * torch.tanh(logits / cap), -torch.inf)
    nothing = torch.zeros(batch, q.shape[1], frames, 1, dtype=torch.float64)
    return scaled_dot_product_attention(nothing, nothing, v, attn_mask=bias).transpose(1, 2).float()


def test_reference_agrees_with_the_closed_form():
    draw = case("p12")
    assert draw.accepts(independent)
    assert torch.allclose(independent(*draw.inputs).double(), draw.anchor[0], atol=1e-6)


def test_every_frame_admits_a_key_and_only_a_short_end_is_padding():
    mask = case("p12").inputs[1]
    lengths = (~mask).sum(1)
    assert ((lengths >= 29) & (lengths <= 41)).all()
    assert all(not m[:n].any() and m[n:].all() for m, n in zip(mask, lengths.tolist(), strict=True))
    assert mask.any()


def test_cost_is_that_of_the_sheet():
    cost = p12.cost(p12.FULL)
    assert cost.bytes == 455_455_552
    assert f"{cost.flops['fp32_matrix']:.3e}" == "1.776e+11"


def test_wrong_implementations_are_rejected():
    draw = case("p12")
    as_softplus_of = lambda f: lambda x: torch.log(torch.expm1(f(softplus(x.double())))).to(x.dtype)  # noqa: E731
    wrong = {
        "window one frame short": partial(independent, window=11),
        "window one frame long": partial(independent, window=13),
        "cosines first": partial(independent, cosines_first=True),
        "no padding mask": altered(p12.reference, mask=torch.zeros_like),
        "no relative positions": altered(p12.reference, pos_proj_weight=torch.zeros_like),
        "no soft cap": altered(p12.reference, attention_logits_soft_cap=lambda x: 1e4 * x),
        "another soft cap": altered(p12.reference, attention_logits_soft_cap=lambda _: 30.0),
        "query scale without 1 / ln 2": altered(p12.reference, per_dim_scale=as_softplus_of(lambda x: x * 0.6931472)),
        "timescales over 256, not 255": altered(p12.reference, inv_timescales=lambda x: x ** (31 / 32)),
        "inputs in bf16": altered(p12.reference, hidden_states=lambda x: x.bfloat16().float()),
    }
    assert [name for name, implementation in wrong.items() if draw.accepts(implementation)] == []
