import torch

from metakernelbench.problems.formats.paged import (
    gathered_entries,
    lengths_of,
    offsets_of,
    padded_rows,
    random_lengths,
    random_pages,
    random_slots,
    sequence_tokens,
    spans,
)

CPU = torch.device("cpu")


def test_spans_are_the_gaps_of_the_offsets():
    assert spans(torch.tensor(offsets_of((5, 1, 17)), dtype=torch.int32)) == [(0, 5), (5, 6), (6, 23)]


def test_lengths_are_the_inverse_of_offsets():
    assert lengths_of(offsets_of((5, 1, 17))) == (5, 1, 17)


def test_padded_rows_hold_every_row_once_and_padding_that_exists():
    rows, padding = padded_rows(torch.tensor([0, 2, 5, 6]))
    assert rows[~padding].tolist() == list(range(6))
    assert padding.tolist() == [[False, False, True], [False] * 3, [False, True, True]]
    assert rows[padding].tolist() == [1, 5, 5]


def test_sequence_tokens_keep_the_order_of_pages_and_end_inside_the_last():
    cache = torch.arange(6 * 4).reshape(6, 4, 1)
    tokens = sequence_tokens(cache, torch.tensor([5, 0, 2]), 3, torch.float32)
    assert tokens.flatten().tolist() == [20, 21, 22, 23, 0, 1, 2, 3, 8, 9, 10]
    assert sequence_tokens(cache, torch.tensor([1]), 1, torch.float32).flatten().tolist() == [4]


def test_random_pages_and_slots_are_distinct_with_padding_only_at_the_end():
    torch.manual_seed(0)
    pages = random_pages(9, 24, CPU)
    assert len(set(pages.tolist())) == 9
    assert pages.dtype == torch.int32
    paddings = set()
    for _ in range(30):
        slots = random_slots(12, 24, 3, CPU).tolist()
        padding = slots.count(-1)
        used = slots[: 12 - padding]
        assert slots[12 - padding :] == [-1] * padding
        assert len(set(used)) == len(used)
        assert set(used) <= set(range(24))
        paddings.add(padding)
    assert paddings == {1, 2, 3}


def test_random_lengths_are_positive_and_add_up():
    torch.manual_seed(0)
    draws = [random_lengths(11, 3, CPU) for _ in range(30)]
    assert all(int(d.sum()) == 11 and int(d.min()) >= 1 and d.shape == (3,) for d in draws)
    assert len({tuple(d.tolist()) for d in draws}) > 10


def test_gathered_entries_follow_the_block_table():
    cache = torch.arange(6 * 4).reshape(6, 4, 1)
    entries = gathered_entries(cache, torch.tensor([[5, 0], [2, 0]]), torch.tensor([6, 3]))
    assert entries.flatten().tolist() == [20, 21, 22, 23, 0, 1, 8, 9, 10]
