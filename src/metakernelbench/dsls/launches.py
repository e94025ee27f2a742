"""What the DSL modules share: finding the tensors among a launch's arguments, and telling the interceptor.

Runs in the worker's untimed pass only, so it may be slow.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.utils.dlpack

from metakernelbench.dsls.dsl import Interceptor

type Resolve = Callable[[Any], torch.Tensor | int | None]
"""What stands behind an argument that only one DSL knows: a tensor, an address, or neither."""

_SMALLEST_ADDRESS = 1 << 16
"""No tensor lies below; smaller integers are sizes and flags."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Passing:
    """Whether launches only pass by, counted and nothing else, as they do where calls are timed. The patches are the
    same there as where launches are looked at: a submission that could tell one from the other would behave in one."""

    on = False
    launches = 0

    @classmethod
    def counted(cls, launch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the launch returns; one that raises is none."""
        returned = launch(*args, **kwargs)
        cls.launches += 1
        return returned


_nesting: ContextVar[bool] = ContextVar("_nesting", default=False)
"""Whether a launch is being performed."""


def observed(
    interceptor: Interceptor,
    kernel: str,
    arguments: Iterable[Any],
    launch: Callable[[], Any],
    resolve: Resolve = lambda _argument: None,
) -> Any:
    """Hand one launch to the interceptor; what the launch returns, or None where it was left out.

    Launches that a launch makes itself are part of it: a DSL's entry points often call one another.
    """
    if _nesting.get():
        return launch()
    results: list[Any] = []

    def perform() -> None:
        token = _nesting.set(True)
        try:
            results.append(launch())
        finally:
            _nesting.reset(token)

    interceptor(kernel, list(tensors_among(arguments, resolve)), perform)
    return results[-1] if results else None


def tensors_among(arguments: Iterable[Any], resolve: Resolve) -> Iterator[torch.Tensor]:
    """Every tensor that the arguments hold or point to, containers and DLPack objects included."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from tensors_among(argument, resolve)
        elif isinstance(argument, dict):
            yield from tensors_among(argument.values(), resolve)
        else:
            found = _tensor_behind(argument, resolve)
            if found is not None:
                yield found


def _tensor_behind(argument: Any, resolve: Resolve) -> torch.Tensor | None:
    found = resolve(argument)
    if isinstance(found, torch.Tensor):
        return found
    address = found if found is not None else _address(argument)
    if address is not None:
        return tensor_at(address)
    return torch.utils.dlpack.from_dlpack(argument) if hasattr(argument, "__dlpack__") else None


def _address(argument: Any) -> int | None:
    """The address that a plain Python argument may stand for."""
    if isinstance(argument, ctypes.c_void_p):
        return argument.value
    return argument if type(argument) is int and argument >= _SMALLEST_ADDRESS else None


def tensor_at(address: int) -> torch.Tensor | None:
    """The largest live tensor that starts at `address`; failing that, what follows `address` in a live tensor's memory.

    Kernels may be given bare pointers; a tensor that they came from must be alive somewhere for them to be valid.
    """
    alive: list[torch.Tensor] = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and _has_memory(x)]
    starting_there = [x for x in alive if x.data_ptr() == address]
    if starting_there:
        return max(starting_there, key=lambda x: x.numel())
    for x in alive:
        memory = x.untyped_storage()
        offset = address - memory.data_ptr()
        if 0 < offset < memory.nbytes():
            return memory_of(x, torch.uint8)[offset:]
    return None


def memory_of(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """All of the memory that `x` lies in, also what `x` leaves out, as a 1-D tensor of this dtype."""
    return torch.empty(0, dtype=dtype, device=x.device).set_(x.untyped_storage())


def _has_memory(x: torch.Tensor) -> bool:
    """Whether `x` is dense and real, so that its address may be asked for."""
    return x.layout is torch.strided and x.device.type in ("cpu", "cuda") and x.numel() > 0 and type(x) in _PLAIN
