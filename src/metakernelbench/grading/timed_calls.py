"""The timing stage: warm-up and timed calls, each draw run by eager, worker and control, in orders that take turns.

Several implementations may be timed together (`head_to_head.py`): then each draw is run by all their workers, one right
after the other.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import permutations
from statistics import median

from metakernelbench.errors import InfrastructureFault, UnknownName
from metakernelbench.grading import timing
from metakernelbench.grading.buffers import Form
from metakernelbench.grading.calls import Link, Result, SubmissionFault
from metakernelbench.grading.codes import finding
from metakernelbench.grading.contention import Contention
from metakernelbench.grading.contract import Contract
from metakernelbench.grading.control import Control
from metakernelbench.grading.cores import SETTLED_FOR, CalmCores
from metakernelbench.grading.disturbance import LONGEST_DRAW_S, MOST_WAITED_MS, REPEATED_SHARE
from metakernelbench.grading.draws import Draw, Draws
from metakernelbench.grading.head_to_head import orders
from metakernelbench.grading.profile import Stopwatch, TracedDraw
from metakernelbench.grading.transport import Transport
from metakernelbench.grading.verdict import Stage, Timing
from metakernelbench.problems.problem import Inputs, Problem
from metakernelbench.problems.roofline import bound_seconds, gpu_named


def orders_of_steps() -> Iterator[tuple[str, ...]]:
    """The order of each draw's calls: all six, one after the other in an order that nobody can foresee, and again.

    Workers come as often right behind the eager call as controls: it leaves the verifier's processor cold for the
    carrying of a call, which then takes some hundredths of a millisecond more.
    """
    every = list(permutations(("eager", "workers", "controls")))
    while True:
        secrets.SystemRandom().shuffle(every)
        yield from every


class RecheckFault(SubmissionFault):
    """A timed output, held to the anchor, was wrong."""


@dataclass(eq=False)
class Side:
    """One implementation in the timing stage: its worker, and what was measured of it so far."""

    transport: Transport
    link: Link
    allowances: Sequence[float]
    """How far a timed output may be from the reference's before the anchor is asked."""
    handicap_ms: float
    """What carrying costs this worker more than the control."""
    seconds_run: Callable[[], float]
    """How long the processes of the submission have run so far."""
    contention: Contention
    """How busy the GPU is after its calls."""
    end: Callable[[], None]
    """Ends the processes of the submission."""
    clocks: list[timing.Clocks] = field(default_factory=list[timing.Clocks])
    idleness: timing.Idleness = field(default_factory=timing.Idleness)
    silent: int = 0
    """Calls that launched no kernel of the DSL."""
    last: Result | None = None
    fault: SubmissionFault | None = None
    """What ended its calls before they were over."""

    @contextmanager
    def noting_its_fault(self) -> Iterator[None]:
        """Its first fault is its last: what the submission left running must not disturb the other sides."""
        try:
            yield
        except SubmissionFault as fault:
            self.fault = fault
            self.end()

    def check_unchanged(self) -> None:
        """The last call's output buffer must hold what it held when that call was over."""
        if self.last is not None and not self.last.parcel.unchanged():
            raise SubmissionFault(finding("late-write"))


@dataclass
class _Measured:
    """What one draw gave."""

    order: list[str] = field(default_factory=list[str])
    eager_ms: float = 0.0
    results: dict[Side, Result] = field(default_factory=dict[Side, Result])
    carrying_ms: dict[Side, float] = field(default_factory=dict[Side, float])
    waited_ms: dict[str, float] = field(default_factory=dict[str, float])
    """How long each call waited for a processor."""
    turns: dict[str, int] = field(default_factory=dict[str, int])
    """How often the small work was done before each call."""
    took_s: float = 0.0

    @property
    def disturbed(self) -> bool:
        return self.took_s < LONGEST_DRAW_S and max(self.waited_ms.values(), default=0.0) > MOST_WAITED_MS


