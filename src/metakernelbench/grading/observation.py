"""What an observed worker sees of a submission: its launches, and actions that a kernel has no need of.

Only the untimed pass runs observed. Launches are seen through the DSL plugin and can be left out, disturbed or replaced
by copies (`Mode`); actions are seen through an audit hook and count only where kernel.py itself is what asked for them,
since the DSLs start compilers and write files of their own. All of this lives in the submission's process: it is
evidence.
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from enum import StrEnum
from types import FrameType
from typing import Any

import torch

from metakernelbench.dsls.dsl import Launch
from metakernelbench.dsls.launches import Passing, memory_of

_MAX_EVENTS = 8
_PROBES = 8
"""How many elements are looked for before, and how many places are looked at after."""
_PLACES_AT_ONCE = 1 << 26
"""What fits beside a submission that fills a GPU."""


type _Source = tuple[torch.Tensor, torch.Tensor]
"""An argument before a launch, and all the memory that it lay in (1-D)."""


class Mode(StrEnum):
    """What happens to the launches of a call."""

    OBSERVE = "observe"
    """They run as they are."""
    SUPPRESS = "suppress"
    """They are left out."""
    PERTURB = "perturb"
    """They run, and what they wrote is disturbed well above any tolerance."""
    RECORD = "record"
    """They run as they are, and what they wrote is kept for the next call."""
    REPLAY = "replay"
    """They run, and what they wrote is replaced by what was recorded: plausible results, but of other inputs."""
    COPY = "copy"
    """Each is replaced by a copy of the argument that comes nearest to what it wrote, or of a part of the memory that
    an argument lies in. An argument that is, or merely rearranges, one of the call's inputs does not count: moving
    inputs is honest work, unless something else was written into them. Without one, the launch is left out."""


class Observation:
    """Installs the observation in this process, and collects what it sees between two answers."""

    def __init__(self, dsl_module: str, dsl_class: str, path: str, scratch: str, *, passing: bool) -> None:
        """With `passing`, launches are counted and nothing else: that is how a worker runs that is timed."""
        self._mode = Mode.OBSERVE
        self._path = path
        self._launches = 0
        self._foreign = ""
        self._altered = 0
        self._events: list[dict[str, Any]] = []
        self._inputs: list[torch.Tensor] = []
        self._contents: list[int] = []
        self._recorded: list[dict[int, torch.Tensor]] = []
        plugin = getattr(importlib.import_module(dsl_module), dsl_class)()
        plugin.intercept(self._on_launch)
        Passing.on = passing
        if not passing:
            _Watch(path, scratch, self._events)

    def begin(self, mode: str, inputs: Sequence[torch.Tensor]) -> None:
        """A call with these input tensors begins."""
        self._mode = Mode(mode)
        self._launches = self._altered = Passing.launches = 0
        self._foreign = ""
        self._inputs = list(inputs)
        self._contents = [_content_of(x) for x in inputs] if self._mode is Mode.COPY else []
        if self._mode is not Mode.REPLAY:
            self._recorded.clear()

    def take(self) -> dict[str, Any]:
        """What was seen since the last answer."""
        events = self._events[:_MAX_EVENTS]
        self._events.clear()
        return {
            "launches": self._launches + Passing.launches,
            "foreign": self._foreign[:200],
            "altered": self._altered,
            "events": events,
        }

    # launches ---------------------------------------------------------------------------------------------------------

    def _on_launch(self, kernel: str, tensors: Sequence[torch.Tensor], launch: Launch) -> None:
        file, _, _ = kernel.rpartition(":")
        if file and file != self._path and not file.startswith("<"):
            self._foreign = kernel  # somebody else's kernel: runs as it is, and counts for nothing
            launch()
            return
        self._launches += 1
        if self._mode is Mode.OBSERVE:
            launch()
        elif self._mode is Mode.SUPPRESS:
            self._altered += 1
        else:
            self._alter(_distinct(tensors), launch)
            if tensors and tensors[0].is_cuda:
                torch.cuda.empty_cache()  # copies of all arguments can be much of the GPU's memory

    def _alter(self, tensors: list[torch.Tensor], launch: Launch) -> None:
        """Run the launch, then change or replace what it wrote."""
        with torch.no_grad():
            before = [x.clone() for x in tensors]
            sources = self._sources(tensors, before) if self._mode is Mode.COPY else {}
            launch()
            written = [i for i, (x, old) in enumerate(zip(tensors, before, strict=True)) if not same_bits(x, old)]
            if self._mode is Mode.RECORD:
                self._recorded.append({i: tensors[i].clone() for i in written})
                return
            self._altered += not written  # a launch that changes nothing is as good as left out
            for i in written:
                if self._mode is Mode.PERTURB:
                    self._altered += perturb(tensors[i], before[i])
                elif self._mode is Mode.REPLAY:
                    recorded = self._recorded_result(i, tensors[i])
                    tensors[i].copy_(before[i] if recorded is None else recorded)
                    self._altered += 1
                else:
                    copy = _copied(tensors[i], [source for j, source in sources.items() if j != i])
                    tensors[i].copy_(before[i] if copy is None else copy)
                    self._altered += 1

    def _sources(self, tensors: list[torch.Tensor], before: list[torch.Tensor]) -> dict[int, _Source]:
        """What a launch that only copies could copy from, as it is before the launch: all arguments but inputs."""
        inputs = [x for x, content in zip(self._inputs, self._contents, strict=True) if _content_of(x) == content]
        return {
            j: (old, _memory_before(x, old))
            for j, (x, old) in enumerate(zip(tensors, before, strict=True))
            if not _is_input(x, inputs)
        }

    def _recorded_result(self, argument: int, like: torch.Tensor) -> torch.Tensor | None:
        """What the launch with this number wrote to this argument in the recorded call; None where it did not."""
        number = self._launches - 1
        found = self._recorded[number].get(argument) if number < len(self._recorded) else None
        fits = found is not None and found.shape == like.shape and found.dtype is like.dtype
        return found if fits else None


def _is_input(argument: torch.Tensor, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether an argument lies in the memory of one of the inputs or holds the values of one of them."""
    storages = {x.untyped_storage().data_ptr() for x in inputs}
    if argument.untyped_storage().data_ptr() in storages:
        return True
    return any(x.numel() == argument.numel() and same_values(x, argument) for x in inputs)


