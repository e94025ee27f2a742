from dataclasses import replace

import numpy as np
import torch

from metakernelbench.problems.formats.fp8 import from_e4m3_bytes
from metakernelbench.problems.kv_cache import p21_quantized_append_per_token_head_fp8 as p21
from tests.problems.support import CPU, case, clone

POSITIVE = from_e4m3_bytes(torch.arange(127, dtype=torch.uint8), torch.float64).numpy()


def nearest_byte(y: np.ndarray) -> np.ndarray:
    """The E4M3 byte nearest to each value, by search through all of them; ties to the even code."""
    distance = np.abs(np.abs(y.astype(np.float64))[:, None] - POSITIVE)
    tie_break = np.arange(127) % 2 * 1e-12
    code = np.argmin(distance + tie_break, axis=1)
    return (code | np.where(np.signbit(y), 0x80, 0)).astype(np.uint8)


def independent(key, value, slots, key_cache, value_cache, k_scales, v_scales):
    """Token by token and head by head, in numpy's float32."""
    page_size = key_cache.shape[1]
    for t, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        for new, cache, scales in ((key, key_cache, k_scales), (value, value_cache, v_scales)):
            for h in range(key.shape[1]):
                x = new[t, h].float().numpy()
                scale = max(np.abs(x).max() * np.float32(1 / 448), np.float32(1e-6))
                y = np.clip(x * (np.float32(1) / scale), np.float32(-448), np.float32(448))
                cache[slot // page_size, slot % page_size, h] = torch.from_numpy(nearest_byte(y))
                scales[slot // page_size, slot % page_size, h] = float(scale)
    return key_cache, value_cache, k_scales, v_scales


def test_reference_agrees_with_a_loop_over_tokens_and_heads():
    assert case("p21").accepts(independent)


def test_the_caches_come_back_as_the_tensors_given_and_padding_writes_nothing():
    inputs = p21.make_inputs(p21.SMOKE, CPU)
    before = clone(inputs)
    outputs = p21.reference(*inputs)
    assert all(out is given for out, given in zip(outputs, inputs[3:], strict=True))
    written = set(inputs[2].tolist()) - {-1}
    untouched = [s for s in range(24) if s not in written]
    for out, old in zip(outputs, before[3:], strict=True):
        assert torch.equal(out.flatten(0, 1)[untouched], old.flatten(0, 1)[untouched])
        assert not torch.equal(out, old)


def test_a_zero_vector_gets_the_smallest_scale():
    code, scale = p21.quantise(torch.zeros(1, 2, 16, dtype=torch.bfloat16))
    assert code.count_nonzero() == 0
    assert torch.equal(scale, torch.full((1, 2), 1e-6))


def test_cost_is_that_of_the_sheet():
    cost = p21.cost(p21.FULL)
    assert cost.bytes_read == 8_124_416 + 16_384
    assert cost.bytes_written == 4_062_208 + 126_944
    assert not cost.flops


def quantise_with(scale_of, quotient):
    def implementation(key, value, slots, key_cache, value_cache, k_scales, v_scales):
        valid = slots >= 0
        page, offset = slots[valid] // key_cache.shape[1], slots[valid] % key_cache.shape[1]
        for new, cache, scales in ((key, key_cache, k_scales), (value, value_cache, v_scales)):
            x = new[valid].float()
            scale = scale_of(x)
            y = quotient(x, scale).clamp(-448, 448)
            cache[page, offset] = y.to(torch.float8_e4m3fn).view(torch.uint8)
            scales[page, offset] = scale[..., 0]
        return key_cache, value_cache, k_scales, v_scales

    return implementation


def product_scale(x):
    return (x.abs().amax(-1, keepdim=True) * (1 / 448)).clamp_min(1e-6)


def test_wrong_implementations_are_rejected():
    draw = case("p21")
    right = quantise_with(product_scale, lambda x, s: x * (1 / s))
    assert draw.accepts(right)

    def writes_padding(key, value, slots, *caches):
        return right(key, value, torch.where(slots < 0, caches[0].shape[0] * caches[0].shape[1] - 1, slots), *caches)

    def shifted_by_one(key, value, slots, *caches):
        return right(key, value, torch.where(slots < 0, slots, (slots + 1) % 24), *caches)

    def key_and_value_swapped(key, value, slots, *caches):
        return right(value, key, slots, *caches)

    wrong = {
        "scale of 240 (the other E4M3)": quantise_with(lambda x: product_scale(x) * 448 / 240, lambda x, s: x / s),
        "one scale per token": quantise_with(
            lambda x: product_scale(x).amax(1, keepdim=True).expand(-1, x.shape[1], -1), lambda x, s: x / s
        ),
        "reciprocal of the scale stored": quantise_with(lambda x: 1 / product_scale(x), lambda x, s: x * s),
        "padding written to the last slot": writes_padding,
        "slots off by one": shifted_by_one,
        "key and value swapped": key_and_value_swapped,
    }
    assert [name for name, implementation in wrong.items() if draw.accepts(implementation)] == []


def test_other_float32_steps_change_some_bytes_on_many_tokens():
    """Too rare for the smoke workload, common on the benchmark's: a few bytes in ten thousand."""
    torch.manual_seed(11)
    inputs = p21.make_inputs(replace(p21.FULL, tokens=256), CPU)
    expected = p21.reference(*clone(inputs))[0]
    for scale_of, quotient in (
        (lambda x: (x.abs().amax(-1, keepdim=True) / 448).clamp_min(1e-6), lambda x, s: x * (1 / s)),
        (product_scale, lambda x, _: x * (448 / x.abs().amax(-1, keepdim=True))),
    ):
        assert not torch.equal(quantise_with(scale_of, quotient)(*clone(inputs))[0], expected)