@dataclass
class TimedCalls:
    """The calls of one timing stage, and what was measured so far."""

    problem: Problem
    workload: str
    device: str
    contract: Contract
    draws: Draws
    form: Form
    control: Control
    stopwatch: Stopwatch
    sides: Sequence[Side]
    cores: CalmCores
    vectorized: bool
    """Whether the problem's vectorized form is timed as well."""
    revealed: Inputs | None = None
    """The last inputs that workers have seen. The control carries them: a worker can see the control's buffers as
    well. Of their draw nothing else is kept, since the reference's outputs can be much of the GPU's memory."""
    eager_ms: list[float] = field(default_factory=list[float])
    waited: list[float] = field(default_factory=list[float])
    """The share of the eager side's time for which it waited for a processor."""
    vectorized_ms: list[float] = field(default_factory=list[float])
    trace: list[TracedDraw] = field(default_factory=list[TracedDraw])

    def run(self) -> None:
        """All calls. A side's first wrong call is its last: its fault is noted, and the other sides go on."""
        try:
            self._run()
        finally:
            self.cores.release()

    def _run(self) -> None:
        contract = self.contract
        rechecked = set(secrets.SystemRandom().sample(range(contract.timed_calls), contract.rechecked_calls))
        order, steps = orders(self.sides), orders_of_steps()
        number, repeatable = -contract.warmup_calls, round(REPEATED_SHARE * contract.timed_calls)
        while number < contract.timed_calls:
            sides = [side for side in next(order) if side.fault is None]
            if not sides:
                return
            if self.device != "cpu" and len(self.trace) % SETTLED_FOR == 0:
                self._settle(sides)
            draw = self.draws.next()
            measured = self._measure(draw, next(steps), sides)
            for side, result in measured.results.items():
                with side.noting_its_fault():
                    self._check(side, result, draw, number, recheck=number in rechecked)
            repeated = number >= 0 and repeatable > 0 and measured.disturbed
            self.trace.append(self._traced(number, measured, repeated=repeated))
            if repeated:
                repeatable -= 1
                continue
            if number >= 0:
                self._keep(draw, measured)
            number += 1

    def _settle(self, sides: Sequence[Side]) -> None:
        """Give everyone a calm core."""
        with self.stopwatch.span("cores"):
            workers = [side.link.pid for side in sides if side.link.pid is not None]
            self.cores.settle([0, self.control.pid, *workers])

    def _look_after(self, pid: int | None) -> None:
        """See to it that the process which is called next has a calm core."""
        with self.stopwatch.span("cores"):
            self.cores.look_after(pid)

    def _measure(self, draw: Draw, steps: Sequence[str], sides: Sequence[Side]) -> _Measured:
        """All calls on one draw, in this order."""
        measured, began = _Measured(), time.monotonic()
        for step in steps:
            if step == "eager":
                measured.order.append("eager")
                self._look_after(0)
                eager = draw.time_reference(self.device)
                measured.eager_ms = eager.milliseconds
                measured.waited_ms["eager"], measured.turns["eager"] = eager.waited_ms, eager.turns
            elif step == "workers":
                for side in sides:
                    self._call(draw, side, measured)
            else:
                for side in sides:
                    measured.order.append(f"control {self.sides.index(side)}")
                    measured.carrying_ms[side] = self._control(side)
        self.revealed = draw.inputs
        measured.took_s = time.monotonic() - began
        return measured

    def _call(self, draw: Draw, side: Side, measured: _Measured) -> None:
        """The call of a side's worker."""
        name = f"worker {self.sides.index(side)}"
        measured.order.append(name)
        self._look_after(side.link.pid)
        with side.noting_its_fault():
            side.idleness.ends(time.monotonic(), side.seconds_run())
            side.check_unchanged()
            with self.stopwatch.span("carrying"):
                measured.results[side] = side.last = side.link.call(side.transport, draw.inputs, self.form)
                self.stopwatch.move(side.last.claimed_ms / 1e3, "implementation")
            measured.waited_ms[name], measured.turns[name] = side.last.waited_ms, side.last.turns
            side.idleness.begins(time.monotonic(), side.seconds_run())
            side.contention.look()

    def _keep(self, draw: Draw, measured: _Measured) -> None:
        """Let a draw count."""
        self.eager_ms.append(measured.eager_ms)
        self.waited.append(measured.waited_ms["eager"] / measured.eager_ms)
        for side, own in measured.results.items():
            claimed_ms = min(own.claimed_ms, own.window_ms)
            side.clocks.append(timing.Clocks(claimed_ms, own.window_ms, measured.carrying_ms[side]))
        if self.vectorized and self.problem.vectorized is not None:
            self.vectorized_ms.append(draw.time_vectorized(self.device))

    def _traced(self, number: int, measured: _Measured, *, repeated: bool) -> TracedDraw:
        came = [measured.results.get(side) for side in self.sides]
        return TracedDraw(
            number=number,
            order=tuple(measured.order),
            eager_ms=measured.eager_ms,
            claimed_ms=tuple(None if result is None else result.claimed_ms for result in came),
            window_ms=tuple(None if result is None else result.window_ms for result in came),
            carrying_ms=tuple(measured.carrying_ms.get(side) for side in self.sides),
            buffers=tuple(None if result is None else result.parcel.buffer for result in came),
            waited_ms=tuple(round(measured.waited_ms.get(name, 0.0), 4) for name in measured.order),
            turns=tuple(measured.turns.get(name, 0) for name in measured.order),
            cores={str(core): pace for core, pace in self.cores.paces.items()},
            repeated=repeated,
        )

    def _control(self, side: Side) -> float:
        """What it costs now to carry a draw to a worker of this side and back, in milliseconds."""
        keep = side.last.parcel if side.last is not None else None
        self.revealed = self.revealed or self.draws.next().inputs
        self._look_after(self.control.pid)
        with self.stopwatch.span("control"):
            return self.control.call(side.transport, self.revealed, self.form, keep).carrying_ms

    def _check(self, side: Side, result: Result, draw: Draw, number: int, *, recheck: bool) -> None:
        """Hold an output to the reference, and to the anchor where it is to be rechecked or looks doubtful."""
        side.silent += result.launches == 0
        if not recheck and draw.nearly(result.outputs, side.allowances):
            return
        comparisons = draw.compare(result.outputs)
        if not all(c.passed for c in comparisons):
            which = (
                f"Timed call {number + 1}" if number >= 0 else f"Warm-up call {number + self.contract.warmup_calls + 1}"
            )
            fault_type = RecheckFault if recheck else SubmissionFault
            raise fault_type(finding("wrong-output", f"{which}, after correct outputs before"), comparisons)

    def agreement(self, side: Side) -> timing.Agreement:
        """Whether a worker's clock fits the verifier's, over the timed calls."""
        return timing.agreement(side.clocks, side.handicap_ms, self.waited, self.device, self.contract)

    @property
    def believable(self) -> bool:
        """Whether the clocks of all sides that came to the end agree with the verifier's."""
        return all(self.agreement(side).believable for side in self.sides if side.fault is None)

    def finish(self, side: Side) -> Timing:
        """A side's timing, once its worker has ended. Raises `SubmissionFault` where a call of it was wrong, or where
        its clock or its outputs cannot stand."""
        if side.fault is not None:
            raise side.fault
        side.check_unchanged()
        idleness = side.idleness
        if idleness.excessive:
            seen = f"{1e3 * idleness.run_s:.0f} ms of processor time in {1e3 * idleness.open_s:.0f} ms without a call"
            raise SubmissionFault(finding("background-work", seen))
        if side.contention.excessive:
            raise SubmissionFault(finding("background-work", side.contention.told()))
        agreement = self.agreement(side)
        if agreement.undecided:
            raise InfrastructureFault(
                f"this machine is too busy to compare clocks: calls scatter by {agreement.noise_ms:.3f} ms, and the "
                f"reference waits for a processor for {agreement.waited:.0%} of its time",
                hint="grade again when less runs on it",
            )
        if not agreement.believable:
            allowed_ms = agreement.allowed_ms + agreement.noise_ms
            seen = f"{agreement.hidden_ms:.3f} ms a call are missing, {allowed_ms:.3f} ms are allowed"
            raise SubmissionFault(finding("clock-disagreement", seen))
        return self._timing([c.claimed_ms for c in side.clocks])

    def _timing(self, own_ms: Sequence[float]) -> Timing:
        own, eager = median(own_ms), median(self.eager_ms)
        if own <= 0:
            raise SubmissionFault(finding("clock-disagreement", "A call claims to take no time"))
        return Timing(
            implementation_ms=tuple(own_ms),
            eager_ms=tuple(self.eager_ms),
            vectorized_ms=tuple(self.vectorized_ms),
            implementation_median_ms=own,
            eager_median_ms=eager,
            vectorized_median_ms=median(self.vectorized_ms) if self.vectorized_ms else None,
            speedup=eager / own,
            speedup_interval=timing.speedup_interval(self.eager_ms, own_ms),
            roofline_fraction=self._roofline_fraction(own),
        )

    def _roofline_fraction(self, own_ms: float) -> float | None:
        if self.device != "cuda":
            return None
        import torch

        try:
            gpu = gpu_named(torch.cuda.get_device_name())
        except UnknownName:
            return None
        return 1e3 * bound_seconds(self.problem.cost(self.problem.workloads[self.workload]), gpu) / own_ms


def stage_of(fault: SubmissionFault) -> Stage:
    """The stage that a fault of the timing stage belongs to."""
    return Stage.RECHECK if isinstance(fault, RecheckFault) else Stage.TIMING
