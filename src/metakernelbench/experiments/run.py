"""Runs what is missing of an experiment until nothing is, or nothing more can be done.

What is finished and fresh is kept; an attempt starts when its source has finished; two runners on one store share the
work. A fault of ours is tried again; a mistake in the experiment's configuration ends the run at once.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from metakernelbench.errors import StoreError
from metakernelbench.experiments.interruption import Interruption
from metakernelbench.experiments.plan import RunPlan, plan_missing, plan_of
from metakernelbench.experiments.progress import Progress, end_first
from metakernelbench.experiments.queue import Queue
from metakernelbench.experiments.settle import Machinery, Result, Settler
from metakernelbench.experiments.spec import ExperimentSpec
from metakernelbench.judging.judge import Judge
from metakernelbench.store.leases import SIGN_OF_LIFE_S
from metakernelbench.store.store import Store

_SEEN_AT_A_GLANCE = 200
"""Attempts that are looked up together: more than several runners are at, and few enough to be instant."""
_GIVEN_UP_IN_A_ROW = 5
"""After so many attempts given up with none finished between them, the cause is not the attempts'."""


def real_machinery() -> Machinery:
    """Attempts through Harbor."""
    from metakernelbench.attempts.attempt import check_model, fingerprint, run_attempt

    return Machinery(run=run_attempt, fingerprint=fingerprint, check_model=check_model)


@dataclass(kw_only=True)
class Outcome:
    """What a run has done."""

    planned: int
    finished: list[str] = field(default_factory=list[str])
    """Keys of the attempts that this run finished."""
    skipped: list[str] = field(default_factory=list[str])
    """Keys of the treatments that this run recorded as skipped."""
    failed: dict[str, str] = field(default_factory=dict[str, str])
    """Key → the fault that this run gave the attempt up for."""
    waiting: dict[str, str] = field(default_factory=dict[str, str])
    """Key → what the attempt waits for, which this program cannot do by itself."""
    remaining: int = 0
    """Planned attempts that the store holds no fresh record of."""
    interrupted: bool = False


def _patient(tried: int) -> float:
    """Seconds to wait after so many failed tries: more each time, and never the same for all."""
    return 5.0 * float(2**tried) * random.uniform(0.5, 1.5)


def check_models(spec: ExperimentSpec, machinery: Machinery) -> None:
    """Raises `UserError` where agent, sandbox or a model cannot be had here. Costs nothing, so ask before a store is
    made."""
    for model in spec.models:
        machinery.check_model(model, spec.attempt)


async def run_experiment(
    spec: ExperimentSpec,
    store: Store,
    *,
    judge: Judge,
    progress: Progress,
    machinery: Machinery,
    interruption: Interruption | None = None,
    backoff: Callable[[int], float] = _patient,
    poll_s: float = 2.0,
) -> Outcome:
    """Run what is missing. Raises `UserError` at the first sign that no attempt can succeed; what was finished is kept.

    `backoff` gives the seconds to wait after a number of failed tries; `poll_s` is how often attempts that another
    runner is at are looked after.
    """
    check_models(spec, machinery)
    plan = plan_of(spec)
    store.save_experiment(spec, plan)
    run_plan = await asyncio.to_thread(plan_missing, spec, plan, store, machinery.fingerprint)
    interruption = interruption or Interruption()
    with store.leases.owner() as owner:
        settler = Settler(
            spec=spec,
            store=store,
            owner=owner,
            judge=judge,
            progress=progress,
            interruption=interruption,
            machinery=machinery,
            backoff=backoff,
        )
        return await _Runner(run_plan, settler, poll_s).run()


