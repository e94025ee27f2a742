"""Times the kernels of each comparison head to head: baseline and treatment in one session on one device.

Two verdicts are two sessions, perhaps on two GPUs, and ρ is made of their medians. A rematch measures the ratio itself
and is kept beside the verdicts. As everything here it converges: what is measured for the present kernels is kept,
several runners share the work, and a kill loses at most the measurements under way.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

from metakernelbench import __version__
from metakernelbench.errors import InfrastructureFault, StoreError
from metakernelbench.experiments.claim import claimed
from metakernelbench.experiments.interruption import Interruption
from metakernelbench.experiments.matches import Match, State, match_of, matches_of
from metakernelbench.experiments.planned import PlannedAttempt
from metakernelbench.experiments.spec import ExperimentSpec
from metakernelbench.grading.head_to_head import HeadToHead
from metakernelbench.judging.judge import GradingRequest, HeadToHeadJudge
from metakernelbench.store.leases import SIGN_OF_LIFE_S, Owner
from metakernelbench.store.rematches import Rematch
from metakernelbench.store.store import Store

_FAULTS_IN_A_ROW = 5
"""After so many measurements lost with none made between them, the cause is not theirs."""


class Progress(Protocol):
    """What is reported, as it happens."""

    def begin(self, matches: int, kept: int) -> None: ...
    def measured(self, match: Match, rematch: Rematch) -> None: ...
    def fault(self, match: Match, message: str) -> None: ...
    def note(self, message: str) -> None: ...


@dataclass(kw_only=True)
class Outcome:
    """What a run of rematches has done."""

    planned: int
    """Comparisons with two kernels to time."""
    measured: list[Rematch] = field(default_factory=list[Rematch])
    failed: dict[str, str] = field(default_factory=dict[str, str])
    """Treatment's key → the fault that this run gave its rematch up for."""
    remaining: int = 0
    interrupted: bool = False


async def run_rematches(
    spec: ExperimentSpec,
    store: Store,
    *,
    judge: HeadToHeadJudge,
    progress: Progress,
    interruption: Interruption | None = None,
    poll_s: float = 2.0,
) -> Outcome:
    """Measure what is missing of an experiment as it was last run. Raises `UserError` where nothing can be measured."""
    plan = store.experiment(spec.name).plan
    matches = await asyncio.to_thread(matches_of, plan, store, spec.name)
    with store.leases.owner() as owner:
        run = _Run(spec, store, owner, judge, progress, interruption or Interruption(), poll_s)
        return await run.run(matches)


