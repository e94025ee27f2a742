"""Brings one planned attempt to its end: claim it, see what is still to be done, run it, keep its record."""

from __future__ import annotations

import asyncio
import shutil
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum, auto
from pathlib import Path
from typing import Protocol

from metakernelbench.attempts.record import AttemptRecord
from metakernelbench.attempts.settings import AttemptSettings
from metakernelbench.errors import InfrastructureFault, RateLimited, StoreError, TriedEnough, UserError
from metakernelbench.experiments.claim import claimed
from metakernelbench.experiments.interruption import Interruption
from metakernelbench.experiments.materials import Materials, NotAnnotated
from metakernelbench.experiments.plan import Fingerprint, Freshness, State
from metakernelbench.experiments.planned import PlannedAttempt
from metakernelbench.experiments.progress import Progress
from metakernelbench.experiments.queue import Pauses
from metakernelbench.experiments.spec import ExperimentSpec
from metakernelbench.grading.verdict import Verdict
from metakernelbench.judging.judge import GradingRequest, Judge
from metakernelbench.store.leases import Owner
from metakernelbench.store.store import Standing, Store

TRIES = 3
"""How often an attempt is started when faults of ours end it, and how often its record is saved."""


class RunAttempt(Protocol):
    """`attempts.attempt.run_attempt`, or a stand-in."""

    async def __call__(
        self,
        planned: PlannedAttempt,
        *,
        settings: AttemptSettings,
        skill: str | None,
        judge: Judge,
        folder: Path,
        slot: int,
    ) -> AttemptRecord: ...


@dataclass(frozen=True, kw_only=True)
class Machinery:
    """What running attempts takes, as functions, so that the rest can be tested without any of it."""

    run: RunAttempt
    fingerprint: Fingerprint
    check_model: Callable[[str, AttemptSettings], None]
    """Raises `UserError` where attempts with this model cannot start."""


class Result(Enum):
    """What has become of an attempt."""

    FINISHED = auto()
    """This run has run it."""
    SKIPPED = auto()
    """This run has recorded that it is not to be run."""
    KEPT = auto()
    """Another runner has finished it meanwhile."""
    ELSEWHERE = auto()
    """Another runner is at it."""
    GIVEN_UP = auto()
    """Faults of ours have ended every try."""
    STOPPED = auto()
    """The user wants no more tries."""
    WAITING = auto()
    """What it is to be given has to be annotated first."""


