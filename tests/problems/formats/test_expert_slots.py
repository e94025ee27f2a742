"""The slot table of (token, expert) pairs: every pair has its own slot, in the rows of its expert, in order."""

import torch

from metakernelbench.problems.formats.expert_slots import slots_of


def test_pairs_fill_the_rows_of_their_expert_in_order():
    slots = slots_of(torch.tensor([2, 0, 2, 2, 0]), 4)
    assert (slots.experts, slots.capacity) == (4, 3)
    assert slots.rows.tolist() == [6, 0, 7, 8, 1]


def test_what_is_filled_in_is_read_back_and_the_rest_is_zero():
    slots = slots_of(torch.tensor([2, 0, 2]), 3)
    values = torch.tensor([[1.0], [2.0], [3.0]])
    table = slots.fill(values)
    assert table[..., 0].tolist() == [[2.0, 0.0], [0.0, 0.0], [1.0, 3.0]]
    assert torch.equal(slots.read(table), values)


def test_no_pairs_give_an_empty_table():
    slots = slots_of(torch.empty(0, dtype=torch.int64), 2)
    assert slots.fill(torch.empty(0, 5)).shape == (2, 1, 5)
    assert slots.read(torch.ones(2, 1, 5)).shape == (0, 5)
