import torch

from metakernelbench.problems.kv_cache import p23_mla_cache_gather_dequantize_fp8 as p23
from tests.problems.formats.test_fp8 import value_of
from tests.problems.mistakes import altered
from tests.problems.support import case

VALUES = torch.tensor([value_of(code) for code in range(256)], dtype=torch.float64)


def independent(cache, table, lengths, scale):
    """Token by token, with a table of all 256 codes."""
    rows, page_size = [], cache.shape[1]
    for request, length in enumerate(lengths.tolist()):
        for i in range(length):
            rows.append(VALUES[cache[table[request, i // page_size], i % page_size].long()] * scale)
    return torch.stack(rows).float()


def test_reference_agrees_with_a_loop_over_tokens():
    assert case("p23").accepts(independent)


def test_vectorized_is_equal_to_the_last_bit():
    draw = case("p23")
    assert torch.equal(p23.vectorized(*draw.inputs), draw.expected)


def test_cost_is_that_of_the_sheet():
    cost = p23.cost(p23.FULL)
    assert cost.bytes_read == 2_359_296 + 1_040 + 32
    assert cost.bytes_written == 9_437_184


def test_wrong_implementations_are_rejected():
    draw = case("p23")

    def with_scale_in(dtype):
        def implementation(cache, table, lengths, scale):
            return (p23.reference(cache, table, lengths, 1.0).to(dtype) * scale).float()

        return implementation

    def offsets_off_by_one(cache, table, lengths, scale):
        return p23.reference(cache.roll(1, dims=1), table, lengths, scale)

    wrong = {
        "product in bf16": with_scale_in(torch.bfloat16),
        "product in fp16": with_scale_in(torch.float16),
        "division by the scale": altered(p23.reference, scale=lambda x: 1 / x),
        "requests in reverse order": altered(p23.reference, block_table=lambda x: x.flip(0)),
        "a length moved by one": altered(p23.reference, seq_lens=lambda x: x + torch.tensor([1, -1, 0])),
        "offsets off by one": offsets_off_by_one,
        "the other E4M3": lambda cache, *others: p23.reference(cache, *others) / 2,
    }
    assert [name for name, implementation in wrong.items() if draw.accepts(implementation)] == []
