import torch

from metakernelbench.problems.kv_cache import p25_cache_block_copy as p25
from tests.problems.mistakes import altered
from tests.problems.support import CPU, case, clone


def independent(src_k, src_v, dst_k, dst_v, pairs):
    """Byte after byte."""
    for source, destination in pairs.tolist():
        for src, dst in ((src_k, dst_k), (src_v, dst_v)):
            for i, byte in enumerate(src[source].flatten().tolist()):
                dst[destination].view(-1)[i] = byte
    return dst_k, dst_v


def test_reference_agrees_with_a_loop_over_bytes():
    assert case("p25").accepts(independent)


def test_the_pools_are_updated_in_place_on_destination_pages_alone():
    inputs = p25.make_inputs(p25.SMOKE, CPU)
    before = clone(inputs)
    outputs = p25.reference(*inputs)
    assert outputs[0] is inputs[2]
    assert outputs[1] is inputs[3]
    destinations = set(inputs[4][:, 1].tolist())
    for page in range(16):
        assert torch.equal(outputs[0][page], before[2][page]) == (page not in destinations)
        assert torch.equal(outputs[1][page], before[3][page]) == (page not in destinations)
    assert all(torch.equal(inputs[i], before[i]) for i in (0, 1, 4))


def test_pairs_name_every_page_at_most_once():
    pairs = p25.make_inputs(p25.SMOKE, CPU)[4]
    assert pairs.unique().numel() == 8


def test_cost_is_that_of_the_sheet():
    cost = p25.cost(p25.FULL)
    assert cost.bytes_read == 33_554_432 + 4_096
    assert cost.bytes_written == 33_554_432


def test_wrong_implementations_are_rejected():
    draw = case("p25")
    wrong = {
        "source and destination swapped": altered(p25.reference, block_mapping=lambda x: x.flip(1)),
        "last pair forgotten": altered(p25.reference, block_mapping=lambda x: x[:-1]),
        "keys and values swapped": lambda k, v, *others: p25.reference(v, k, *others),
        "destination pages one further": altered(
            p25.reference, block_mapping=lambda x: torch.stack([x[:, 0], (x[:, 1] + 1) % 16], dim=1)
        ),
        "values left as they were": lambda k, v, dst_k, dst_v, m: (
            p25.reference(k, v, dst_k, dst_v.clone(), m)[0],
            dst_v,
        ),
        "fresh pools": lambda k, v, dst_k, dst_v, m: p25.reference(k, v, dst_k * 0, dst_v * 0, m),
    }
    assert [name for name, implementation in wrong.items() if draw.accepts(implementation)] == []
