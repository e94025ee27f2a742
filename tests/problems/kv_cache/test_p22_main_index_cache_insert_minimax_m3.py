import torch

from metakernelbench.problems.kv_cache import p22_main_index_cache_insert_minimax_m3 as p22
from tests.problems.kv_cache.loops import interleaved, normalised, rotated
from tests.problems.mistakes import altered
from tests.problems.support import CPU, case, clone


def independent(
    qkv, q_weight, k_weight, index_q_weight, index_k_weight, positions, table, slots, index_slots, kv_cache, index_cache
):
    """Token by token and head by head in Python numbers, rounded once at the end."""
    _, kv_heads, page_size, width = kv_cache.shape
    size = width // 2
    tokens = qkv.view(len(qkv), -1, size)
    query_heads = tokens.shape[1] - 2 * kv_heads - 5
    first_index = query_heads + 2 * kv_heads
    q = torch.empty(len(qkv), query_heads, size, dtype=qkv.dtype)
    index_q = torch.empty(len(qkv), 4, size, dtype=qkv.dtype)

    def processed(head, weight, row):
        scaled = [n * (1 + w) for n, w in zip(normalised(head, 1e-6), weight.tolist(), strict=True)]
        return torch.tensor(rotated(scaled, row))

    for t, heads in enumerate(tokens.tolist()):
        row = table[positions[t]].tolist()
        page, offset = divmod(int(slots[t]), page_size)
        index_page, index_offset = divmod(int(index_slots[t]), page_size)
        for h in range(query_heads):
            q[t, h] = processed(heads[h], q_weight, row)
        for h in range(kv_heads):
            kv_cache[page, h, offset, :size] = processed(heads[query_heads + h], k_weight, row)
            kv_cache[page, h, offset, size:] = torch.tensor(heads[query_heads + kv_heads + h])
        for h in range(4):
            index_q[t, h] = processed(heads[first_index + h], index_q_weight, row)
        index_cache[index_page, index_offset] = processed(heads[first_index + 4], index_k_weight, row)
    return q, index_q, kv_cache, index_cache


def test_reference_agrees_with_a_loop_over_tokens_and_heads():
    assert case("p22").accepts(independent)


def test_the_caches_are_updated_in_place_where_a_slot_says_so():
    inputs = p22.make_inputs(p22.SMOKE, CPU)
    before = clone(inputs)
    outputs = p22.reference(*inputs)
    assert outputs[2] is inputs[9]
    assert outputs[3] is inputs[10]
    slots, index_slots = set(inputs[7].tolist()), set(inputs[8].tolist())
    for slot in range(20):
        page, offset = divmod(slot, 4)
        assert torch.equal(outputs[2][page, :, offset], before[9][page, :, offset]) == (slot not in slots)
        assert torch.equal(outputs[3][page, offset], before[10][page, offset]) == (slot not in index_slots)


def test_cost_is_that_of_the_sheet():
    cost = p22.cost(p22.FULL)
    assert cost.bytes_read == 3_808_512 + 12_312 + 61_725 + 1_024
    assert cost.bytes_written == 2_101_248 + 525_312 + 1_050_624 + 131_328


def test_wrong_implementations_are_rejected(monkeypatch):
    draw = case("p22")

    def interleaved_rotation(*inputs):
        with monkeypatch.context() as patched:
            patched.setattr(p22, "rotate_halves", interleaved)
            return p22.reference(*inputs)

    def one_slot_list_for_both(*inputs):
        return p22.reference(*inputs[:8], inputs[7], *inputs[9:])

    def key_and_value_swapped(*inputs):
        q, index_q, kv_cache, index_cache = p22.reference(*inputs)
        return q, index_q, kv_cache.roll(kv_cache.shape[-1] // 2, dims=-1), index_cache

    def value_normalised(*inputs):
        q, index_q, kv_cache, index_cache = p22.reference(*inputs)
        size = kv_cache.shape[-1] // 2
        slots = inputs[7]
        value = kv_cache[slots // 4, :, slots % 4, size:].float()
        value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + 1e-6)
        kv_cache[slots // 4, :, slots % 4, size:] = value.bfloat16()
        return q, index_q, kv_cache, index_cache

    wrong = {
        "weight without the 1": altered(p22.reference, q_norm_weight=lambda x: x - 1),
        "weights of main and index swapped": lambda *i: p22.reference(i[0], i[3], i[4], i[1], i[2], *i[5:]),
        "interleaved rotation": interleaved_rotation,
        "rotary base 10000": altered(
            p22.reference, cos_sin_cache=lambda x: p22.rotary_table(*x.shape, 10000.0, x.device)
        ),
        "positions one further": altered(p22.reference, positions=lambda x: (x + 1) % 32),
        "one slot list for both caches": one_slot_list_for_both,
        "key and value swapped": key_and_value_swapped,
        "value normalised": value_normalised,
    }
    assert [name for name, implementation in wrong.items() if draw.accepts(implementation)] == []
