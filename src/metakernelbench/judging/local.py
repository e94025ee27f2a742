"""The `local` judge: grades on this machine's CPU or GPUs, in one verifier process each that serves all requests."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Self

from metakernelbench.errors import InfrastructureFault, UserError
from metakernelbench.grading.client import VerifierProcess
from metakernelbench.grading.contract import CONTRACT, Contract
from metakernelbench.grading.head_to_head import Entrant, HeadToHead
from metakernelbench.grading.verdict import Verdict
from metakernelbench.judging.gpus import reservation, visible_gpus
from metakernelbench.judging.judge import GradingRequest

_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")
"""NVIDIA's driver, and the one of Windows that stands for it in its Linux."""
_LOOK_S = 0.2
"""How often GPUs that other processes use are looked at again."""


class LocalJudge:
    """Grades one request at a time on the CPU, or one at a time on each GPU, across all processes of this machine.

    `device` is what this judge is for, `cpu` or `cuda`; a request for another device is refused. `gpus` are names as
    `CUDA_VISIBLE_DEVICES` takes them; by default all that this process may use.
    """

    def __init__(
        self, device: str = "cuda", *, gpus: Sequence[str] | None = None, contract: Contract = CONTRACT
    ) -> None:
        self._device, self._contract = device, contract
        names: Sequence[str | None] = [None] if device == "cpu" else visible_gpus() if gpus is None else gpus
        if not names:
            raise UserError("the `local` judge was given an empty list of `gpus`")
        self._idle = [_Place(name, contract) for name in names]
        self._places = tuple(self._idle)
        self._free = asyncio.Semaphore(len(self._places))

    @property
    def at_once(self) -> int:
        """How many gradings go on at once: one a GPU, or one on the CPU."""
        return len(self._places)

    async def ready(self) -> None:
        """Raise `UserError` where there is certainly no GPU."""
        await self.look()

    async def look(self) -> None:
        """Raise `UserError` where there is certainly no GPU. A verifier, which asks CUDA, takes seconds to say so."""
        if self._device == "cuda" and not any(Path(driver).exists() for driver in _DRIVERS):
            raise UserError(
                "this machine has no CUDA GPU", hint="choose another judge (docs/judges.md), or grade on cpu"
            )

    async def verdict(self, request: GradingRequest) -> Verdict:
        """Grade one implementation. Raises `UserError` for a request that makes no sense, `InfrastructureFault` for a
        fault of this machine. A cancelled grading is ended, with all its processes."""
        async with self._place(request.device) as place:
            return await place.do(partial(place.grade, request))

    async def head_to_head(self, requests: Sequence[GradingRequest]) -> HeadToHead:
        """Grade implementations of one problem and time them interleaved, in one session on one device. The requests
        may differ in `dsl` and `source` only. Raises as `verdict`."""
        if len({(r.problem, r.workload, r.device, r.final) for r in requests}) > 1:
            raise UserError("a head to head is of one problem, workload and device, all final or none")
        if not requests:
            raise UserError("a head to head needs at least two implementations, not 0")
        async with self._place(requests[0].device) as place:
            return await place.do(partial(place.head_to_head, requests))

    async def close(self) -> None:
        """End the verifiers and everything in them."""
        await asyncio.gather(*(asyncio.to_thread(place.verifier.close) for place in self._places))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @contextlib.asynccontextmanager
    async def _place(self, device: str) -> AsyncIterator[_Place]:
        """A place that is nobody else's until the block ends."""
        if device != self._device:
            raise InfrastructureFault(f"this judge grades on {self._device}, the request is for {device}")
        async with self._free:
            with contextlib.ExitStack() as held:
                while (place := self._reserved(held)) is None:
                    await asyncio.sleep(_LOOK_S * random.uniform(0.5, 1.5))
                try:
                    yield place
                finally:
                    self._idle.append(place)

    def _reserved(self, held: contextlib.ExitStack) -> _Place | None:
        """A place that neither this judge nor another process uses, taken out of the idle ones; None where all are in
        use."""
        for place in self._idle:
            with contextlib.ExitStack() as attempt:
                if place.gpu is None or attempt.enter_context(reservation(place.gpu)):
                    held.push(attempt.pop_all())
                    self._idle.remove(place)
                    return place
        return None


class _Place:
    """One device and the verifier that grades there. Used by one grading at a time."""

    def __init__(self, gpu: str | None, contract: Contract) -> None:
        self.gpu, self._contract = gpu, contract
        environment = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        self.verifier = VerifierProcess(own_session=True, environment=environment)

    async def do[T](self, work: Callable[[], T]) -> T:
        """What `work` returns, done in a thread. Cancelled, it is ended first."""
        grading = asyncio.create_task(asyncio.to_thread(work))
        try:
            return await asyncio.shield(grading)
        except asyncio.CancelledError:
            self.verifier.interrupt()
            await asyncio.wait([grading])
            grading.exception()  # the interruption shows there as a fault of the verifier, which nobody needs
            raise

    def head_to_head(self, requests: Sequence[GradingRequest]) -> HeadToHead:
        return self.verifier.head_to_head(
            requests[0].problem,
            [Entrant(request.dsl, request.source) for request in requests],
            workload=requests[0].workload,
            device=requests[0].device,
            final=requests[0].final,
            contract=self._contract,
        )

    def grade(self, request: GradingRequest) -> Verdict:
        verdict = self.verifier.grade(
            request.problem,
            request.source,
            request.dsl,
            workload=request.workload,
            device=request.device,
            final=request.final,
            contract=self._contract,
        )
        self.verifier.start_ahead(request.dsl, request.device)
        return verdict
