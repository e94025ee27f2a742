"""The worker: the only process that imports a submission. It holds no seed, no problem, no expected output.

It is forked from the host (`host.py`), takes one call at a time from its channel and answers in plain JSON. Nothing
that it says is believed unless the verifier can check or bound it, so what happens here need not be tamper-proof; it
need only be exact for an honest submission. The same code without a submission is the verifier's control
(`control.py`).
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from metakernelbench.grading import buffers, cuda_ipc
from metakernelbench.grading.buffers import Slot
from metakernelbench.grading.channel import Channel, ChannelClosed
from metakernelbench.grading.observation import Observation
from metakernelbench.grading.warming import Warming

_clock = time.perf_counter_ns
_copy = torch.Tensor.copy_
_MAX_TEXT = 4000
"""Characters: escaped as JSON, twelve bytes each at worst, they fit a message."""
_NOTHING_SEEN = {"launches": 0, "foreign": "", "altered": 0, "events": list[Any]()}
_HUGE = 1 << 30
"""Bytes of a tensor that no cache can hold."""
_MAX_TENSORS = 32
_MAX_DIMENSIONS = 16


class _Rejected(Exception):
    """A fault of the submission, as a code and what was seen."""

    def __init__(self, code: str, text: str, line: int | None = None) -> None:
        super().__init__(text)
        self.code, self.text, self.line = code, text, line


def serve(channel: Channel, scratch: Path | None) -> None:
    """Answer calls until the channel closes. `scratch` is where kernel.py is written; None for the control."""
    worker = _Worker(scratch)
    operations = {
        "probe": worker.probe,
        "load": worker.load,
        "echo": worker.echo,
        "wake": worker.wake,
        "call": worker.call,
        "deliver": worker.deliver,
        "forget": worker.forget,
    }
    patience_s = 0.0
    while True:
        try:
            channel.await_busily(patience_s)
            message, descriptors = channel.receive_with_descriptors()
        except ChannelClosed:
            return
        patience_s = message["patience_s"] if message["op"] == "wake" else 0.0
        try:
            reply = operations[message["op"]](message, descriptors)
        except _Rejected as fault:
            reply = {"op": "error", "code": fault.code, "text": fault.text[-_MAX_TEXT:], "line": fault.line}
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        channel.send({"id": message["id"], **worker.observed(), **reply})


class _Worker:
    def __init__(self, scratch: Path | None) -> None:
        self._scratch = scratch
        self._device = "cpu"
        self._container = "tensor"
        self._inputs: list[Slot] = []
        self._outputs: list[Slot] = []
        self._solve: Callable[..., Any] | None = None
        self._path = ""
        self._observation: Observation | None = None
        self._mapped: dict[str, torch.Tensor] = {}
        self._results: list[torch.Tensor] = []
        self._warming: Warming | None = None

    def observed(self) -> dict[str, Any]:
        """What the observation saw since the last answer. Without one, as in the control, an answer of the same size,
        so that carrying it costs the same."""
        return self._observation.take() if self._observation is not None else dict(_NOTHING_SEEN)

    # operations -------------------------------------------------------------------------------------------------------

    def probe(self, message: dict[str, Any], _descriptors: Sequence[int]) -> dict[str, Any]:
        """Say that this worker works, and whether it can map a block of the verifier's GPU memory. Asked before
        anything is imported."""
        try:
            if message["block"] is not None:
                self._map(message["block"], iter(()))
        except cuda_ipc.CudaError as error:
            return {"op": "probed", "problem": str(error)}
        return {"op": "probed", "problem": ""}

    def load(self, message: dict[str, Any], descriptors: Sequence[int]) -> dict[str, Any]:
        """Import the submission, whose source is the first descriptor's file."""
        assert self._scratch is not None, "the control loads no submission"
        self._prepare(message)
        self._make_room()
        path = self._scratch / f"{os.getpid()}" / "kernel.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.dup(descriptors[0]), "rb") as file:
            path.write_bytes(file.read())
        self._path = str(path)
        plugin, scratch = (message["dsl_module"], message["dsl_class"]), str(self._scratch)
        self._observation = Observation(*plugin, self._path, scratch, passing=not message["observed"])
        module = self._import(path)
        solve = getattr(module, "solve", None)
        if not callable(solve):
            raise _Rejected("no-solve", "kernel.py was imported and has no callable `solve`")
        self._solve = solve
        gc.collect()
        gc.freeze()
        return {"op": "loaded"}

    def echo(self, message: dict[str, Any], _descriptors: Sequence[int]) -> dict[str, Any]:
        """Do the control's work: a `solve` that does nothing and returns tensors of the form asked for. Of these, all
        that no cache can hold lie in the same memory: they are only read, which takes as long as if they did not."""
        self._prepare(message)
        self._make_room()
        huge = max((slot.span for slot in self._outputs if slot.span >= _HUGE), default=0)
        block = torch.empty(huge, dtype=torch.uint8, device=self._device)
        tensors = [
            replace(slot, offset=0).tensor_in(block)
            if slot.span >= _HUGE
            else torch.empty_strided(slot.shape, slot.stride, dtype=slot.torch_dtype, device=self._device)
            for slot in self._outputs
        ]
        result = {"tensor": tensors[:1], "list": tensors}.get(self._container, tuple(tensors))
        self._solve = lambda *_: result[0] if self._container == "tensor" else result
        return {"op": "loaded"}

    def wake(self, message: dict[str, Any], _descriptors: Sequence[int]) -> dict[str, Any]:
        """Be ready for a call that comes right after this."""
        if self._warming is None:
            self._warming = Warming()
        return {"op": "awake", "turns": self._warming.run(message["ns"])}

    def call(self, message: dict[str, Any], descriptors: Sequence[int]) -> dict[str, Any]:
        """One call of `solve`: map the inputs, run it between two clock readings, keep the outputs to deliver them."""
        assert self._solve is not None, "load before call"
        inputs = self._map(message["inputs"], iter(descriptors))
        layout = message.get("layout")  # where this draw's inputs have other shapes than the first's
        slots = self._inputs if layout is None else [Slot.from_json(item) for item in layout]
        arguments = self._arguments(slots, inputs, message["values"])
        if self._observation is not None:
            self._observation.begin(message["mode"], [x for x in arguments if isinstance(x, torch.Tensor)])
        nanoseconds, result = self._timed(self._solve, arguments)
        if not self._fits(result):
            return {"op": "result", "ns": nanoseconds, "structure": describe(result)}
        self._results = [result] if self._container == "tensor" else list(result)
        nanoseconds += self._settle(self._results)
        return {"op": "result", "ns": nanoseconds}

    def deliver(self, message: dict[str, Any], descriptors: Sequence[int]) -> dict[str, Any]:
        """Copy the last call's outputs to the buffer that the verifier names only now."""
        results, self._results = self._results, []
        self._copy_out(results, self._map(message["outputs"], iter(descriptors))[message["offset"] :])
        return {"op": "delivered"}

    def forget(self, _message: dict[str, Any], _descriptors: Sequence[int]) -> dict[str, Any]:
        """Give up the verifier's blocks of GPU memory, which it is about to free. For the control, which outlives
        them."""
        mapped, self._mapped = self._mapped, {}
        for block in mapped.values():
            cuda_ipc.unmap(block)
        self._make_room()
        return {"op": "forgotten"}

    # parts ------------------------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Give back what an echo has taken of the GPU's memory, which others need."""
        self._solve, self._results = None, []
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()

    def _prepare(self, message: dict[str, Any]) -> None:
        """Learn the device and the form of every call."""
        form = message["form"]
        self._device, self._container = message["device"], form["container"]
        self._inputs = [Slot.from_json(item) for item in form["inputs"]]
        self._outputs = [Slot.from_json(item) for item in form["outputs"]]

    def _arguments(self, slots: Sequence[Slot], block: torch.Tensor, values: Sequence[Any]) -> list[Any]:
        """What `solve` is called with. Tensors that came through a file go to the GPU where its memory is not
        shared."""
        numbers = iter(values)
        arguments = [slot.tensor_in(block) if slot.is_tensor else next(numbers) for slot in slots]
        if block.device.type == self._device:
            return arguments
        return [x.to(self._device) if isinstance(x, torch.Tensor) else x for x in arguments]

    def _fits(self, result: Any) -> bool:
        """Whether the outputs can be copied: the container, exact tensors of these dtypes and shapes, plain memory."""
        if self._container == "tensor":
            tensors = [result]
        elif type(result).__name__ == self._container and isinstance(result, tuple | list):
            tensors = list(result)
        else:
            return False
        return len(tensors) == len(self._outputs) and all(
            type(x) is torch.Tensor
            and x.dtype is slot.torch_dtype
            and tuple(x.shape) == slot.shape
            and x.device.type == self._device
            and not _laziness(x)
            for x, slot in zip(tensors, self._outputs, strict=True)
        )

    def _import(self, path: Path) -> ModuleType:
        spec = importlib.util.spec_from_file_location("kernel", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["kernel"] = module
        try:
            spec.loader.exec_module(module)
        except BaseException as error:  # SystemExit and KeyboardInterrupt are the submission's as well
            raise self._rejection(error, "import-error") from None
        return module

    def _map(self, block: dict[str, Any] | None, files: Iterator[int]) -> torch.Tensor:
        """A block of the verifier's: exported GPU memory, or the next file."""
        if block is None:
            return buffers.map_file(next(files))
        if block["handle"] not in self._mapped:
            self._mapped[block["handle"]] = cuda_ipc.map_exported(block["handle"], block["size"])
        return self._mapped[block["handle"]]

    def _timed(self, function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[int, Any]:
        """Nanoseconds of one call by the contract's procedure, and what it returned."""
        gc.disable()
        try:
            if self._device == "cpu":
                start = _clock()
                result = function(*arguments)
                return _clock() - start, result
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            begin.record()
            result = function(*arguments)
            torch.cuda.synchronize()
            end.record()
            end.synchronize()
            return round(begin.elapsed_time(end) * 1e6), result
        except BaseException as error:
            raise self._rejection(error, "runtime-error") from None
        finally:
            gc.enable()

    def _settle(self, tensors: list[Any]) -> int:
        """Bring outputs into the strides of the reference's. That is part of the work, so its time counts."""
        nanoseconds = 0
        for i, slot in enumerate(self._outputs):
            if tensors[i].stride() != slot.stride:
                settled = torch.empty_strided(slot.shape, slot.stride, dtype=slot.torch_dtype, device=self._device)
                spent, tensors[i] = self._timed(_copy, [settled, tensors[i].detach()])
                nanoseconds += spent
        return nanoseconds

    def _copy_out(self, tensors: Sequence[torch.Tensor], target: torch.Tensor) -> None:
        try:
            for slot, tensor in zip(self._outputs, tensors, strict=True):
                _copy(slot.tensor_in(target), tensor.detach())
            if self._device != "cpu":
                torch.cuda.synchronize()
        except BaseException as error:
            raise self._rejection(error, "runtime-error") from None

    def _rejection(self, error: BaseException, code: str) -> _Rejected:
        """The rejection that `error` of the submission amounts to, with its last lines inside kernel.py."""
        text = "".join(traceback.format_exception(error, limit=-6))
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text:
            code = "memory-limit"
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == self._path]
        return _Rejected(code, text.replace(self._path, "kernel.py"), lines[-1] if lines else None)


def describe(result: Any) -> dict[str, Any]:
    """The structure of what `solve` returned, without touching its data."""
    if type(result) is torch.Tensor:
        return {"container": "tensor", "items": [_describe_tensor(result)]}
    container = _type_name(result)
    if type(result) not in (tuple, list):
        return {"container": container, "items": []}
    return {"container": container, "items": [_describe_item(item) for item in result[:_MAX_TENSORS]]}


def _describe_item(item: Any) -> dict[str, Any]:
    return _describe_tensor(item) if type(item) is torch.Tensor else {"type": _type_name(item)}


def _describe_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "type": "tensor",
        "dtype": buffers.dtype_name(tensor.dtype),
        "shape": list(tensor.shape[:_MAX_DIMENSIONS]),
        "device": tensor.device.type,
        "lazy": _laziness(tensor),
    }


def _laziness(tensor: torch.Tensor) -> str:
    """Why the data of an exact tensor may not lie where it seems to; empty for plain dense memory."""
    if tensor.layout is not torch.strided:
        return f"layout {tensor.layout}"
    if tensor.is_neg() or tensor.is_conj():
        return "a negated or conjugate view"
    functorch = torch._C._functorch
    if torch._is_functional_tensor(tensor) or functorch.is_functorch_wrapped_tensor(tensor):
        return "a wrapped tensor"
    return "a view that visits an address twice" if buffers.overlaps_itself(tensor) else ""


def _type_name(value: Any) -> str:
    return type(value).__name__[:80]
