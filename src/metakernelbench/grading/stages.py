"""One grading: the contract as a list of stages. `together.py` runs them; read `Grading._run_until_timing` first."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from metakernelbench.dsls.dsl import Dsl
from metakernelbench.errors import InfrastructureFault
from metakernelbench.grading import rules, source
from metakernelbench.grading.buffers import Form
from metakernelbench.grading.calls import Budget, Link, SubmissionFault, load, watch
from metakernelbench.grading.channel import ChannelBroken, ChannelClosed, ChannelTimeout
from metakernelbench.grading.codes import finding
from metakernelbench.grading.contention import Contention
from metakernelbench.grading.contract import CONTRACT_VERSION, Contract
from metakernelbench.grading.control import Control
from metakernelbench.grading.cores import CalmCores
from metakernelbench.grading.dependence import Dependence
from metakernelbench.grading.draws import Draw, Draws
from metakernelbench.grading.handicap import handicap_ms
from metakernelbench.grading.isolation import Limits, Sandbox, Worker
from metakernelbench.grading.profile import DEPENDENCE, Stopwatch, TracedDraw
from metakernelbench.grading.timed_calls import Side, TimedCalls, stage_of
from metakernelbench.grading.transport import FileTransport, IpcTransport, Transport
from metakernelbench.grading.verdict import ClockCheck, Comparison, Finding, Isolation, Stage, Timing, Verdict
from metakernelbench.problems.problem import Problem
from metakernelbench.text import harmless

type Progress = Callable[[str], None]
"""Told what the grading does now, in a word or two."""

_PROBE_PATIENCE_S = 60.0
_MUCH_OF_THE_GPU = 0.25


class _Ended(Exception):
    """The grading is over; what ended it has been noted."""


@contextmanager
def _host_answers() -> Iterator[None]:
    """The workers' host runs trusted code only: where it does not answer, the machine is at fault."""
    try:
        yield
    except (ChannelClosed, ChannelBroken, ChannelTimeout) as error:
        raise InfrastructureFault(f"the worker's host is gone: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is to be graded, and how."""

    problem: Problem
    plugin: Dsl
    kernel: bytes | None
    workload: str
    device: str
    final: bool
    contract: Contract
    limits: Limits


class Grading:
    """One grading, from the source to the verdict."""

    def __init__(
        self,
        order: Order,
        sandbox: Callable[[], Sandbox],
        control: Control,
        progress: Progress,
        stopwatch: Stopwatch,
    ) -> None:
        self._order, self._control, self._progress, self._stopwatch = order, control, progress, stopwatch
        self._open_sandbox = sandbox
        self._sandbox: Sandbox | None = None
        self._draws = Draws(order.problem, order.workload, order.device, stopwatch)
        self._budget = Budget(order.contract.time_limit_s)
        self._transport: Transport = FileTransport(order.device)
        self._workers: list[Worker] = []
        self._form: Form
        self._link_to_time: Link
        self._faults: list[tuple[Stage, Finding]] = []
        self._comparisons: tuple[Comparison, ...] = ()
        self._draws_passed = 0
        self._allowances: list[float] = []
        self._handicap_ms = 0.0
        self._contention = Contention(order.device)
        self._cores = CalmCores()
        self._clocks: list[ClockCheck] = []
        self.timing: Timing | None = None
        self.trace: Sequence[TracedDraw] = ()
        """The draws of the timing stage, of all gradings that were timed together."""
        self._seconds: dict[str, float] = {}
        self._notes: list[str] = []

    def until_timing(self) -> bool:
        """All stages before the timing; whether there is something to time."""
        with _host_answers():
            try:
                self._run_until_timing()
            except _Ended:
                return False
        return True

    @property
    def tries(self) -> int:
        """How often the timed calls are made before clocks that do not agree count."""
        return self._order.contract.timing_tries

    def side(self, *, again: bool) -> Side | None:
        """This grading's part in the timing stage. `again` takes a fresh worker, since a submission that counts its
        calls must learn nothing from a second try; None where it does not come as far again."""
        assert self._sandbox is not None
        try:
            with _host_answers(), self._stage(Stage.TIMING):
                if again:
                    self._link_to_time = self._started_again()
                return Side(
                    transport=self._transport,
                    link=self._link_to_time,
                    allowances=self._allowances,
                    handicap_ms=self._handicap_ms,
                    seconds_run=self._sandbox.seconds_run,
                    contention=replace(self._contention, between_ms=[]),
                    end=self._sandbox.close,
                )
        except _Ended:
            return None

    def timed_calls(self, sides: Sequence[Side]) -> TimedCalls:
        """The timed calls of these sides, on draws of this grading."""
        order = self._order
        return TimedCalls(
            problem=order.problem,
            workload=order.workload,
            device=order.device,
            contract=order.contract,
            draws=self._draws,
            form=self._form,
            control=self._control,
            stopwatch=self._stopwatch,
            sides=sides,
            cores=self._cores,
            vectorized=order.final,
        )

    def keep_clocks(self, calls: TimedCalls, side: Side) -> None:
        """Let the verdict say how the clocks fitted in this try."""
        if side.fault is None:
            self._clocks.append(calls.agreement(side).told())

    def finish_timing(self, calls: TimedCalls, side: Side) -> None:
        """Keep what was measured of this side, unless it cannot stand."""
        assert self._sandbox is not None
        self._sandbox.close()  # nothing of the submission runs any more when its last output is looked at again
        with suppress(_Ended), self._stage(Stage.TIMING):
            if side.silent and not any(found.code == "no-launch" for _, found in self._faults):
                self._note(Stage.TIMING, [finding("no-launch", f"{side.silent} calls of the worker that is timed")])
            self.timing = calls.finish(side)

    def close(self) -> None:
        """End the worker and everything it started."""
        if self._sandbox is not None:
            self._sandbox.close()
        if self._order.device == "cuda":
            self._control.forget()
        self._transport.close()

    # stages -----------------------------------------------------------------------------------------------------------

    def _run_until_timing(self) -> None:
        with self._stage(Stage.SOURCE):
            tree = source.read(self._order.kernel, self._order.contract)
            if isinstance(tree, Finding):
                raise SubmissionFault(tree)
        with self._stage(Stage.RULES):
            self._note(Stage.RULES, rules.check(tree, self._order.plugin))
        with self._stage(Stage.IMPORT):
            self._link_to_time = self._start()
            self._load(self._link_to_time, observed=False)
        with self._stage(Stage.CORRECTNESS):
            self._correctness(self._link_to_time)
        with self._stage(Stage.DEPENDENCE), self._stopwatch.span(DEPENDENCE):
            self._note(Stage.DEPENDENCE, self._dependence().findings())
        self._end_observed()

    @contextmanager
    def _stage(self, stage: Stage) -> Iterator[None]:
        """Run a stage: its time is kept, and its fault ends the grading."""
        self._progress(stage.value)
        start = time.monotonic()
        try:
            yield
        except SubmissionFault as fault:
            stage = stage_of(fault) if stage is Stage.TIMING else stage
            self._faults.append((stage, fault.finding))
            self._comparisons = fault.comparisons or self._comparisons
            raise _Ended from None
        except torch.OutOfMemoryError:
            if not self.blamed_for_memory(stage):
                raise too_little_memory(stage) from None
            raise _Ended from None
        finally:
            self.spent(stage, time.monotonic() - start)

    def blamed_for_memory(self, stage: Stage) -> bool:
        """Whether the verifier has no GPU memory left because this grading's processes, which end here, held much of
        it. That is their fault then, and noted."""
        if self._sandbox is None:
            return False
        free, total = torch.cuda.mem_get_info()
        self._sandbox.close()
        held = torch.cuda.mem_get_info()[0] - free
        if held < _MUCH_OF_THE_GPU * total:
            return False
        seen = f"It held {held >> 30} GB of the GPU's memory, and the verifier had none left"
        self._faults.append((stage, finding("memory-limit", seen)))
        return True

    def spent(self, stage: Stage, seconds: float) -> None:
        """Count time towards a stage."""
        self._seconds[stage.value] = self._seconds.get(stage.value, 0.0) + seconds

    def _note(self, stage: Stage, found: Sequence[Finding]) -> None:
        """Faults at which a feedback grading ends, and after which a final one measures on."""
        self._faults += [(stage, item) for item in found]
        if found and not self._order.final:
            raise _Ended

    def _start(self) -> Link:
        """The worker that will be timed and the first that will be observed, forked before either runs the
        submission."""
        start = time.monotonic()
        with self._stopwatch.span("workers"):
            self._sandbox = self._open_sandbox()
            self._workers = [self._sandbox.fork(), self._sandbox.fork()]
        if self._order.device == "cuda":
            with self._stopwatch.span("GPU contexts"):
                torch.zeros(1, device="cuda")
        draw = self._draws.next()
        self._form = draw.form()
        with self._stopwatch.span("GPU contexts"):
            self._transport = self._choose_transport()
        with self._stopwatch.span("control"):
            self._control.prepare(self._form, self._order.device)
            self._handicap_ms = self._measure_handicap(draw)
        self._contention.look_alone()
        self._seconds["start"] = time.monotonic() - start
        return self._link(self._workers[0], self._budget)

    def _measure_handicap(self, draw: Draw) -> float:
        """What carrying costs the worker to be timed more than the control."""
        assert self._sandbox is not None
        worker = self._workers[0]
        link = Link(worker.channel, Budget(_PROBE_PATIENCE_S), pid=self._sandbox.process_of(worker))
        return handicap_ms(link, self._control, self._cores, self._transport, draw.inputs, self._form)

    def _choose_transport(self) -> Transport:
        """Exported GPU memory where control and workers can map it, else files. Nothing of the submission ran yet, so a
        worker that does not answer is the machine's fault."""
        shared = IpcTransport(self._form) if self._order.device == "cuda" else None
        block = shared.probe() if shared else None
        problems = [self._control.probe(block)]
        for worker in self._workers:
            try:
                reply = Link(worker.channel, Budget(_PROBE_PATIENCE_S)).request({"op": "probe", "block": block})
            except SubmissionFault as fault:
                printed = worker.output.text()
                raise InfrastructureFault(f"a worker does not work: {fault.finding.message} {printed}") from None
            problems.append(str(reply["problem"]))
        if shared is None:
            return FileTransport(self._order.device)
        if any(problems):
            shared.close()
            self._notes.append(
                "GPU memory could not be shared between processes; tensors travelled through host memory"
            )
            return FileTransport(self._order.device)
        return shared

    def _correctness(self, link: Link) -> None:
        tightest = -1.0
        for number in range(1, self._order.contract.correctness_draws + 1):
            draw = self._draws.next()
            with self._stopwatch.span("carrying"):
                result = link.call(self._transport, draw.inputs, self._form)
                self._stopwatch.move(result.claimed_ms / 1e3, "implementation")
            comparisons = draw.compare(result.outputs)
            if not all(c.passed for c in comparisons):
                raise SubmissionFault(finding("wrong-output", f"Correctness draw {number}"), comparisons)
            if not result.parcel.unchanged():
                raise SubmissionFault(finding("late-write"))
            self._draws_passed += 1
            self._learn_allowances(comparisons)
            if (share := max(map(_share_of_allowance, comparisons))) > tightest:
                tightest, self._comparisons = share, comparisons
        if self._order.device == "cuda":
            torch.cuda.empty_cache()  # what the anchors took is the worker's now

    def _learn_allowances(self, comparisons: Sequence[Comparison]) -> None:
        """How far an output that passes may be from the reference: the largest allowance seen, and the reference's own
        error, which is at most that over the contract's factor."""
        factor = 1 + 1 / self._order.contract.tolerance_factor
        seen = [factor * (c.allowance or 0.0) for c in comparisons]
        self._allowances = [max(pair) for pair in zip(seen, self._allowances or seen, strict=True)]

    def _dependence(self) -> Dependence:
        assert self._sandbox is not None
        unused, sandbox = [self._workers[1]], self._sandbox

        def open_worker(budget: Budget) -> tuple[Link, list[Any]]:
            if not unused:
                self._end_observed()
                self._workers.append(sandbox.fork())
            worker = unused.pop() if unused else self._workers[-1]
            link = self._link(worker, budget)
            return link, self._load(link, observed=True)

        return Dependence(
            draws=self._draws,
            form=self._form,
            transport=self._transport,
            open_worker=open_worker,
            contract=self._order.contract,
            allowances=self._allowances,
        )

    def _started_again(self) -> Link:
        """Another worker in place of the one that was timed, as far as that one came before it was."""
        assert self._sandbox is not None
        self._workers[0].channel.close()
        self._workers[0] = self._sandbox.fork()
        draw = self._draws.next()
        self._handicap_ms = self._measure_handicap(draw)
        link = self._link(self._workers[0], Budget(self._order.contract.time_limit_s))
        self._load(link, observed=False)
        for _ in range(self._order.contract.correctness_draws):
            link.call(self._transport, self._draws.next().inputs, self._form)
        return link

    def _end_observed(self) -> None:
        """End the observed workers: one whose kernels were left out may loop for ever beside the calls that are timed,
        and on a GPU the timed one and the anchors may need their memory."""
        assert self._sandbox is not None
        for worker in self._workers[1:]:
            self._sandbox.end(worker)
        del self._workers[1:]

    # parts ------------------------------------------------------------------------------------------------------------

    @property
    def _kernel(self) -> bytes:
        assert self._order.kernel is not None
        return self._order.kernel

    def _load(self, link: Link, *, observed: bool) -> list[Any]:
        order = self._order
        with self._stopwatch.span("kernel.py"):
            return load(link, self._kernel, order.plugin, self._form, order.device, observed=observed)

    def _link(self, worker: Worker, budget: Budget) -> Link:
        assert self._sandbox is not None
        sandbox = self._sandbox
        tick = watch(sandbox, worker, self._order.limits, self._order.device)

        def died() -> Finding:
            self._control.prepare(self._form, self._order.device)  # raises where the machine is at fault
            if sandbox.ran_out_of_memory():
                return finding("memory-limit", "It was ended for want of memory")
            return finding("worker-died", sandbox.how_it_ended(worker))

        return Link(worker.channel, budget, tick=tick, died=died, pid=sandbox.process_of(worker))

    def verdict(self) -> Verdict:
        """What has come out; ends the grading's processes."""
        order = self._order
        stages = list(Stage)
        faults = sorted(self._faults, key=lambda fault: stages.index(fault[0]))
        sandbox = self._sandbox
        isolation = sandbox.isolation if sandbox else Isolation(method="none")
        return Verdict(
            problem=order.problem.id,
            dsl=order.plugin.name,
            workload=order.workload,
            device="cpu" if order.device == "cpu" else torch.cuda.get_device_name(),
            passed=not faults,
            ended_at=faults[0][0] if faults else None,
            findings=tuple(item for _, item in faults),
            comparisons=self._comparisons,
            draws_passed=self._draws_passed,
            timing=self.timing if order.final or not faults else None,
            clocks=tuple(self._clocks),
            final=order.final,
            isolation=Isolation(method=isolation.method, notes=(*isolation.notes, *self._notes)),
            source_sha256=hashlib.sha256(order.kernel).hexdigest() if order.kernel is not None else None,
            contract_version=CONTRACT_VERSION,
            versions={**(sandbox.versions if sandbox else {}), **_gpu_versions(order.device)},
            seconds={name: round(spent, 3) for name, spent in self._seconds.items()},
            submission_output=self._printed(),
        )

    def _printed(self) -> str:
        """What the submission printed in the worker that was timed."""
        if not self._workers:
            return ""
        self.close()
        return harmless(self._workers[0].output.text())


def too_little_memory(stage: Stage) -> InfrastructureFault:
    """The verifier has no GPU memory left, and the submission is not to blame."""
    free, total = torch.cuda.mem_get_info()
    own = torch.cuda.memory_reserved()
    return InfrastructureFault(
        f"this GPU has too little memory for the problem: in the stage {stage.value}, the verifier holds "
        f"{own / 2**30:.0f} of {total / 2**30:.0f} GB, other processes and buffers "
        f"{(total - free - own) / 2**30:.0f} GB"
    )


def _gpu_versions(device: str) -> dict[str, str]:
    """CUDA as torch was built for it, and the driver; empty on a CPU."""
    if device == "cpu":
        return {}
    told = Path("/proc/driver/nvidia/version")
    driver = re.search(r"\b\d{3}\.[\d.]+", told.read_text()) if told.exists() else None
    return {"cuda": str(torch.version.cuda), "driver": driver[0] if driver else "unknown"}


def _share_of_allowance(comparison: Comparison) -> float:
    if comparison.error is None or comparison.allowance is None:
        return 0.0
    return comparison.error / comparison.allowance if comparison.allowance else 0.0
