import torch
from torch.nn.functional import rms_norm

from metakernelbench.problems.quantization import p56_mla_kv_compression_requant_fp8 as p56
from tests.problems.mistakes import accepted, altered, one_output_off
from tests.problems.quantization import fp8_by_blocks as blocks
from tests.problems.support import case


def by_blocks(x, a_weight, norm_weight, b_weight, eps, change=lambda q: q, normalise=rms_norm):
    """In float64 without roundings to bf16, block after block."""
    latent = norm_weight.shape[0]
    compressed = blocks.product(blocks.activation(x.flatten(0, 1)), change(blocks.weight(a_weight)))
    normalised = normalise(compressed[:, :latent], norm_weight.shape, norm_weight.double(), eps)
    kv = blocks.product(blocks.activation(normalised), blocks.weight(b_weight))
    k_rope = compressed[:, latent : latent + 64]
    return kv.reshape(*x.shape[:2], -1, 256).to(x.dtype), k_rope.reshape(*x.shape[:2], 64).to(x.dtype)


def test_agrees_with_products_of_blocks_in_float64():
    draw = case("p56")
    assert draw.accepts(by_blocks)
    promoted = (x.double() if isinstance(x, torch.Tensor) else x for x in draw.inputs)
    kv, k_rope = by_blocks(*promoted)
    torch.testing.assert_close(draw.anchor[1], k_rope)
    # A code of the second quantiser may fall on the other side of a midpoint after another order of summation.
    assert (draw.anchor[0] - kv).abs().max() < 0.02


def test_padding_rows_share_the_scales_of_the_rotary_rows():
    x, a_weight, *others = case("p56").inputs
    padded = a_weight.clone()
    padded[-64:] *= 8
    wider = p56.reference(x, padded, *others)[1]
    assert not torch.equal(wider, p56.reference(x, a_weight, *others)[1])


def test_cost_is_that_of_the_sheet():
    cost = p56.cost(p56.FULL)
    assert cost.bytes == 1_353_450_496
    assert cost.flops == {"fp8": 2 * 16384 * 7168 * 576 + 2 * 16384 * 512 * 32768}


def test_wrong_implementations_are_rejected():
    draw = case("p56")
    wrong = {
        "latent not normalised": lambda *x: by_blocks(*x, normalise=lambda z, _shape, w, _eps: z * w),
        "norm weight ignored": altered(p56.reference, kv_a_layernorm_weight=torch.ones_like),
        "rotary part from the padding": altered(
            p56.reference, kv_a_proj_weight=lambda w: torch.cat((w[:256], w[320:], w[256:320]))
        ),
        "rotary part normalised": one_output_off(p56.reference, 1, lambda k: rms_norm(k, k.shape[-1:])),
        "one scale for the first weight": lambda *x: by_blocks(*x, change=blocks.unscaled),
        "scales of the block before": lambda *x: by_blocks(*x, change=blocks.neighbour_scales),
        "second weight's heads in another order": altered(p56.reference, kv_b_proj_weight=lambda w: w.roll(256, 0)),
        "keys and values swapped within a head": one_output_off(p56.reference, 0, lambda kv: kv.roll(128, -1)),
        "eps of another scale": altered(p56.reference, eps=lambda _: 1.0),
    }
    assert accepted(draw, wrong) == []
