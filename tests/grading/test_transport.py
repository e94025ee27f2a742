"""Carrying calls: which buffers, and every problem's draws."""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch

from metakernelbench.grading import buffers
from metakernelbench.grading.draws import Draws
from metakernelbench.grading.transport import FileTransport, choose_buffers
from metakernelbench.problems import catalog


def test_the_first_buffers_carry_most_calls_and_the_others_some() -> None:
    counts = Counter(choose_buffers([0, 1]) for _ in range(4000))
    assert 350 < counts[1] < 650
    assert counts[0] + counts[1] == 4000


def test_buffers_that_are_still_looked_at_are_not_chosen() -> None:
    assert {choose_buffers([1]) for _ in range(100)} == {1}


@pytest.mark.parametrize("problem_id", catalog.problem_ids())
def test_every_draw_arrives_as_it_was_sent(problem_id: str) -> None:
    draws = Draws(catalog.load(problem_id), "smoke", "cpu")
    form, transport = draws.next().form(), FileTransport("cpu")
    for _ in range(3):
        inputs = draws.next().inputs
        of_draw = form.of_draw(inputs)
        parcel = transport.pack(inputs, of_draw)
        block = buffers.map_file(os.dup(parcel.descriptors[0]))
        numbers = iter(parcel.message["values"])
        arrived = [slot.tensor_in(block) if slot.is_tensor else next(numbers) for slot in of_draw.inputs]
        parcel.sent()
        for there, here in zip(arrived, inputs, strict=True):
            if isinstance(here, torch.Tensor):
                assert there.shape == here.shape and there.dtype is here.dtype
                assert torch.equal(as_bytes(there), as_bytes(here))
            else:
                assert there == here


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Compare equal where NaN does not."""
    return x.contiguous().reshape(-1).view(torch.uint8)