@dataclass
class _Run:
    """One runner's share of the rematches of an experiment."""

    spec: ExperimentSpec
    store: Store
    owner: Owner
    judge: HeadToHeadJudge
    progress: Progress
    interruption: Interruption
    poll_s: float
    in_a_row: int = 0
    """Measurements lost since the last one that was made."""

    async def run(self, matches: list[Match]) -> Outcome:
        """Measure until nothing is left, given up or stopped."""
        timed = [match for match in matches if match.state not in (State.UNTIMED, State.WAITING)]
        todo = deque(match for match in timed if match.state is not State.KEPT)
        outcome = Outcome(planned=len(timed), remaining=len(todo))
        self.progress.begin(len(timed), len(timed) - len(todo))
        heartbeat = asyncio.create_task(self._give_signs_of_life())
        workers = [asyncio.create_task(self._work(todo, outcome)) for _ in range(self._at_once())]
        stopper = asyncio.create_task(self._end_at_once(workers))
        try:
            done, _ = await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in (heartbeat, stopper, *workers):
                task.cancel()
            await asyncio.gather(heartbeat, stopper, *workers, return_exceptions=True)
        for worker in done:
            if not worker.cancelled() and (error := worker.exception()) is not None:
                raise error
        outcome.interrupted = self.interruption.requested
        return outcome

    def _at_once(self) -> int:
        """As many as the file says, else as the judge does at once, where it says so: no sandbox is needed here."""
        by_judge: int | None = getattr(self.judge, "at_once", None)
        return self.spec.concurrency.judges or by_judge or self.spec.concurrency.sandboxes

    async def _work(self, todo: deque[Match], outcome: Outcome) -> None:
        """One after another. What another runner is at goes to the end of the line."""
        elsewhere = 0
        while todo and not self.interruption.requested and self.in_a_row < _FAULTS_IN_A_ROW:
            match = todo.popleft()
            async with claimed(self.store.leases, self.owner, self.spec.name, match.key) as ours:
                done = ours and await self._measure(match, outcome)
            outcome.remaining -= done
            elsewhere = 0 if ours else elsewhere + 1
            if not ours:
                todo.append(match)
                if elsewhere >= len(todo):
                    await self._pause()

    async def _pause(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self.interruption.next(), self.poll_s)

    async def _measure(self, match: Match, outcome: Outcome) -> bool:
        """Whether the comparison now has its rematch, measured here or meanwhile elsewhere."""
        now = await asyncio.to_thread(self._look_again, match)
        if now.state not in (State.MISSING, State.STALE):
            return now.state is not State.WAITING
        try:
            requests = [await asyncio.to_thread(self._request, attempt) for attempt in (now.baseline, now.treatment)]
            result = await self.judge.head_to_head(requests)
            rematch = _rematch(now, result, self.spec)
            await asyncio.to_thread(self.store.rematches.save, self.spec.name, rematch, owner=self.owner)
        except InfrastructureFault as fault:
            self.in_a_row += 1
            outcome.failed[match.treatment.key] = fault.message
            self.progress.fault(match, fault.message)
            if self.in_a_row == _FAULTS_IN_A_ROW:
                self.progress.note(f"{_FAULTS_IN_A_ROW} rematches in a row were lost: no more are started")
            return False
        self.in_a_row = 0
        outcome.measured.append(rematch)
        self.progress.measured(match, rematch)
        return True

    def _look_again(self, match: Match) -> Match:
        """How it stands now: another runner may have measured it, or run one of the attempts again."""
        keys = [match.baseline.key, match.treatment.key]
        standings = {key: s for key in keys if (s := self.store.standing(self.spec.name, key)) is not None}
        kernels = self.store.digests(self.spec.name, "kernel", keys)
        known = self.store.rematches.one(self.spec.name, *keys)
        return match_of(match.baseline, match.treatment, standings, kernels, known)

    def _request(self, attempt: PlannedAttempt) -> GradingRequest:
        kernel = self.store.part(self.spec.name, attempt.key, "kernel") or ""
        return GradingRequest(
            problem=attempt.problem,
            dsl=attempt.dsl,
            source=kernel.encode("utf-8", "surrogatepass"),
            workload=self.spec.attempt.workload,
            device=self.spec.attempt.device,
            final=True,
        )

    async def _end_at_once(self, workers: list[asyncio.Task[None]]) -> None:
        """End what is being measured when the user interrupts for the second time."""
        while not self.interruption.at_once:
            await self.interruption.next()
        for worker in workers:
            worker.cancel()

    async def _give_signs_of_life(self) -> None:
        while True:
            await asyncio.sleep(SIGN_OF_LIFE_S)
            with suppress(StoreError):  # the next save says it; a lease outlives several missed signs
                await asyncio.to_thread(self.store.leases.renew, self.owner)


def _rematch(match: Match, result: HeadToHead, spec: ExperimentSpec) -> Rematch:
    """What a head to head of baseline and treatment, in this order, says of the comparison."""
    pair, first = result.pair(0, 1), result.verdicts[0]
    versions = {key: value for verdict in result.verdicts for key, value in verdict.versions.items()}
    baseline, treatment = match.kernels
    return Rematch(
        baseline=match.baseline.key,
        treatment=match.treatment.key,
        ratio=None if pair is None else pair.ratio,
        low=None if pair is None else pair.low,
        high=None if pair is None else pair.high,
        reason=None if pair is not None else _why_none(result),
        baseline_sha256=baseline or "",
        treatment_sha256=treatment or "",
        workload=spec.attempt.workload,
        device=first.device,
        judge=spec.judge,
        contract_version=first.contract_version,
        versions={**versions, "metakernelbench": __version__},
        measurement=dataclasses.asdict(result),
        measured_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
    )


def _why_none(result: HeadToHead) -> str:
    """Which of the two did not come to be timed this time, and why."""
    names = ("baseline", "treatment")
    failed = [
        f"the {name} did not pass this time ({verdict.code}: {verdict.findings[0].message})"
        for name, verdict in zip(names, result.verdicts, strict=True)
        if not verdict.passed
    ]
    return "; ".join(failed) or "the two were not timed together"
