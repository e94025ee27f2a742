import torch
from torch.nn.functional import linear

from metakernelbench.problems.kv_cache import p20_mla_rope_cache_update as p20
from tests.problems.kv_cache.loops import (
    interleaved,
    padding_written_to_slot_zero,
    rotated,
    shifted_slots,
)
from tests.problems.mistakes import altered
from tests.problems.support import CPU, case, clone


def independent(qkv_lora, weight, positions, table, slots, kv_cache):
    """Token by token in Python numbers after a float64 projection."""
    rank, rotary, page_size = weight.shape[1], table.shape[1], kv_cache.shape[1]
    q = linear(qkv_lora[:, :rank].double(), weight.double()).view(len(qkv_lora), 16, -1)
    plain = q.shape[-1] - rotary
    for t, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        row = table[position].tolist()
        for h in range(16):
            q[t, h, plain:] = torch.tensor(rotated(q[t, h, plain:].tolist(), row))
        if slot >= 0:
            latent, key = qkv_lora[t, rank:-rotary].tolist(), qkv_lora[t, -rotary:].tolist()
            kv_cache[slot // page_size, slot % page_size, 0] = torch.tensor(latent + rotated(key, row))
    return q.to(qkv_lora.dtype), kv_cache


def test_reference_agrees_with_a_loop_over_tokens_and_heads():
    assert case("p20").accepts(independent)


def test_the_cache_is_updated_in_place_and_padding_writes_nothing():
    inputs = p20.make_inputs(p20.SMOKE, CPU)
    before = clone(inputs)[5]
    _, kv_cache = p20.reference(*inputs)
    assert kv_cache is inputs[5]
    written = set(inputs[4].tolist()) - {-1}
    for slot in range(24):
        same = torch.equal(kv_cache[slot // 4, slot % 4], before[slot // 4, slot % 4])
        assert same == (slot not in written)


def test_cost_is_that_of_the_sheet():
    cost = p20.cost(p20.FULL)
    assert cost.bytes_read == 6_291_456 + 2_284_992 + 9_437_184 + 32_768 + 206_311
    assert cost.bytes_written == 12_582_912 + 2_284_992
    assert f"{cost.flops['bf16'] / 1e9:.2f}" == "19.33"


def test_wrong_implementations_are_rejected(monkeypatch):
    draw = case("p20")

    def interleaved_rotation(*inputs):
        with monkeypatch.context() as patched:
            patched.setattr(p20, "rotate_halves", interleaved)
            return p20.reference(*inputs)

    def query_not_rotated(qkv_lora, weight, *others):
        q = qkv_lora[:, : weight.shape[1]] @ weight.T
        return q.view(len(q), 16, -1), p20.reference(qkv_lora, weight, *others)[1]

    def latent_and_key_swapped(*inputs):
        rotary = inputs[3].shape[1]
        q, cache = p20.reference(*inputs)
        used = inputs[4][inputs[4] >= 0]
        flat = cache.flatten(0, 2)
        flat[used] = flat[used].roll(rotary, dims=-1)
        return q, flat.view(cache.shape)

    wrong = {
        "interleaved rotation": interleaved_rotation,
        "query not rotated": query_not_rotated,
        "latent and key swapped": latent_and_key_swapped,
        "rotation backwards": altered(p20.reference, cos_sin_cache=lambda x: torch.cat([x[:, :4], -x[:, 4:]], dim=1)),
        "positions one further": altered(p20.reference, positions=lambda x: (x + 1) % 32),
        "slots one further": altered(p20.reference, slot_mapping=shifted_slots),
        "padding written": altered(p20.reference, slot_mapping=padding_written_to_slot_zero),
        "weight in FP8": altered(p20.reference, q_b_weight=lambda x: x.to(torch.float8_e4m3fn).to(x.dtype)),
    }
    assert [name for name, implementation in wrong.items() if draw.accepts(implementation)] == []
