from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from metakernelbench.grading import buffers
from metakernelbench.grading import worker as module
from metakernelbench.grading.buffers import Form
from metakernelbench.grading.calls import structure_fault
from metakernelbench.grading.draws import Draws
from metakernelbench.grading.transport import FileTransport
from metakernelbench.grading.worker import _Worker, describe
from metakernelbench.problems.catalog import load


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("returned", "code"),
    [
        (lambda: torch.zeros(2, 3).as_subclass(Subclass), "wrong-structure"),
        (lambda: torch.nn.Parameter(torch.zeros(2, 3)), "wrong-structure"),
        (lambda: torch.complex(torch.zeros(2, 3), torch.zeros(2, 3)).conj().imag, "lazy-output"),
        (lambda: torch.zeros(2, 1).expand(2, 3), "lazy-output"),
        (lambda: torch.zeros(2, 3).to_sparse(), "lazy-output"),
        (lambda: torch._to_functional_tensor(torch.zeros(2, 3)), "lazy-output"),
        (lambda: (torch.zeros(2, 3),), "wrong-structure"),
        (lambda: torch.zeros(2, 3, dtype=torch.float64), "wrong-structure"),
        (lambda: torch.zeros(3, 2), "wrong-structure"),
        (lambda: None, "wrong-structure"),
        (lambda: {"y": torch.zeros(2, 3)}, "wrong-structure"),
    ],
)
def test_what_is_no_plain_tensor_is_described_as_such(returned: Callable[[], Any], code: str) -> None:
    form = Form.of(["y"], (), torch.zeros(2, 3))
    assert structure_fault(describe(returned()), form, "cpu").code == code


@pytest.mark.parametrize("hostile", [None, 3, [], {}, {"container": "tensor"}, {"container": "tensor", "items": [3]}])
def test_any_description_becomes_a_finding(hostile: Any) -> None:
    form = Form.of(["y"], (), torch.zeros(2, 3))
    assert structure_fault(hostile, form, "cpu").code == "wrong-structure"


def test_control_does_all_but_the_work() -> None:
    draw = Draws(load("p28"), "smoke", "cpu").next()
    worker, transport, form = _Worker(None), FileTransport("cpu"), draw.form()
    worker.echo({"device": "cpu", "form": form.to_json()}, [])
    parcel = transport.pack(draw.inputs, form)
    reply = worker.call(parcel.message, parcel.descriptors)
    assert set(reply) == {"op", "ns"} and reply["ns"] < 10**9
    assert parcel.collect()[0].isnan().all(), "a worker learns where outputs go only when it has answered"
    assert worker.deliver(parcel.delivery, parcel.delivery_descriptors) == {"op": "delivered"}
    assert parcel.collect()[0].shape == draw.expected[0].shape
    parcel.sent()


def test_outputs_of_the_control_that_no_cache_can_hold_lie_in_the_same_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = Draws(load("p50"), "smoke", "cpu").next()
    form, large = draw.form(), sorted(x.nbytes for x in draw.expected)[-3:]
    monkeypatch.setattr(module, "_HUGE", large[0])
    worker, transport = _Worker(None), FileTransport("cpu")
    worker.echo({"device": "cpu", "form": form.to_json()}, [])
    assert worker._solve is not None
    made = worker._solve()
    assert len({x.untyped_storage().data_ptr() for x in made}) == len(made) - 2
    assert max(x.untyped_storage().nbytes() for x in made) == large[-1]
    parcel = transport.pack(draw.inputs, form)
    assert set(worker.call(parcel.message, parcel.descriptors)) == {"op", "ns"}
    assert worker.deliver(parcel.delivery, parcel.delivery_descriptors) == {"op": "delivered"}
    assert [x.shape for x in parcel.collect()] == [x.shape for x in draw.expected]
    parcel.sent()
    worker.forget({}, [])
    assert worker._solve is None and not worker._results, "what it held is free for others"


def test_unwritten_outputs_are_poison_and_late_writes_show() -> None:
    draw = Draws(load("p28"), "smoke", "cpu").next()
    parcel = FileTransport("cpu").pack(draw.inputs, draw.form())
    assert parcel.collect()[0].isnan().all()
    assert parcel.unchanged()
    late = draw.form().outputs[0].tensor_in(buffers.map_file(parcel.delivery_descriptors[0]))
    late[0, 0] = 1.0
    assert not parcel.unchanged()
    parcel.sent()
