import struct

import torch

from metakernelbench.problems.kv_cache import p24_cache_gather_upconvert_fp8 as p24
from tests.problems.formats.test_fp8 import value_of
from tests.problems.mistakes import altered
from tests.problems.support import CPU, case


def unpacked(entry: bytes) -> list[float]:
    """One cache entry from its bytes: latents times group scales, then the upper halves of fp32 numbers."""
    scales = struct.unpack("<4f", entry[512:528])
    latents = [value_of(code) * scales[j // 128] for j, code in enumerate(entry[:512])]
    positional = [struct.unpack("<f", b"\0\0" + entry[at : at + 2])[0] for at in range(528, 656, 2)]
    return latents + positional


def independent(cache, table, lengths):
    """Token by token in Python numbers, rounded once."""
    rows, page_size = [], cache.shape[1]
    for request, length in enumerate(lengths.tolist()):
        for i in range(length):
            entry = cache[table[request, i // page_size], i % page_size]
            rows.append(unpacked(bytes(entry.tolist())))
    return torch.tensor(rows).bfloat16()


def test_reference_agrees_with_a_loop_over_the_bytes_of_every_token():
    draw = case("p24")
    assert torch.equal(independent(*draw.inputs), draw.expected)


def test_vectorized_is_equal_to_the_last_bit():
    draw = case("p24")
    assert torch.equal(p24.vectorized(*draw.inputs), draw.expected)


def test_block_tables_change_their_width_and_share_no_page():
    widths = set()
    for seed in range(10):
        torch.manual_seed(seed)
        _, table, lengths = p24.make_inputs(p24.SMOKE, CPU)
        counts = [-(-n // 4) for n in lengths.tolist()]
        used = [page for row, count in zip(table.tolist(), counts, strict=True) for page in row[:count]]
        assert len(set(used)) == len(used)
        assert all(not any(row[count:]) for row, count in zip(table.tolist(), counts, strict=True))
        assert table.shape[1] == max(counts)
        widths.add(table.shape[1])
    assert len(widths) > 1


def test_cost_is_that_of_the_sheet():
    cost = p24.cost(p24.FULL)
    assert cost.bytes_read == 420_496 + 60
    assert cost.bytes_written == 738_432


def test_wrong_implementations_are_rejected():
    draw = case("p24")

    def with_scales(change):
        def implementation(cache, *others):
            scales = cache[..., 512:528].contiguous().view(torch.float32)
            return p24.reference(
                torch.cat([cache[..., :512], change(scales).view(torch.uint8), cache[..., 528:]], -1), *others
            )

        return implementation

    def positional_part_first(*inputs):
        return p24.reference(*inputs).roll(64, dims=-1)

    def positional_part_scaled(*inputs):
        out = p24.reference(*inputs)
        return torch.cat([out[:, :512], out[:, 512:] * 0.9], dim=-1)

    wrong = {
        "scales ignored": with_scales(torch.ones_like),
        "first scale for all groups": with_scales(lambda x: x[..., :1].expand_as(x).contiguous()),
        "scales in reverse order": with_scales(lambda x: x.flip(-1)),
        "positional part first": positional_part_first,
        "positional part scaled": positional_part_scaled,
        "requests in reverse order": altered(p24.reference, block_table=lambda x: x.flip(0)),
        "offsets off by one": altered(p24.reference, cache=lambda x: x.roll(1, dims=1)),
        "a length moved by one": altered(p24.reference, seq_lens=lambda x: x + torch.tensor([-1, 1, 0])),
    }
    assert [name for name, implementation in wrong.items() if draw.accepts(implementation)] == []
