import torch

from metakernelbench.problems.kv_cache import p26_block_table_update_slot_mapping as p26
from tests.problems.mistakes import altered
from tests.problems.support import CPU, case

PAGES, EXPANSION = (16, 16, 8), (1, 2, 1)


def independent(
    table_0,
    table_1,
    table_2,
    counts,
    requests,
    overwrite,
    ids,
    staged,
    rows,
    starts,
    positions,
    *,
    order=1,
    append=True,
    clear=False,
):
    """One number at a time, in Python lists."""
    tables = [table.tolist() for table in (table_0, table_1, table_2)]
    ends, slots = counts.tolist(), [[-1] * len(positions) for _ in tables]
    for g, table in enumerate(tables):
        for w in range(len(requests))[::order]:
            r = int(requests[w])
            place = 0 if bool(overwrite[w]) or not append else ends[g][r]
            for n in ids[g, w, : int(staged[g, w])].tolist():
                for part in range(EXPANSION[g]):
                    table[r][place] = n * EXPANSION[g] + part
                    place += 1
            ends[g][r] = place
            if clear:
                table[r][place:] = [0] * (len(table[r]) - place)
        for j, r in enumerate(rows.tolist()):
            for i in range(int(starts[j]), int(starts[j + 1])):
                page, offset = divmod(int(positions[i]), PAGES[g])
                slots[g][i] = table[r][page] * PAGES[g] + offset
    as_int32 = [torch.tensor(x, dtype=torch.int32) for x in (*tables, ends)]
    return (*as_int32, torch.tensor(slots))


def test_reference_agrees_with_a_loop_over_numbers_and_tokens():
    for seed in range(5):
        assert case("p26", seed).accepts(independent)


def test_vectorized_passes_the_contract():
    for seed in range(5):
        assert case("p26", seed).accepts(p26.vectorized)


def test_tables_and_counts_are_updated_in_place():
    inputs = p26.make_inputs(p26.SMOKE, CPU)
    outputs = p26.reference(*inputs)
    assert all(out is given for out, given in zip(outputs[:4], inputs[:4], strict=True))


def test_every_request_is_written_once_in_each_half():
    requests = p26.make_inputs(p26.SMOKE, CPU)[4]
    assert all(half.sort().values.tolist() == [0, 1, 2, 3] for half in requests.chunk(2))


def test_cost_is_that_of_the_sheet():
    cost = p26.cost(p26.FULL)
    assert 26_500 < cost.bytes_read < 27_500
    assert cost.bytes_written == 98_304 + 768 + 4_096


def test_wrong_implementations_are_rejected():
    """On the union of a few draws, as a small one may lack the case that tells them apart."""
    draws = [case("p26", seed) for seed in range(5)]

    def variant(**how):
        return lambda *inputs: independent(*inputs, **how)

    def without_expansion(*inputs):
        tables = p26.reference(*inputs)
        return (*tables[:1], tables[1] // 2, *tables[2:])

    def padding_slot_zero(*inputs):
        outputs = p26.reference(*inputs)
        return (*outputs[:4], outputs[4].clamp_min(0))

    def slots_before_the_writes(*inputs):
        before = p26.reference(*(x.clone() for x in inputs[:7]), torch.zeros_like(inputs[7]), *inputs[8:])[4]
        return (*p26.reference(*inputs)[:4], before)

    wrong = {
        "writes in reverse order": variant(order=-1),
        "always from the start": variant(append=False),
        "rest of the row cleared": variant(clear=True),
        "never overwriting": altered(p26.reference, overwrite=torch.zeros_like),
        "numbers not expanded": without_expansion,
        "padding tokens at slot 0": padding_slot_zero,
        "slots before the writes": slots_before_the_writes,
        "rows taken for requests": altered(p26.reference, idx_mapping=lambda x: x.sort().values),
        "counts off by one": altered(p26.reference, staged_counts=lambda x: (x - 1).clamp_min(0)),
    }
    accepted = [name for name, wrong_one in wrong.items() if all(draw.accepts(wrong_one) for draw in draws)]
    assert accepted == []
