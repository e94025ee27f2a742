import torch

from metakernelbench.problems.kv_cache import p19_qk_norm_rope_cache_update_glm4 as p19
from tests.problems.kv_cache.loops import (
    interleaved,
    normalised,
    padding_written_to_slot_zero,
    rotated,
    shifted_slots,
)
from tests.problems.mistakes import altered
from tests.problems.support import CPU, case, clone


def independent(qkv, positions, q_weight, k_weight, table, slots, kv_cache, eps):
    """Token by token and head by head in Python numbers, rounded once at the end."""
    page_size, kv_heads, size = kv_cache.shape[2:]
    heads = qkv.shape[1] // size
    q = torch.empty(len(qkv), heads - 2 * kv_heads, size, dtype=qkv.dtype)

    def processed(head, weight, row):
        return torch.tensor(rotated([n * w for n, w in zip(normalised(head, eps), weight, strict=True)], row))

    for t, token in enumerate(qkv.view(len(qkv), heads, size).tolist()):
        row, slot = table[positions[t]].tolist(), int(slots[t])
        for h in range(q.shape[1]):
            q[t, h] = processed(token[h], q_weight.tolist(), row)
        for h in range(kv_heads if slot >= 0 else 0):
            page, offset = divmod(slot, page_size)
            kv_cache[0, page, offset, h] = processed(token[q.shape[1] + h], k_weight.tolist(), row)
            kv_cache[1, page, offset, h] = torch.tensor(token[heads - kv_heads + h])
    return q, kv_cache


def test_reference_agrees_with_a_loop_over_tokens_and_heads():
    assert case("p19").accepts(independent)


def test_the_cache_is_updated_in_place_and_padding_writes_nothing():
    inputs = p19.make_inputs(p19.SMOKE, CPU)
    before = clone(inputs)[6]
    _, kv_cache = p19.reference(*inputs)
    assert kv_cache is inputs[6]
    written = set(inputs[5].tolist()) - {-1}
    for slot in range(24):
        same = torch.equal(kv_cache[:, slot // 4, slot % 4], before[:, slot // 4, slot % 4])
        assert same == (slot not in written)


def test_cost_is_that_of_the_sheet():
    cost = p19.cost(p19.FULL)
    assert cost.bytes_read == 16_777_216 + 8_124_416 + 16_384 + 16_384 + 206_311 + 512
    assert cost.bytes_written == 16_777_216 + 8_124_416
    assert f"{cost.bytes / 1e6:.2f}" == "50.04"


def test_wrong_implementations_are_rejected(monkeypatch):
    draw = case("p19")

    def with_function(name, function):
        def implementation(*inputs):
            with monkeypatch.context() as patched:
                patched.setattr(p19, name, function)
                return p19.reference(*inputs)

        return implementation

    def key_and_value_swapped(*inputs):
        q, kv_cache = p19.reference(*inputs)
        return q, kv_cache.flip(0)

    original = p19.normalise
    wrong = {
        "no norm": with_function("normalise", lambda x, w, _: x * w),
        "weight plus 1": with_function("normalise", lambda x, w, eps: original(x, 1 + w, eps)),
        "layer norm": with_function("normalise", lambda x, w, eps: original(x - x.mean(-1, keepdim=True), w, eps)),
        "interleaved rotation": with_function("rotate_halves", interleaved),
        "whole head rotated": altered(
            p19.reference, cos_sin_cache=lambda x: torch.cat([x[:, :4], x[:, :4], x[:, 4:], x[:, 4:]], dim=1)
        ),
        "positions one further": altered(p19.reference, positions=lambda x: (x + 1) % 32),
        "slots one further": altered(p19.reference, slot_mapping=shifted_slots),
        "padding written": altered(p19.reference, slot_mapping=padding_written_to_slot_zero),
        "key and value swapped": key_and_value_swapped,
        "query weight on keys": lambda *i: p19.reference(*i[:3], i[2], *i[4:]),
    }
    assert [name for name, implementation in wrong.items() if draw.accepts(implementation)] == []