def _memory_before(x: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """The memory that `x` lies in, to keep: that of a copy of `x`, unless `x` leaves some of it out."""
    leaves_out = x.untyped_storage().nbytes() > copy.untyped_storage().nbytes()
    return memory_of(x, x.dtype).clone() if leaves_out else memory_of(copy, x.dtype)


def _content_of(x: torch.Tensor) -> int:
    """A sum over the memory that `x` lies in, which changes when something else is written there."""
    memory = memory_of(x, torch.uint8)
    whole = memory.numel() // 8 * 8
    return int(memory[:whole].view(torch.int64).sum()) + int(memory[whole:].sum(dtype=torch.int64))


def _distinct(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Detached views of the tensors, each place in memory once."""
    seen: dict[tuple[int, torch.Size], torch.Tensor] = {}
    for x in tensors:
        if x.numel():
            seen.setdefault((x.data_ptr(), x.shape), x.detach())
    return list(seen.values())


def as_bits(x: torch.Tensor) -> torch.Tensor:
    """The same elements as integers of their size, which compare exactly, NaN included."""
    if x.dtype.is_complex:
        return torch.view_as_real(x)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    return x.view(width)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(as_bits(a), as_bits(b))


def perturb(x: torch.Tensor, before: torch.Tensor) -> bool:
    """Disturb the elements of `x` that differ from `before`: floats by noise as large as the largest of them, others by
    moving them one place on, so that an index stays in range. Says whether anything changed."""
    bits = as_bits(x)
    changed = bits != as_bits(before)
    values = bits[changed].view(x.dtype)
    disturbed = _noisy(values) if x.dtype.is_floating_point else ~values if x.dtype is torch.bool else values.roll(1)
    bits[changed] = as_bits(disturbed)
    return not same_bits(values, disturbed)


def _noisy(values: torch.Tensor) -> torch.Tensor:
    wide = values.double()
    finite = wide[wide.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 1.0
    limit = torch.finfo(values.dtype).max
    return (wide + (largest or 1.0) * (0.5 + torch.rand_like(wide))).clamp(-limit, limit).to(values.dtype)


def _copied(written: torch.Tensor, sources: Sequence[_Source]) -> torch.Tensor | None:
    """What copying from a source gives that comes nearest to `written`; None where nothing could be copied."""
    if any(occurs(written, memory) for _, memory in sources):
        return written.clone()
    return nearest_copy(written, [argument for argument, _ in sources])


def nearest_copy(written: torch.Tensor, candidates: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """What a copy, cast, reshape or transposition of one of the candidates gives that comes nearest to `written`; None
    where none has as many elements. Where a candidate holds the very values of `written` in another order, the launch
    was a rearrangement, and the answer is `written` itself."""
    best, best_distance = None, float("inf")
    for candidate in candidates:
        if candidate.numel() != written.numel():
            continue
        if same_values(candidate, written):
            return written.clone()
        for view in _views(candidate, written.shape):
            distance = _distance(view.double(), written.double())
            if best is None or distance < best_distance:
                best, best_distance = view, distance
    return None if best is None else best.to(written.dtype)


def occurs(written: torch.Tensor, memory: torch.Tensor) -> bool:
    """Whether the elements of `written` stand one after another somewhere in a larger `memory` of its dtype (1-D)."""
    wanted, places = as_bits(written.contiguous()).flatten(), memory.numel() - written.numel() + 1
    if memory.dtype is not written.dtype or written.dtype.is_complex or places < 2:
        return False
    there = as_bits(memory)
    probes = sorted({k * (wanted.numel() - 1) // (_PROBES - 1) for k in range(_PROBES)})
    for first in range(0, places, _PLACES_AT_ONCE):
        tried = min(_PLACES_AT_ONCE, places - first)
        fits = torch.ones(tried, dtype=torch.bool, device=memory.device)
        for probe in probes:
            fits &= there[first + probe : first + probe + tried] == wanted[probe]
        for start in fits.nonzero().flatten()[:_PROBES].tolist():
            if torch.equal(there[first + start : first + start + wanted.numel()], wanted):
                return True
    return False


def _views(x: torch.Tensor, shape: torch.Size) -> list[torch.Tensor]:
    views = [x.reshape(shape)]
    if x.dim() >= 2:
        views.append(x.transpose(-1, -2).reshape(shape))
    return views


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    difference = torch.where(a.eq(b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    return float(difference.nan_to_num(nan=float("inf")).mean())


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether `a`, cast to `b`'s dtype, holds the values of `b` in any order."""
    ordered = [as_bits(x.contiguous()).flatten().sort().values for x in (a.to(b.dtype), b)]
    return torch.equal(ordered[0], ordered[1])


# actions ------------------------------------------------------------------------------------------------------------

_PROCESS = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.forkpty",
    "pty.spawn",
)
_FORBIDDEN_EVENTS: dict[str, str] = {
    **dict.fromkeys(_PROCESS, "started a process"),
    "os.kill": "sent a signal",
    "os.killpg": "sent a signal",
    "ctypes.dlopen": "loaded a shared library",
    "ctypes.dlsym": "looked up a native symbol",
    "socket.connect": "opened a connection",
    "socket.bind": "opened a socket",
    "socket.getaddrinfo": "resolved a host name",
    "sys.settrace": "traced the interpreter",
    "sys.setprofile": "traced the interpreter",
    "gc.get_objects": "searched the heap",
    "gc.get_referrers": "searched the heap",
    "gc.get_referents": "searched the heap",
}
_FORBIDDEN_DIRECTLY = {
    "sys._getframe": "walked the stack",
    "exec": "executed generated code",
    "import": "imported a module that a kernel has no need of",
}
"""Also what the standard library does for a dataclass or a logger, hence only where kernel.py itself is the caller."""
_FORBIDDEN_MODULES = ("ctypes", "subprocess", "socket", "multiprocessing", "mmap", "_posixsubprocess", "_ctypes", "pty")
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC


class _Watch:
    """The audit hook. It notes an event where the innermost frame outside the standard library is kernel.py's."""

    def __init__(self, path: str, scratch: str, events: list[dict[str, Any]]) -> None:
        self._path, self._scratch, self._events = path, scratch, events
        paths = sysconfig.get_paths()
        self._library = (paths["stdlib"] + os.sep, paths["platstdlib"] + os.sep)
        self._packages = ("site-packages", "dist-packages")
        sys.addaudithook(self._hook())

    def _hook(self) -> Callable[[str, tuple[Any, ...]], None]:
        busy = threading.local()

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            directly = event in _FORBIDDEN_DIRECTLY
            known = directly or event in _FORBIDDEN_EVENTS or event == "open"
            if not known or getattr(busy, "here", False):
                return
            busy.here = True  # looking at the stack is itself an event
            try:
                self._note(event, arguments, sys._getframe(1), directly)
            finally:
                busy.here = False

        return hook

    def _note(self, event: str, arguments: tuple[Any, ...], frame: FrameType, directly: bool) -> None:
        detail = self._detail(event, arguments)
        if detail is None or len(self._events) >= _MAX_EVENTS:
            return
        line = self._line_of_kernel(frame, directly)
        if line is not None:
            self._events.append({"detail": detail[:200], "line": line})

    def _detail(self, event: str, arguments: tuple[Any, ...]) -> str | None:
        """What to report of this event; None for one that is no matter."""
        if event == "open":
            return self._detail_of_open(arguments)
        if event == "import":
            name = str(arguments[0])
            return f"{_FORBIDDEN_DIRECTLY[event]}: {name}" if name.partition(".")[0] in _FORBIDDEN_MODULES else None
        return _FORBIDDEN_EVENTS.get(event) or _FORBIDDEN_DIRECTLY[event]

    def _detail_of_open(self, arguments: tuple[Any, ...]) -> str | None:
        path, mode, flags = arguments
        writes = (isinstance(flags, int) and flags & _WRITE_FLAGS) or (
            isinstance(mode, str) and set(mode) & set("wax+")
        )
        if isinstance(path, int) or not path:
            return None
        name = os.fsdecode(path)
        if writes and not os.path.abspath(name).startswith((self._scratch, "/dev/null")):  # noqa: PTH100
            return f"wrote the file {name}"
        return f"read {name}" if name.startswith("/proc/") and "/mem" in name else None

    def _line_of_kernel(self, frame: FrameType | None, directly: bool) -> int | None:
        """The line of kernel.py that asked; None where a package asked, or the standard library where that counts."""
        while frame is not None:
            name = frame.f_code.co_filename
            if name == self._path:
                return frame.f_lineno
            if directly or not (name.startswith("<") or self._is_library(name)):  # "<...>" is generated code
                return None
            frame = frame.f_back
        return None

    def _is_library(self, name: str) -> bool:
        return name.startswith(self._library) and not any(part in name for part in self._packages)