@dataclass(kw_only=True)
class Settler:
    """Settles attempts of one experiment, several side by side on one event loop. What blocks is sent to threads."""

    spec: ExperimentSpec
    store: Store
    owner: Owner
    judge: Judge
    progress: Progress
    interruption: Interruption
    machinery: Machinery
    backoff: Callable[[int], float]
    pauses: Pauses = field(default_factory=Pauses)
    failed: dict[str, str] = field(default_factory=dict[str, str])
    """Key → the fault that an attempt was given up for."""
    waiting: dict[str, str] = field(default_factory=dict[str, str])
    """Key → what an attempt waits for."""

    def __post_init__(self) -> None:
        self._freshness = Freshness(self.spec.attempt, self.machinery.fingerprint)
        self._materials = Materials(self.store, self.spec.name)
        self._gradings = asyncio.Semaphore(self.spec.concurrency.judges or self.spec.concurrency.sandboxes)

    async def settle(self, attempt: PlannedAttempt, slot: int) -> Result:
        """Settle one attempt whose source, if it has one, is settled. Raises `UserError` for what no try can mend."""
        async with claimed(self.store.leases, self.owner, self.spec.name, attempt.key) as ours:
            return await self._settle_claimed(attempt, slot) if ours else Result.ELSEWHERE

    def glance(self, attempts: Sequence[PlannedAttempt]) -> tuple[set[str], set[str]]:
        """Keys of those that other runners are at now, and of those that are finished."""
        held = self.store.leases.held(self.spec.name)
        keys = {key for attempt in attempts for key in (attempt.key, attempt.source) if key is not None}
        standings = self.store.standings(self.spec.name, keys)
        others = {key for key, owner in held.items() if owner != self.owner.name}
        return others, {a.key for a in attempts if a.key not in others and self._is_kept(a, standings)}

    def _is_kept(self, attempt: PlannedAttempt, standings: Mapping[str, Standing]) -> bool:
        if attempt.key not in standings:
            return False
        try:
            return self._state(attempt, standings)[0] is State.KEPT
        except NotAnnotated:
            return False

    async def _settle_claimed(self, attempt: PlannedAttempt, slot: int) -> Result:
        try:
            found = await asyncio.to_thread(self._found, attempt)
        except NotAnnotated as reason:
            self.waiting[attempt.key] = str(reason)
            return Result.WAITING
        if found.state is State.KEPT:
            self.progress.kept(attempt)
            return Result.KEPT
        if found.state is State.SKIPPED:
            await self._save(attempt, _skipped(attempt), attached=None, task="")
            self.progress.skipped(attempt)
            return Result.SKIPPED
        record = await self._run(attempt, found.attachment, slot)
        if record is None:
            return Result.GIVEN_UP if attempt.key in self.failed else Result.STOPPED
        try:
            task = await asyncio.to_thread(self._freshness.task, attempt)
            await self._save(attempt, record, attached=found.attached, task=task)
        except InfrastructureFault as error:  # the lease has been lost
            self.progress.note(error.message)
            return Result.ELSEWHERE
        self.progress.finished(attempt, record)
        folder = self.store.work_folder(self.spec.name, attempt.key)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return Result.FINISHED

    def _found(self, attempt: PlannedAttempt) -> _Found:
        """What is to be done, and with what: other runners may have finished this attempt meanwhile."""
        keys = [key for key in (attempt.key, attempt.source) if key is not None]
        standings = self.store.standings(self.spec.name, keys)
        state, attached = self._state(attempt, standings)
        if state is not State.MISSING:
            return _Found(state)
        source = None if attempt.source is None else standings.get(attempt.source)
        return _Found(state, attached, self._materials.attachment(attempt, source))

    def _state(self, attempt: PlannedAttempt, standings: Mapping[str, Standing]) -> tuple[State, str | None]:
        """`KEPT`, `SKIPPED`, or `MISSING` with the digest of what it is to be given."""
        standing = standings.get(attempt.key)
        attached = None
        if attempt.source is not None:
            attached = self._materials.digest(attempt, standings.get(attempt.source))
            if attached is None:
                recorded = standing is not None and standing.ended == "skipped"
                return State.KEPT if recorded else State.SKIPPED, None
        fresh = standing is not None and self._freshness.reason(attempt, standing, attached) is None
        return State.KEPT if fresh else State.MISSING, attached

    async def _run(self, attempt: PlannedAttempt, attachment: str | None, slot: int) -> AttemptRecord | None:
        """Up to three tries; None when the last one failed too, or the user wants no more."""
        for number in range(1, TRIES + 1):
            if number > 1 and self.interruption.requested:
                return None
            self.progress.started(attempt, number)
            try:
                record = await self._try(attempt, attachment, slot)
            except UserError:
                raise
            except Exception as error:
                if isinstance(error, RateLimited):
                    self.pauses.begin(attempt.model)
                if await self._gives_up(attempt, number, error):
                    return None
            else:
                self.pauses.end(attempt.model)
                return record.model_copy(update={"tries": number})
            finally:
                self.progress.stopped(attempt)
        return None

    async def _try(self, attempt: PlannedAttempt, attachment: str | None, slot: int) -> AttemptRecord:
        folder = self.store.work_folder(self.spec.name, attempt.key)
        try:
            await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"cannot write to {folder}: {error.strerror}", hint="make room or check permissions; run again"
            ) from error
        judge = _WatchedJudge(self.judge, self._gradings, attempt, self.progress)
        return await self.machinery.run(
            attempt, settings=self.spec.attempt, skill=attachment, judge=judge, folder=folder, slot=slot
        )

    async def _gives_up(self, attempt: PlannedAttempt, number: int, error: Exception) -> bool:
        """Record a fault; wait before the next try, unless there is none. An error that is not an `InfrastructureFault`
        is a mistake in this program, which another try would only repeat."""
        transient = isinstance(error, InfrastructureFault)
        message = str(error) if transient else "".join(traceback.format_exception(error))
        tried_enough = number == TRIES or isinstance(error, TriedEnough)
        gives_up = not transient or tried_enough or self.interruption.requested
        await asyncio.to_thread(
            self.store.record_fault,
            self.spec.name,
            attempt.key,
            try_number=number,
            gave_up=gives_up,
            message=message,
        )
        self.progress.fault(attempt, number, message, gave_up=gives_up)
        if gives_up:
            self.failed[attempt.key] = message
        else:
            await self._rest(self.backoff(number))
            while (left := self.pauses.left(attempt.model)) and not self.interruption.requested:
                await self._rest(left)  # another attempt's refusal may have made it longer meanwhile
        return gives_up

    async def _rest(self, seconds: float) -> None:
        """Wait; an interruption ends it."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.interruption.next(), seconds)

    async def _save(self, attempt: PlannedAttempt, record: AttemptRecord, *, attached: str | None, task: str) -> None:
        """Keep a record. A store that cannot be written to gets time: the record may be an hour's work."""
        for number in range(1, TRIES + 1):
            try:
                return await asyncio.to_thread(
                    self.store.save_attempt,
                    self.spec.name,
                    attempt,
                    record,
                    attached=attached,
                    task=task,
                    owner=self.owner,
                )
            except StoreError as error:
                if number == TRIES:
                    raise
                self.progress.note(f"{error.message}; trying again to keep {attempt.key}")
                await asyncio.sleep(self.backoff(number))
        return None


@dataclass(frozen=True)
class _Found:
    """How an attempt stands at the moment it is claimed."""

    state: State
    attached: str | None = None
    """Digest of what it is given of its source."""
    attachment: str | None = None
    """What is attached to its instruction."""


def _skipped(attempt: PlannedAttempt) -> AttemptRecord:
    """The record of a treatment whose source left nothing to attach: nothing was sent, run or graded."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return AttemptRecord(
        problem=attempt.problem,
        dsl=attempt.dsl,
        model=attempt.model,
        replicate=attempt.replicate,
        arm=attempt.arm,
        source=attempt.source,
        material=attempt.material,
        without=attempt.without,
        skill_form=attempt.skill_form,
        ended="skipped",
        instruction="",
        fingerprint="",
        started_at=now,
        finished_at=now,
    )


@dataclass(frozen=True)
class _WatchedJudge:
    """The experiment's judge as one attempt sees it: so many gradings at once, each of them shown."""

    judge: Judge
    gradings: asyncio.Semaphore
    attempt: PlannedAttempt
    progress: Progress

    async def verdict(self, request: GradingRequest) -> Verdict:
        async with self.gradings:
            verdict = await self.judge.verdict(request)
        self.progress.graded(self.attempt, request, verdict)
        return verdict

    async def close(self) -> None:
        """The experiment's judge is closed by whoever opened it."""
