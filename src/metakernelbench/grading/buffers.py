"""Tensors in shared buffers: how one call's inputs and outputs lie in a block of bytes that two processes map.

Both sides use this module. A block is described in plain JSON (`Slot`s); its memory is a sealed shared-memory file on a
CPU, or a raw allocation exported by handle on a GPU (`cuda_ipc.py`).
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch

_ALIGNMENT = 256


@dataclass(frozen=True)
class Slot:
    """Where one tensor lies in a block, and what it is; or the place of a Python number, which travels by itself."""

    dtype: str
    """Empty for a Python number."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Slot:
        return Slot(data["dtype"], tuple(data["shape"]), tuple(data["stride"]), data["offset"])

    @property
    def is_tensor(self) -> bool:
        return bool(self.dtype)

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        return dtype_of(self.dtype)

    @cached_property
    def span(self) -> int:
        """Bytes from the first element to behind the last."""
        if any(n == 0 for n in self.shape):
            return 0
        last = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.torch_dtype.itemsize

    def tensor_in(self, block: torch.Tensor) -> torch.Tensor:
        """The tensor in a block given as a one-dimensional uint8 tensor."""
        flat = block[self.offset : self.offset + self.span].view(self.torch_dtype)
        return flat.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Form:
    """What goes in and out of every call of a problem's workload: layouts only, no data."""

    names: tuple[str, ...]
    """Of the outputs."""
    container: str
    """What the outputs come in: `tensor`, `tuple` or `list`."""
    inputs: tuple[Slot, ...]
    input_bytes: int
    outputs: tuple[Slot, ...]
    output_bytes: int

    @staticmethod
    def of(names: Sequence[str], inputs: Sequence[Any], result: Any) -> Form:
        """The form of a call with these inputs that returns `result`."""
        outputs = [result] if isinstance(result, torch.Tensor) else list(result)
        container = "tensor" if isinstance(result, torch.Tensor) else type(result).__name__
        return Form(tuple(names), container, *_lay_out(inputs), *_lay_out(outputs))

    def of_draw(self, inputs: Sequence[Any]) -> Form:
        """The form of a call with these inputs, whose shapes may vary from draw to draw; the outputs' do not."""
        shapes = [tuple(x.shape) for x in inputs if isinstance(x, torch.Tensor)]
        if shapes == [slot.shape for slot in self.inputs if slot.is_tensor]:
            return self
        slots, size = _lay_out(inputs)
        return replace(self, inputs=slots, input_bytes=size)

    def to_json(self) -> dict[str, Any]:
        return {
            "container": self.container,
            "inputs": [slot.to_json() for slot in self.inputs],
            "outputs": [slot.to_json() for slot in self.outputs],
        }


def dtype_of(name: str) -> torch.dtype:
    """The dtype called `name`, such as `bfloat16`."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _lay_out(values: Sequence[Any]) -> tuple[tuple[Slot, ...], int]:
    """Slots for `values` one behind the other, and the size of the block. A view that visits an address twice is laid
    out contiguously, everything else with its own strides."""
    slots, end = [], 0
    for value in values:
        if not isinstance(value, torch.Tensor):
            slots.append(Slot("", (), (), 0))
            continue
        stride = value.stride() if not overlaps_itself(value) else torch.empty(value.shape, device="meta").stride()
        slot = Slot(dtype_name(value.dtype), tuple(value.shape), tuple(stride), end)
        slots.append(slot)
        end += -(-slot.span // _ALIGNMENT) * _ALIGNMENT
    return tuple(slots), max(end, _ALIGNMENT)


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may share an address (a stride that is smaller than what lies inside it)."""
    inner = 1
    for stride, size in sorted((abs(s), n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride < inner:
            return True
        inner = stride * (size - 1) + inner
    return False


def fill(slots: Sequence[Slot], block: torch.Tensor, values: Sequence[Any]) -> None:
    """Copy `values` to their places."""
    for slot, value in zip(slots, values, strict=True):
        if slot.is_tensor:
            slot.tensor_in(block).copy_(value)


def create_file(size: int) -> tuple[int, torch.Tensor]:
    """A new shared-memory file of fixed size: its descriptor, and its bytes as a tensor. The seals keep the other side
    from shrinking it, which would kill whoever reads it."""
    descriptor = os.memfd_create("mkb", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor, map_file(descriptor)


def map_file(descriptor: int) -> torch.Tensor:
    """The bytes of a shared-memory file; the mapping lives as long as a tensor in it."""
    size = os.fstat(descriptor).st_size
    mapping = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return torch.frombuffer(mapping, dtype=torch.uint8)