class _Runner:
    """Decides which attempt is settled when."""

    def __init__(self, plan: RunPlan, settler: Settler, poll_s: float) -> None:
        self._plan, self._settler, self._poll_s = plan, settler, poll_s
        self._interruption, self._progress = settler.interruption, settler.progress
        self._slots = list(range(plan.spec.concurrency.sandboxes))
        self._queue = Queue([item.attempt.model for item in plan.items], plan.spec.concurrency.models, settler.pauses)
        self._unsettled = {item.attempt.key for item in plan.items if not item.settled}
        self._elsewhere: list[int] = []
        self._looked_at = 0.0
        self._waiting: dict[str, list[int]] = defaultdict(list)
        self._running: dict[asyncio.Task[Result], tuple[int, int]] = {}
        self._given_up_in_a_row = 0
        self._store_error: StoreError | None = None
        self._outcome = Outcome(planned=len(plan.items))
        for place, item in enumerate(plan.items):
            if item.attempt.source in self._unsettled:
                self._waiting[item.attempt.source].append(place)
            elif not item.settled:
                self._queue.add(place)

    async def run(self) -> Outcome:
        """Until everything is settled, given up, or stopped. Raises what no attempt can do anything about."""
        self._progress.begin(self._plan)
        heartbeat = asyncio.create_task(self._give_signs_of_life())
        try:
            while True:
                self._start()
                if not self._running and (self._stopping or not (self._elsewhere or self._queue)):
                    break
                await self._wait()
        finally:
            heartbeat.cancel()
            await self._end_running()
            self._outcome.failed = self._settler.failed
            self._outcome.waiting = self._settler.waiting
            self._outcome.remaining = len(self._unsettled)
            self._outcome.interrupted = self._interruption.requested
            self._progress.end()
        if self._store_error is not None:
            raise self._store_error
        return self._outcome

    @property
    def _stopping(self) -> bool:
        gives_up = self._given_up_in_a_row >= _GIVEN_UP_IN_A_ROW
        return self._interruption.requested or gives_up or self._store_error is not None

    def _start(self) -> None:
        """Start whatever can start now."""
        while self._slots and not self._stopping and (place := self._queue.take()) is not None:
            slot = self._slots.pop(0)
            task = asyncio.create_task(self._settler.settle(self._plan.items[place].attempt, slot))
            self._running[task] = (place, slot)

    async def _wait(self) -> None:
        """Wait until an attempt ends, a pause is over or the user interrupts; now and then, look at what others do."""
        interrupted = asyncio.create_task(self._interruption.next())
        look = max(0.0, self._looked_at + self._poll_s - time.monotonic())
        pauses = [look if self._elsewhere else None, self._queue.pause if self._slots and not self._stopping else None]
        done, _ = await asyncio.wait(
            {*self._running, interrupted},
            timeout=min((pause for pause in pauses if pause is not None), default=None),
            return_when=asyncio.FIRST_COMPLETED,
        )
        interrupted.cancel()
        for task in done & self._running.keys():
            place, slot = self._running.pop(task)
            self._slots.append(slot)
            self._queue.give_back(place)
            try:
                self._ended(place, task.result())
            except StoreError as error:
                self._stop_for(error)
        if self._elsewhere and time.monotonic() - self._looked_at > self._poll_s:
            await self._look_around()
        if self._interruption.at_once:
            await self._end_running()

    def _stop_for(self, error: StoreError) -> None:
        """A store that cannot be used: what runs may still come to its end and be kept."""
        if self._store_error is None:
            self._store_error = error
            self._progress.note(f"{error.message}: nothing new is started, {end_first(len(self._running))}")

    async def _look_around(self) -> None:
        """See at one glance which of the next attempts other runners are at or have finished, without claiming each."""
        places = [*self._elsewhere, *self._queue.first(_SEEN_AT_A_GLANCE)]
        attempts = [self._plan.items[place].attempt for place in places]
        try:
            held, kept = await asyncio.to_thread(self._settler.glance, attempts)
        except StoreError as error:
            return self._stop_for(error)
        self._looked_at = time.monotonic()
        gone = {place for place in places if self._plan.items[place].attempt.key in held | kept}
        self._queue.remove(gone)
        for place in set(self._elsewhere) - gone:
            self._queue.add(place)
        self._elsewhere = [place for place in gone if self._plan.items[place].attempt.key in held]
        for place in gone - set(self._elsewhere):
            self._progress.kept(self._plan.items[place].attempt)
            self._ended(place, Result.KEPT)
        return None

    def _ended(self, place: int, result: Result) -> None:
        key = self._plan.items[place].attempt.key
        match result:
            case Result.ELSEWHERE:
                self._elsewhere.append(place)
                return
            case Result.GIVEN_UP:
                self._given_up_in_a_row += 1
                if self._given_up_in_a_row == _GIVEN_UP_IN_A_ROW:
                    self._progress.note(f"{_GIVEN_UP_IN_A_ROW} attempts in a row were given up: no more are started")
                return
            case Result.WAITING | Result.STOPPED:
                return
            case Result.FINISHED:
                self._given_up_in_a_row = 0
                self._outcome.finished.append(key)
            case Result.SKIPPED:
                self._outcome.skipped.append(key)
        self._unsettled.discard(key)
        for dependent in self._waiting.pop(key, []):
            self._queue.add(dependent)

    async def _end_running(self) -> None:
        """Cancel what runs, and wait for it to clean up."""
        tasks = list(self._running)
        self._running.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _give_signs_of_life(self) -> None:
        while True:
            await asyncio.sleep(SIGN_OF_LIFE_S)
            with suppress(StoreError):  # the next save says it; a lease outlives several missed signs
                await asyncio.to_thread(self._settler.store.leases.renew, self._settler.owner)
