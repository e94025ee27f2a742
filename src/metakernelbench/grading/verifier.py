"""The verifier: grades implementations, and believes nothing that an implementation's process says unless it can check
or bound it.

`Verifier` holds what outlives a grading: the control, and the hosts that fork workers. It lives in a process of its own
(`python -m metakernelbench.grading`), driven by `client.VerifierProcess`. `grade` is the short way: one grading, one
process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import torch

from metakernelbench.dsls import dsl as dsls
from metakernelbench.dsls.dsl import Dsl
from metakernelbench.errors import UserError
from metakernelbench.grading.contract import CONTRACT, Contract
from metakernelbench.grading.control import Control
from metakernelbench.grading.exclusive import device_lock
from metakernelbench.grading.head_to_head import Entrant, HeadToHead
from metakernelbench.grading.isolation import LIMITS, Host, Limits, Sandbox
from metakernelbench.grading.profile import WAITING, Profile, Stopwatch
from metakernelbench.grading.stages import Grading, Order, Progress
from metakernelbench.grading.timing import pairs
from metakernelbench.grading.together import grade_together
from metakernelbench.grading.verdict import Verdict
from metakernelbench.problems import catalog
from metakernelbench.problems.problem import Problem


class Verifier:
    """Serves one grading after another. Create it first thing in a process: it forks the control."""

    def __init__(self, host: Host | None = None) -> None:
        self._control = Control()
        self._hosts: list[Host] = [] if host is None else [host]
        """Started and not in use, or shared by all gradings."""
        self.profile: Profile | None = None
        """Of the last session."""

    def grade(
        self,
        problem_id: str,
        kernel: bytes | None,
        dsl: str,
        *,
        workload: str,
        device: str,
        final: bool = False,
        contract: Contract = CONTRACT,
        limits: Limits = LIMITS,
        progress: Progress = lambda _: None,
    ) -> Verdict:
        """Grade one implementation; None stands for a missing kernel.py. Raises `UserError` for a request that makes no
        sense and `InfrastructureFault` for a fault of the machine; all that the implementation does ends in a
        verdict."""
        plugin, problem = dsls.load(dsl), catalog.load(problem_id)
        _check_request(plugin, problem, workload, device)
        order = Order(
            problem=problem,
            plugin=plugin,
            kernel=kernel,
            workload=workload,
            device=device,
            final=final,
            contract=contract,
            limits=limits,
        )
        with self._session([order], progress) as gradings:
            return grade_together(gradings)[0]

    def head_to_head(
        self,
        problem_id: str,
        entrants: Sequence[Entrant],
        *,
        workload: str,
        device: str,
        final: bool = False,
        contract: Contract = CONTRACT,
        limits: Limits = LIMITS,
        progress: Progress = lambda _: None,
    ) -> HeadToHead:
        """Grade several implementations of one problem and time them together: each draw is run by all that came so
        far. Raises as `grade`, and `UserError` for fewer than two entrants."""
        if len(entrants) < 2:
            raise UserError(f"a head to head needs at least two implementations, not {len(entrants)}")
        problem = catalog.load(problem_id)
        orders = [
            Order(
                problem=problem,
                plugin=dsls.load(entrant.dsl),
                kernel=entrant.kernel,
                workload=workload,
                device=device,
                final=final,
                contract=contract,
                limits=limits,
            )
            for entrant in entrants
        ]
        for order in orders:
            _check_request(order.plugin, problem, workload, device)
        for name, count in Counter(entrant.dsl for entrant in entrants).items():
            self.start_ahead(name, device, count)
        with self._session(orders, progress) as gradings:
            verdicts = grade_together(gradings)
            return HeadToHead(verdicts=verdicts, pairs=tuple(pairs([grading.timing for grading in gradings])))

    def start_ahead(self, dsl: str, device: str, count: int = 1) -> None:
        """Start the hosts of the next `count` gradings now, so that they are ready when they are needed."""
        waiting = [host for host in self._hosts if (host.dsl.name, host.device) == (dsl, device)]
        while len(waiting) < count and not any(host.can_be_shared for host in waiting):
            waiting.append(Host(dsls.load(dsl), device))
            self._hosts.append(waiting[-1])

    def await_start(self) -> None:
        """Return when all hosts that were started ahead are ready."""
        for host in self._hosts:
            host.wait_ready()

    def close(self) -> None:
        """End the control and the hosts."""
        for host in self._hosts:
            host.close()
        self._control.close()

    @contextmanager
    def _session(self, orders: Sequence[Order], progress: Progress) -> Iterator[list[Grading]]:
        """Gradings that have the device for themselves, and end when the session does."""
        stopwatch = Stopwatch()
        with ExitStack() as held:
            with stopwatch.span(WAITING):
                held.enter_context(device_lock(orders[0].device, lambda: progress(WAITING)))
            gradings = [
                Grading(
                    order,
                    partial(self._sandbox, order),
                    self._control,
                    _named(progress, number, len(orders)),
                    stopwatch,
                )
                for number, order in enumerate(orders, 1)
            ]
            try:
                yield gradings
            finally:
                with stopwatch.span("ending"):
                    for grading in gradings:
                        grading.close()
                    if orders[0].device == "cuda":
                        with suppress(RuntimeError):  # a context that the grading broke has nothing to give back
                            torch.cuda.empty_cache()  # other processes need it before this one does
                trace = max((grading.trace for grading in gradings), key=len)
                self.profile = Profile(seconds=stopwatch.seconds, draws=tuple(trace))

    def _sandbox(self, order: Order) -> Sandbox:
        """A fresh sandbox: of the host that serves all gradings of this DSL, or of one that serves this grading
        only."""
        host = self._waiting_host(order.plugin, order.device) or Host(order.plugin, order.device, limits=order.limits)
        if host.can_be_shared:
            self._hosts.append(host)
        return Sandbox(host, limits=order.limits)

    def _waiting_host(self, plugin: Dsl, device: str) -> Host | None:
        """A host that was started ahead and still lives, taken out of those that wait."""
        for host in [h for h in self._hosts if (h.dsl.name, h.device) == (plugin.name, device)]:
            self._hosts.remove(host)
            if host.is_alive():
                return host
            host.close()
        return None


def _named(progress: Progress, number: int, count: int) -> Progress:
    """Progress that says which of several gradings it is about."""
    return progress if count == 1 else lambda text: progress(f"{text} ({number} of {count})")


def _check_request(plugin: Dsl, problem: Problem, workload: str, device: str) -> None:
    if workload not in problem.workloads:
        raise UserError(f"unknown workload `{workload}`; known: {', '.join(problem.workloads)}")
    if device not in plugin.devices:
        runs_on = " and ".join(sorted(plugin.devices))
        raise UserError(f"{plugin.title} kernels run on {runs_on}, not on {device}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("this machine has no CUDA GPU", hint="use `--device cpu` with a DSL that runs there")
    if not plugin.versions():
        raise UserError(f"{plugin.title} is not installed", hint=f"pip install {' '.join(plugin.requirements)}")


def grade(
    problem_id: str,
    source: bytes | None,
    dsl: str,
    *,
    workload: str,
    device: str,
    final: bool = False,
    contract: Contract = CONTRACT,
    progress: Progress | None = None,
) -> Verdict:
    """Grade one implementation in a verifier process of its own. Raises as `Verifier.grade`."""
    from metakernelbench.grading.client import VerifierProcess

    with VerifierProcess() as verifier:
        return verifier.grade(
            problem_id,
            source,
            dsl,
            workload=workload,
            device=device,
            final=final,
            contract=contract,
            progress=progress,
        )
