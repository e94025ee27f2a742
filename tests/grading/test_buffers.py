from __future__ import annotations

import os

import pytest
import torch

from metakernelbench.grading import buffers
from metakernelbench.grading.buffers import Form, overlaps_itself

VALUES = (
    torch.randn(3, 5),
    torch.randn(4, 6, dtype=torch.bfloat16).T,
    torch.randn(7).to(torch.float8_e4m3fn),
    torch.tensor(True),
    2.5,
    torch.empty(0, 3),
    torch.arange(6)[::2],
    3,
    torch.randn(1, 4).expand(3, 4),
)


def test_every_layout_survives_the_way_through_a_file() -> None:
    form = Form.of(["y"], VALUES, torch.empty(2))
    descriptor, block = buffers.create_file(form.input_bytes)
    buffers.fill(form.inputs, block, VALUES)
    other = buffers.map_file(descriptor)
    for slot, value in zip(form.inputs, VALUES, strict=True):
        assert slot.is_tensor == isinstance(value, torch.Tensor)
        if isinstance(value, torch.Tensor):
            copy = slot.tensor_in(other)
            assert copy.dtype == value.dtype and copy.shape == value.shape
            assert torch.equal(copy.float(), value.float())
            assert overlaps_itself(value) or copy.stride() == value.stride()
    os.close(descriptor)


def test_slots_lie_apart_and_travel_as_json() -> None:
    form = Form.of(["y"], VALUES, (torch.empty(2), torch.empty(3)))
    tensors = [slot for slot in form.inputs if slot.is_tensor]
    ends = [slot.offset + slot.span for slot in tensors]
    assert all(end <= later.offset for end, later in zip(ends, tensors[1:], strict=False))
    assert ends[-1] <= form.input_bytes
    assert [buffers.Slot.from_json(item) for item in form.to_json()["inputs"]] == list(form.inputs)
    assert form.container == "tuple"


def test_worker_cannot_shrink_or_grow_a_file() -> None:
    descriptor, _ = buffers.create_file(4096)
    for size in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    os.close(descriptor)


@pytest.mark.parametrize(
    ("tensor", "overlaps"),
    [
        (torch.randn(3, 4), False),
        (torch.randn(3, 4).T, False),
        (torch.randn(3, 1).expand(3, 4), True),
        (torch.randn(6, 4)[::2, 1:3], False),
        (torch.randn(10).as_strided((4, 3), (2, 1)), True),
        (torch.randn(1, 1).expand(1, 1), False),
    ],
)
def test_overlap_is_recognised(tensor: torch.Tensor, overlaps: bool) -> None:
    assert overlaps_itself(tensor) is overlaps
