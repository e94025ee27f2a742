"""Calls of a worker, from the verifier's side: every way in which a call can end becomes a result or a
`SubmissionFault`."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from metakernelbench.dsls.dsl import Dsl
from metakernelbench.grading.buffers import Form
from metakernelbench.grading.channel import Channel, ChannelBroken, ChannelClosed, ChannelTimeout
from metakernelbench.grading.codes import finding
from metakernelbench.grading.disturbance import waited_ms
from metakernelbench.grading.isolation import Limits, Sandbox, Worker
from metakernelbench.grading.transport import Parcel, Transport
from metakernelbench.grading.verdict import Comparison, Finding
from metakernelbench.grading.warming import WARMING_NS
from metakernelbench.problems.problem import Inputs

_MAX_NS = 10**14
_AWAKE_S = 0.1
"""How long a worker that was woken waits for its call without rest."""
_REPORTED_CODES = ("no-solve", "import-error", "runtime-error", "memory-limit")
"""The faults that only the worker can see; all others the verifier finds itself."""


class SubmissionFault(Exception):
    """The submission did something that ends its grading."""

    def __init__(self, reason: Finding, comparisons: tuple[Comparison, ...] = ()) -> None:
        super().__init__(reason.message)
        self.finding, self.comparisons = reason, comparisons


@dataclass
class Budget:
    """The time that import and calls share; runs only while the verifier waits for the worker."""

    limit_s: float
    used_s: float = 0.0

    @property
    def remaining_s(self) -> float:
        return self.limit_s - self.used_s

    @contextmanager
    def running(self) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.used_s += time.monotonic() - start


@dataclass
class Result:
    """One call that came back."""

    claimed_ms: float
    """What the worker's clock says; to be believed only within `window_ms`."""
    window_ms: float
    """From the moment the inputs appeared until the outputs were copied, on the verifier's clock."""
    waited_ms: float
    """For how long of that the worker was ready to run and had no processor."""
    turns: int
    """How often it did the small work before; for the profile only, since the worker may say anything."""
    outputs: list[torch.Tensor]
    parcel: Parcel
    launches: int = 0
    foreign: str = ""
    """A launched kernel that another file than kernel.py defines; empty where there was none."""
    altered: int = 0
    events: list[Any] = field(default_factory=list[Any])

    @property
    def carrying_ms(self) -> float:
        """Of the window, what is not the claim."""
        return self.window_ms - self.claimed_ms


