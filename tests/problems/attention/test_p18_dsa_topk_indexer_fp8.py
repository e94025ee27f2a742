import struct
from functools import partial

import torch

from metakernelbench.problems.attention import p18_dsa_topk_indexer_fp8 as p18
from tests.problems.support import CPU, case


def key_of(page: torch.Tensor, slot: int) -> list[float]:
    """One token's key, from the bytes of its page."""
    page_size, _, width = page.shape
    data = bytes(b & 0xFF for b in page.flatten().tolist())
    size = width - 4
    values = torch.frombuffer(bytearray(data[slot * size : (slot + 1) * size]), dtype=torch.uint8)
    (scale,) = struct.unpack_from("<f", data, page_size * size + 4 * slot)
    return (values.view(torch.float8_e4m3fn).double() * scale).tolist()


def independent(q, cache, weights, seq_lens, block_table, *, relu=True, dtype=torch.float64):
    """Token by token, with Python's sort."""
    keys, rows = p18.dequantised(cache, torch.float64), []
    for b, length in enumerate(seq_lens.tolist()):
        slots = [(int(block_table[b, j // 64]), j % 64) for j in range(length)]
        products = torch.stack([keys[page, slot] for page, slot in slots]).to(dtype) @ q[b].to(dtype).T
        scores = ((products.clamp_min(0) if relu else products) * weights[b].to(dtype)).sum(1).tolist()
        best = sorted(sorted(range(length), key=lambda j: -scores[j])[:2048])
        row = [slots[j][0] * 64 + slots[j][1] for j in best]
        rows.append(row + [-1] * (2048 - len(row)))
    return (torch.tensor(rows, dtype=torch.int32),)


def test_keys_are_unpacked_from_the_bytes_of_their_page():
    cache = case("p18").inputs[1]
    keys = p18.dequantised(cache, torch.float64)
    for page, slot in ((0, 0), (1, 63), (17, 5)):
        assert keys[page, slot].tolist() == key_of(cache[page], slot)


def test_reference_agrees_with_scores_in_float64_and_a_sort():
    assert case("p18").accepts(independent)


def test_vectorized_passes_the_contract():
    assert case("p18").accepts(p18.vectorized)


def test_every_draw_has_its_margin_and_pages_of_its_own():
    for seed in range(5):
        torch.manual_seed(seed)
        q, cache, weights, _, table = p18.make_inputs(p18.SMOKE, CPU)
        assert p18.smallest_margin(p18.SMOKE, q, cache, weights, table) >= p18.MARGIN
        used = [p for row, n in zip(table.tolist(), p18.SMOKE.pages, strict=True) for p in row[:n]]
        assert len(set(used)) == len(used)
        assert 0 not in used


def test_cost_is_that_of_the_sheet():
    cost = p18.cost(p18.FULL)
    assert cost.bytes == 618_828
    assert f"{cost.flops['fp8']:.3e}" == "4.412e+07"


def test_wrong_implementations_are_rejected():
    draw = case("p18")

    def changed(**changes):
        def implementation(q, cache, weights, seq_lens, table):
            values = {"q": q, "cache": cache, "weights": weights, "seq_lens": seq_lens, "table": table}
            return p18.reference(*(changes.get(n, lambda x: x)(x) for n, x in values.items()))

        return implementation

    def without_scales(cache):
        packed = cache.flatten(1).clone()
        packed[:, 64 * 16 :] = torch.ones(len(packed), 64).view(torch.int8)
        return packed.view(cache.shape)

    def rotated_by_one(q, cache, weights, seq_lens, table):
        (slots,) = p18.reference(q, cache, weights, seq_lens, table)
        return (torch.cat([slots[:, 1:], slots[:, :1]], dim=1),)

    def ascending_slots(*inputs):
        (slots,) = p18.reference(*inputs)
        return (torch.where(slots < 0, 1 << 30, slots).sort(1).values.masked_fill((slots < 0), -1),)

    wrong = {
        "no ReLU": partial(independent, relu=False),
        "scores in bf16": partial(independent, dtype=torch.bfloat16),
        "scales ignored": changed(cache=without_scales),
        "weights all positive": changed(weights=torch.abs),
        "weights ignored": changed(weights=torch.ones_like),
        "length one short": changed(seq_lens=lambda x: x - 1),
        "length one long": changed(seq_lens=lambda x: x + 1),
        "another order": rotated_by_one,
        "slots in ascending order": ascending_slots,
        "query negated": changed(q=lambda x: (-x.float()).to(x.dtype)),
        "logical positions": changed(table=lambda x: torch.arange(x.shape[1], dtype=x.dtype).expand_as(x)),
    }
    assert [name for name, implementation in wrong.items() if draw.accepts(implementation)] == []
