"""Carries one call's inputs to a worker and its outputs back, from the verifier's side.

The inputs become visible to the worker only once the verifier's clock runs: through a new shared-memory file whose
descriptor travels with the call (CPU), or by a copy into an exported buffer inside the measured window (CUDA). The
outputs are what lies in the verifier's own, poisoned buffer when the clock stops.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from metakernelbench.grading import buffers, cuda_ipc
from metakernelbench.grading.buffers import Form
from metakernelbench.problems.problem import Inputs

_ELSEWHERE = 8
_OFFSETS, _STEP = 256, 256
"""Outputs in memory that a worker has mapped before lie at one of so many places, so many bytes apart."""
_ROOM = 1 << 20
"""What the inputs of a draw may take beyond those of the first, where their shapes vary."""
_MOST_OF_THE_GPU = 1 / 16
"""What a second pair of buffers may take: the anchor of a problem with many weights needs most of the rest."""
_POISON = 0xFF
"""NaN in every float format, -1 in every signed integer."""


@dataclass
class Parcel:
    """One call's buffers, ready to be sent."""

    message: dict[str, Any]
    """The call's message, but for what identifies it."""
    descriptors: list[int]
    delivery: dict[str, Any]
    """Where the outputs go, which the worker learns when it has answered the call: what it could write there before
    would save it the copy, whose time is not the submission's and could be claimed as saved."""
    delivery_descriptors: list[int]
    started_ns: int
    """When the inputs began to be visible."""
    target: torch.Tensor
    form: Form
    device: str
    buffer: int = 0
    """Which of the transport's buffers carry the call, where it has several."""
    outputs: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    _seen_unchanged: bool | None = None

    def sent(self) -> None:
        """The worker has its own descriptors now."""
        for descriptor in (*self.descriptors, *self.delivery_descriptors):
            os.close(descriptor)
        self.descriptors, self.delivery_descriptors = [], []

    def collect(self) -> list[torch.Tensor]:
        """The outputs as they are now, as private copies."""
        if self.device != "cpu":
            torch.cuda.synchronize()
        self.outputs = [slot.tensor_in(self.target).to(self.device, copy=True) for slot in self.form.outputs]
        if self.device != "cpu":
            torch.cuda.synchronize()
        return self.outputs

    def unchanged(self) -> bool:
        """Whether the buffer still holds what was collected; after `let_go`, whether it did then."""
        if self._seen_unchanged is not None:
            return self._seen_unchanged
        now = [slot.tensor_in(self.target).to(self.device) for slot in self.form.outputs]
        return all(torch.equal(_bytes(a), _bytes(b)) for a, b in zip(now, self.outputs, strict=True))

    def let_go(self) -> None:
        """Look at the buffer for the last time: it is needed for another call."""
        self._seen_unchanged = self.unchanged()


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


class Transport(Protocol):
    """A way to carry calls."""

    device: str

    def pack(self, inputs: Inputs, form: Form, keep: Parcel | None = None) -> Parcel:
        """Buffers for one call: its inputs, and poisoned room for its outputs. Those of `keep` stay as they are,
        because they are still to be looked at, or are looked at now where there are no others."""
        ...

    def close(self) -> None: ...


class FileTransport:
    """Shared-memory files, a new pair for every call. On a GPU it is the fallback: the worker copies to the device."""

    def __init__(self, device: str) -> None:
        self.device = device

    def pack(self, inputs: Inputs, form: Form, keep: Parcel | None = None) -> Parcel:
        input_file, block = buffers.create_file(form.input_bytes)
        buffers.fill(form.inputs, block, inputs)
        output_file, target = buffers.create_file(form.output_bytes)
        target.fill_(_POISON)
        message, delivery = {"values": _numbers(inputs), "inputs": None}, {"outputs": None, "offset": 0}
        started = time.perf_counter_ns()
        return Parcel(message, [input_file], delivery, [output_file], started, target, form, self.device)

    def close(self) -> None:
        pass


def choose_buffers(free: Sequence[int]) -> int:
    """Which of the free pairs of buffers carries the next call: nearly always the first, and in one call of eight, that
    nobody can foresee, another. Memory that comes again is warm, as it is for the reference; what relies on addresses,
    such as a replayed launch, is wrong in the eighth."""
    if len(free) > 1 and secrets.randbelow(_ELSEWHERE) == 0:
        return secrets.choice(free[1:])
    return free[0]


class IpcTransport:
    """Raw GPU allocations exported to the worker: two pairs, used in an order that the worker cannot foresee, or one
    where a second would take too much of the GPU."""

    def __init__(self, form: Form) -> None:
        self.device = "cuda"
        sizes = (form.input_bytes + _ROOM, form.output_bytes + _OFFSETS * _STEP)
        pairs = 2 if sum(sizes) <= _MOST_OF_THE_GPU * torch.cuda.mem_get_info()[1] else 1
        self._blocks = [[_Exported(size) for size in sizes] for _ in range(pairs)]

    def probe(self) -> dict[str, Any]:
        """A block's message, with which a worker can try whether sharing works here."""
        return self._blocks[0][1].message

    def pack(self, inputs: Inputs, form: Form, keep: Parcel | None = None) -> Parcel:
        if keep is not None and len(self._blocks) == 1:
            keep.let_go()
            keep = None
        free = [n for n in range(len(self._blocks)) if keep is None or n != keep.buffer]
        chosen = choose_buffers(free)
        source, whole = self._blocks[chosen]
        if form.input_bytes > source.block.numel():
            raise ValueError(f"a draw's inputs take {form.input_bytes} bytes, far more than those of the first draw")
        whole.block.fill_(_POISON)
        offset = _STEP * secrets.randbelow(_OFFSETS)
        target = whole.block[offset : offset + form.output_bytes]
        torch.cuda.synchronize()
        started = time.perf_counter_ns()
        buffers.fill(form.inputs, source.block, inputs)
        torch.cuda.synchronize()
        message = {"values": _numbers(inputs), "inputs": source.message}
        delivery = {"outputs": whole.message, "offset": offset}
        return Parcel(message, [], delivery, [], started, target, form, "cuda", chosen)

    def close(self) -> None:
        """Free the blocks; the workers that mapped them have ended."""
        blocks, self._blocks = self._blocks, []
        for pair in blocks:
            for exported in pair:
                with contextlib.suppress(cuda_ipc.CudaError):  # a context that the grading broke cannot free either
                    cuda_ipc.free(exported.pointer)


class _Exported:
    def __init__(self, size: int) -> None:
        self.pointer, self.block = cuda_ipc.allocate(size)
        self.message = {"handle": cuda_ipc.export(self.pointer), "size": size}


def _numbers(inputs: Inputs) -> list[Any]:
    """The inputs that are no tensors, in their order."""
    return [x for x in inputs if not isinstance(x, torch.Tensor)]
