from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from metakernelbench.problems.attention import p13_dual_stream_joint_attention_fibo as p13
from tests.problems.mistakes import altered
from tests.problems.support import case


def normalised(x):
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-6)


def turned(x, angles):
    """x [batch, token, head, 128] with neighbouring pairs of the first 126 dimensions as complex numbers."""
    pairs = torch.view_as_complex(x[..., :126].unflatten(-1, (63, 2)).contiguous())
    turned = torch.view_as_real(pairs * torch.exp(1j * angles)[:, None]).flatten(-2)
    return torch.cat([turned, x[..., 126:]], dim=-1)


def independent(x, t, text, *others, order=(0, 1, 2), rotate_text=False, normalise_text=True):
    """float64, with torch's own attention, and angles from the positions instead of the tables."""
    result_dtype = x.dtype
    x, t, text = x.double(), t.double(), text.double()
    weights, positions, joint = [w.double() for w in others[:14]], others[14:17], others[-1]
    modulation = (t * torch.sigmoid(t)) @ weights[0].T + weights[1]
    parts = modulation.unflatten(-1, (6, -1))[:, :, None]
    shift, scale, gate = (parts[:, i] for i in order)
    y = normalised(x) * (1 + scale) + shift
    q, k, v = ((y @ weights[i].T + weights[i + 1]).unflatten(-1, (-1, 128)) for i in (2, 4, 6))
    frequency = 10000.0 ** (-torch.arange(0, 42, 2, dtype=torch.float64) / 42)
    angles = torch.cat([p[:, None] * frequency for p in positions], dim=-1)
    q, k = turned(q, angles), turned(k, angles)
    if joint:
        e = normalised(text) if normalise_text else text
        k_text, v_text = ((e @ weights[i].T + weights[i + 1]).unflatten(-1, (-1, 128)) for i in (8, 10))
        if rotate_text:
            k_text = turned(k_text, angles[: k_text.shape[1]])
        k, v = torch.cat([k, k_text], dim=1), torch.cat([v, v_text], dim=1)
    attended = scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v))).transpose(1, 2).flatten(2)
    return (x + gate * (attended @ weights[12].T + weights[13])).to(result_dtype)


def test_reference_agrees_with_torch_attention_and_complex_rotation():
    draw = case("p13")
    assert draw.accepts(independent)
    assert torch.allclose(independent(*draw.inputs).double(), draw.anchor[0], atol=1e-5)


def test_without_the_joint_flag_only_the_image_is_attended():
    draw = case("p13")
    inputs = (*draw.inputs[:-1], 0)
    assert torch.allclose(p13.reference(*inputs), independent(*inputs), atol=1e-5)
    assert not draw.accepts(altered(p13.reference, is_joint_block=lambda _: 0))


def test_cost_is_that_of_the_sheet():
    cost = p13.cost(p13.FULL)
    assert cost.bytes == 482_572_288
    assert f"{cost.flops['fp32_matrix']:.3e}" == "4.254e+11"


def test_wrong_implementations_are_rejected():
    draw = case("p13")

    def halves_instead_of_pairs(x, cos, sin):
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def with_rotation(rotate):
        def implementation(*inputs):
            original, p13.rotate = p13.rotate, rotate
            try:
                return p13.reference(*inputs)
            finally:
                p13.rotate = original

        return implementation

    wrong = {
        "scale and shift swapped": partial(independent, order=(1, 0, 2)),
        "gate of the MLP": partial(independent, order=(0, 1, 5)),
        "text keys rotated": partial(independent, rotate_text=True),
        "halves instead of pairs": with_rotation(halves_instead_of_pairs),
        "no rotation": with_rotation(lambda x, *_: x),
        "positions of the first axis only": altered(
            p13.reference, pos_idx_axis1=torch.zeros_like, pos_idx_axis2=torch.zeros_like
        ),
        "text not normalised": partial(independent, normalise_text=False),
        "output bias forgotten": altered(p13.reference, to_out_bias=torch.zeros_like),
        "inputs in bf16": altered(p13.reference, hidden_states=lambda x: x.bfloat16().float()),
    }
    assert [name for name, implementation in wrong.items() if draw.accepts(implementation)] == []
