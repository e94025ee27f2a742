"""The control: a worker without a submission, forked from the verifier before anything else happens there.

It answers the same calls by the same code, with a `solve` that does nothing. What a call of it takes, on the verifier's
clock, is what carrying inputs and outputs costs here and now: the part of a worker's window that is not the
submission's. And where a worker died, the control still answering shows that the machine works.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from metakernelbench.errors import InfrastructureFault
from metakernelbench.grading import worker
from metakernelbench.grading.buffers import Form
from metakernelbench.grading.calls import Budget, Link, Result, SubmissionFault, echo
from metakernelbench.grading.channel import Channel
from metakernelbench.grading.transport import Parcel, Transport
from metakernelbench.problems.problem import Inputs

_PR_SET_PDEATHSIG = 1
_PATIENCE_S = 60.0


class Control:
    """The control process and its connection."""

    def __init__(self) -> None:
        if threading.active_count() > 1 or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise RuntimeError("the control must be forked before threads are started and CUDA is used")
        channel, theirs = Channel.pair()
        self._pid = os.fork()
        if self._pid == 0:
            _close_all_but(theirs.fileno())
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            try:
                worker.serve(Channel(theirs), None)
            finally:
                os._exit(0)
        theirs.close()
        self._channel = channel

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def _link(self) -> Link:
        return Link(self._channel, Budget(_PATIENCE_S))

    def prepare(self, form: Form, device: str) -> None:
        """Make it return tensors of this form from now on."""
        with _faults_are_ours():
            self._link.request(echo(form, device))

    def probe(self, block: dict[str, Any] | None) -> str:
        """Why a block of GPU memory cannot be mapped there; empty where it can."""
        with _faults_are_ours():
            return str(self._link.request({"op": "probe", "block": block})["problem"])

    def call(self, transport: Transport, inputs: Inputs, form: Form, keep: Parcel | None = None) -> Result:
        """One call that computes nothing; the buffers of `keep` stay as they are. Raises `InfrastructureFault`."""
        with _faults_are_ours():
            return self._link.call(transport, inputs, form, keep=keep)

    def forget(self) -> None:
        """Make it give up the blocks of GPU memory that it has mapped, before they are freed."""
        with _faults_are_ours():
            self._link.request({"op": "forget"})

    def close(self) -> None:
        self._channel.close()
        os.waitpid(self._pid, 0)


def _close_all_but(descriptor: int) -> None:
    """Close what the verifier had open: a host that started before sees the end of its input only when all have it."""
    for name in Path("/proc/self/fd").iterdir():
        if int(name.name) > 2 and int(name.name) != descriptor:
            with suppress(OSError):  # the listing's own
                os.close(int(name.name))


@contextmanager
def _faults_are_ours() -> Iterator[None]:
    """No submission runs in the control, so whatever goes wrong there is the machine's fault."""
    try:
        yield
    except SubmissionFault as fault:
        raise InfrastructureFault(f"the verifier's control failed: {fault.finding.message}") from None