class Link:
    """A connection to one worker."""

    def __init__(
        self,
        channel: Channel,
        budget: Budget,
        *,
        tick: Callable[[], None] | None = None,
        died: Callable[[], Finding] | None = None,
        pid: int | None = None,
    ) -> None:
        self._channel, self._budget = channel, budget
        self._tick, self._died, self.pid = tick, died, pid
        self.alive = True
        self.patience_s = float("inf")
        """The longest that one answer may take, within the budget."""

    def request(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        """Send a request and return the answer to it. Raises `SubmissionFault`."""
        token = secrets.randbits(52)
        answered = False
        try:
            with self._budget.running():
                self._channel.send({"id": token, **message}, descriptors)
                reply = self._channel.receive(max(0.0, min(self._budget.remaining_s, self.patience_s)), self._tick)
            answered = reply.get("id") == token
        except ChannelClosed:
            raise SubmissionFault(self._died() if self._died else finding("worker-died")) from None
        except ChannelTimeout:
            seconds = f"{self._budget.limit_s:g} s are used up"
            raise SubmissionFault(finding("time-limit", seconds)) from None
        except ChannelBroken as error:
            raise SubmissionFault(finding("broken-channel", str(error))) from None
        finally:
            self.alive = answered
        if not answered:
            raise SubmissionFault(finding("broken-channel", "an answer to no question"))
        return reply

    def call(
        self, transport: Transport, inputs: Inputs, form: Form, mode: str = "observe", keep: Parcel | None = None
    ) -> Result:
        """One call on these inputs. Raises `SubmissionFault` for everything but outputs of the right structure. The
        buffers of `keep`, an earlier call's, stay as they are."""
        turns = self._wake() if transport.device != "cpu" else 0
        waited = self._waited_ms()
        of_draw = form.of_draw(inputs)
        parcel = transport.pack(inputs, of_draw, keep)
        asked = {"op": "call", "mode": mode, **parcel.message}
        if of_draw is not form:
            asked["layout"] = [slot.to_json() for slot in of_draw.inputs]
        try:
            reply = self.request(asked, parcel.descriptors)
            raise_if_error(reply)
            nanoseconds = _integer(reply, "ns")
            if (structure := reply.get("structure")) is not None:
                raise SubmissionFault(structure_fault(structure, form, transport.device))
            raise_if_error(self.request({"op": "deliver", **parcel.delivery}, parcel.delivery_descriptors))
        finally:
            parcel.sent()
        outputs = parcel.collect()
        window_ms = (time.perf_counter_ns() - parcel.started_ns) / 1e6
        events = reply.get("events", [])
        return Result(
            claimed_ms=nanoseconds / 1e6,
            window_ms=window_ms,
            waited_ms=self._waited_ms() - waited,
            turns=turns,
            outputs=outputs,
            parcel=parcel,
            launches=_integer(reply, "launches", 0),
            foreign=_shown(reply.get("foreign", "")),
            altered=_integer(reply, "altered", 0),
            events=events if isinstance(events, list) else [],
        )

    def _wake(self) -> int:
        """Let the worker do the small work that brings its processor up to speed; how often it says that it did it."""
        awake = self.request({"op": "wake", "ns": WARMING_NS, "patience_s": _AWAKE_S})
        raise_if_error(awake)
        return _integer(awake, "turns")

    def _waited_ms(self) -> float:
        """How long the worker has waited for a processor so far; 0 for one whose process is not known."""
        return 0.0 if self.pid is None else waited_ms(self.pid)


def raise_if_error(reply: dict[str, Any]) -> None:
    """Raise the `SubmissionFault` that an answer reports, with its fields cut to what they may be."""
    if reply.get("op") != "error":
        return
    code, text, line = reply.get("code"), reply.get("text"), reply.get("line")
    known = code if isinstance(code, str) and code in _REPORTED_CODES else "runtime-error"
    number = line if type(line) is int and 0 < line < 10**6 else None
    raise SubmissionFault(finding(known, _last_lines(text) if isinstance(text, str) else "", number))


def _last_lines(text: str, most: int = 1500) -> str:
    return text.strip()[-most:]


def _integer(reply: dict[str, Any], name: str, default: int | None = None) -> int:
    value = reply.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MAX_NS:
        raise SubmissionFault(finding("broken-channel", f"an answer without a proper `{name}`"))
    return value


def echo(form: Form, device: str) -> dict[str, Any]:
    """The request that makes a worker without a submission return tensors of this form."""
    return {"op": "echo", "device": device, "form": form.to_json()}


def load(link: Link, source: bytes, plugin: Dsl, form: Form, device: str, *, observed: bool) -> list[Any]:
    """Let a worker import the submission; the actions seen while it did. Raises `SubmissionFault`."""
    message = {
        "op": "load",
        "device": device,
        "form": form.to_json(),
        "observed": observed,
        "dsl_module": type(plugin).__module__,
        "dsl_class": type(plugin).__name__,
    }
    descriptor = os.memfd_create("kernel.py", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, source)
        os.lseek(descriptor, 0, os.SEEK_SET)
        reply = link.request(message, [descriptor])
    finally:
        os.close(descriptor)
    raise_if_error(reply)
    events = reply.get("events", [])
    return events if isinstance(events, list) else []


def watch(sandbox: Sandbox, worker: Worker, limits: Limits, device: str) -> Callable[[], None]:
    """What to look at while a worker keeps the verifier waiting: memory, what was printed and what was written."""

    def tick() -> None:
        if worker.output.total > limits.output_bytes:
            raise SubmissionFault(finding("output-flood", f"{worker.output.total >> 20} MB were printed"))
        if (held := sandbox.memory()) > limits.memory_on(device):
            raise SubmissionFault(finding("memory-limit", f"{held >> 20} MB were held"))
        if sandbox.written() > limits.file_bytes:
            raise SubmissionFault(finding("file-limit"))

    return tick


def structure_fault(structure: Any, form: Form, device: str) -> Finding:
    """What is wrong with outputs that do not fit, from the worker's description of them, which may be any JSON."""
    container, items = (structure.get("container"), structure.get("items")) if isinstance(structure, dict) else ("", [])
    if container != form.container or not isinstance(items, list):
        return finding("wrong-structure", f"`solve` returned {_shown(container)}, the reference a {form.container}")
    if len(items) != len(form.outputs):
        return finding("wrong-structure", f"`solve` returned {len(items)} tensors, the reference {len(form.outputs)}")
    for name, item, expected in zip(form.names, items, form.outputs, strict=True):
        if not isinstance(item, dict) or item.get("type") != "tensor":
            what = _shown(item.get("type") if isinstance(item, dict) else item)
            return finding("wrong-structure", f"output `{name}` is {what}, not exactly a torch.Tensor")
        wanted = {"dtype": expected.dtype, "shape": list(expected.shape), "device": device}
        for key, value in wanted.items():
            if item.get(key) != value:
                seen = f"output `{name}` has {key} {_shown(item.get(key))}, the reference {value}"
                return finding("wrong-structure", seen)
        if item.get("lazy"):
            return finding("lazy-output", f"output `{name}` is {_shown(item['lazy'])}")
    return finding("wrong-structure", "`solve` returned what does not fit")


def _shown(value: object) -> str:
    return str(value)[:80]
