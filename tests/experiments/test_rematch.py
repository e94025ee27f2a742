"""Rematches converge: what is measured for the present kernels is kept, the rest is measured once, also by several."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from metakernelbench.errors import InfrastructureFault, UserError
from metakernelbench.experiments.interruption import Interruption
from metakernelbench.experiments.matches import Match, State, counts, matches_of
from metakernelbench.experiments.plan import plan_of
from metakernelbench.experiments.planned import PlannedAttempt
from metakernelbench.experiments.rematch import Outcome, run_rematches
from metakernelbench.experiments.spec import Concurrency, ExperimentSpec
from metakernelbench.grading.head_to_head import HeadToHead, Pair
from metakernelbench.grading.verdict import Verdict
from metakernelbench.judging.judge import GradingRequest
from metakernelbench.store.rematches import Rematch
from metakernelbench.store.store import Store
from tests.experiments.support import record_of, spec_of, verdict_of


class Timer:
    """A judge that measures at once: a kernel's time is the number in its first line."""

    def __init__(self, faults: int = 0) -> None:
        self.asked: list[Sequence[GradingRequest]] = []
        self.faults = faults

    async def verdict(self, request: GradingRequest) -> Verdict:
        raise AssertionError(f"nobody asks for {request}")

    async def head_to_head(self, requests: Sequence[GradingRequest]) -> HeadToHead:
        await asyncio.sleep(0.01)
        self.asked.append(requests)
        if self.faults:
            self.faults -= 1
            raise InfrastructureFault("the GPU fell off the bus")
        times = [float(request.source.split(b"\n")[0][1:]) for request in requests]
        verdicts = [
            verdict_of(PlannedAttempt(problem=r.problem, dsl=r.dsl, model="m"), passed=time > 0)
            for r, time in zip(requests, times, strict=True)
        ]
        ratio = times[0] / times[1] if min(times) > 0 else 0
        pair = Pair(first=0, second=1, ratio=ratio, low=ratio * 0.9, high=ratio * 1.1)
        return HeadToHead(verdicts=tuple(verdicts), pairs=(pair,) if ratio else ())

    async def close(self) -> None: ...


class Quiet:
    """Progress that is remembered."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def begin(self, matches: int, kept: int) -> None:
        self.notes.append(f"{matches} {kept}")

    def measured(self, match: Match, rematch: Rematch) -> None: ...

    def fault(self, match: Match, message: str) -> None:
        self.notes.append(message)

    def note(self, message: str) -> None:
        self.notes.append(message)


SPEC = {"problems": ("p03", "p21", "p28"), "concurrency": Concurrency(sandboxes=2)}


def save(store: Store, spec: ExperimentSpec, attempt: PlannedAttempt, time: float, *, passed: bool = True) -> None:
    """A finished attempt whose kernel takes so long."""
    final = verdict_of(attempt, passed=passed)
    record = record_of(attempt, spec.attempt, None, kernel=f"#{time}\nsolve = 1", final=final)
    store.save_attempt(spec.name, attempt, record)


@pytest.fixture
def finished(tmp_path: Path) -> tuple[ExperimentSpec, Store]:
    """An experiment in which everything has passed: solo kernels take 3, conditioned ones 2."""
    spec = spec_of(tmp_path, **SPEC)
    store = Store.open(tmp_path, create=True)
    store.save_experiment(spec, plan_of(spec))
    for attempt in plan_of(spec).attempts:
        save(store, spec, attempt, 3 if attempt.arm == "solo" else 2)
    return spec, store


def run(spec: ExperimentSpec, store: Store, judge: Timer, **options: Any) -> Outcome:
    options = {"progress": Quiet(), "poll_s": 0.02} | options
    return asyncio.run(run_rematches(spec, store, judge=judge, **options))


def states(spec: ExperimentSpec, store: Store) -> dict[State, int]:
    return dict(counts(matches_of(plan_of(spec), store, spec.name)))


def test_every_comparison_is_measured_once_and_a_second_run_repeats_nothing(
    finished: tuple[ExperimentSpec, Store],
) -> None:
    spec, store = finished
    assert states(spec, store) == {State.MISSING: 6}
    judge = Timer()
    outcome = run(spec, store, judge)
    assert (outcome.planned, outcome.remaining, len(outcome.measured), len(judge.asked)) == (6, 0, 6, 6)
    found = store.rematches.of(spec.name)
    assert set(found) == {(c.baseline, c.treatment) for c in plan_of(spec).comparisons}
    assert {rematch.ratio for rematch in found.values()} == {1.5}
    for rematch in found.values():
        records = [store.attempt(spec.name, key) for key in (rematch.baseline, rematch.treatment)]
        assert all(records) and rematch.fits(*records)  # type: ignore[arg-type]
    for requests in judge.asked:
        assert len({(r.problem, r.dsl) for r in requests}) == 1 and all(r.final for r in requests)

    again = Timer()
    assert run(spec, store, again).remaining == 0 and not again.asked
    assert states(spec, store) == {State.KEPT: 6}


def test_what_a_new_kernel_makes_stale_is_measured_again(finished: tuple[ExperimentSpec, Store]) -> None:
    spec, store = finished
    run(spec, store, Timer())
    changed = plan_of(spec).attempts[0]
    save(store, spec, changed, 6)
    assert states(spec, store)[State.STALE] == 1
    judge = Timer()
    run(spec, store, judge)
    assert len(judge.asked) == 1
    assert [r.ratio for r in store.rematches.of(spec.name).values() if r.baseline == changed.key] == [3.0]


def test_only_two_kernels_that_passed_are_timed(finished: tuple[ExperimentSpec, Store]) -> None:
    spec, store = finished
    comparison = plan_of(spec).comparisons[0]
    attempts = {attempt.key: attempt for attempt in plan_of(spec).attempts}
    save(store, spec, attempts[comparison.treatment], 2, passed=False)
    other = spec.model_copy(update={"problems": (*spec.problems, "p72")})
    store.save_experiment(other, plan_of(other))
    matches = matches_of(plan_of(other), store, other.name)
    assert dict(counts(matches)) == {State.UNTIMED: 1, State.MISSING: 5, State.WAITING: 2}
    reasons = {match.treatment.key: match.reason for match in matches}
    assert reasons[comparison.treatment] == f"{comparison.treatment} did not pass"
    outcome = run(other, store, Timer())
    assert (outcome.planned, outcome.remaining) == (5, 0)


def test_a_kernel_that_fails_this_time_leaves_no_ratio_but_the_reason(finished: tuple[ExperimentSpec, Store]) -> None:
    spec, store = finished
    comparison = plan_of(spec).comparisons[0]
    attempts = {attempt.key: attempt for attempt in plan_of(spec).attempts}
    save(store, spec, attempts[comparison.treatment], 0)
    run(spec, store, Timer())
    found = store.rematches.of(spec.name)[comparison.baseline, comparison.treatment]
    assert found.ratio is None
    assert found.reason == "the treatment did not pass this time (values: the outputs differ)"
    assert states(spec, store) == {State.KEPT: 6}


def test_two_runners_share_the_work(finished: tuple[ExperimentSpec, Store]) -> None:
    spec, store = finished
    one, other = Timer(), Timer()

    async def both() -> list[Outcome]:
        with Store.open(store.folder) as second:
            options: dict[str, Any] = {"progress": Quiet(), "poll_s": 0.02}
            return await asyncio.gather(
                run_rematches(spec, store, judge=one, **options), run_rematches(spec, second, judge=other, **options)
            )

    outcomes = asyncio.run(both())
    assert [outcome.remaining for outcome in outcomes] == [0, 0]
    assert len(one.asked) + len(other.asked) == 6 and one.asked and other.asked
    assert store.leases.held(spec.name) == {}


def test_a_lost_measurement_is_reported_and_the_next_run_makes_it(finished: tuple[ExperimentSpec, Store]) -> None:
    spec, store = finished
    outcome = run(spec, store, Timer(faults=1))
    assert (outcome.remaining, list(outcome.failed.values())) == (1, ["the GPU fell off the bus"])
    assert run(spec, store, Timer()).remaining == 0


def test_a_judge_that_loses_everything_is_soon_left_alone(finished: tuple[ExperimentSpec, Store]) -> None:
    spec, store = finished
    judge, progress = Timer(faults=100), Quiet()
    spec = spec.model_copy(update={"concurrency": Concurrency(judges=1)})
    assert run(spec, store, judge, progress=progress).remaining == 6
    assert len(judge.asked) == 5 and "no more are started" in progress.notes[-1]


@pytest.mark.parametrize(("judges", "at_once", "most"), [(None, 3, 3), (None, None, 2), (1, 3, 1)])
def test_as_many_go_on_at_once_as_the_file_or_else_the_judge_says(
    finished: tuple[ExperimentSpec, Store], judges: int | None, at_once: int | None, most: int
) -> None:
    spec, store = finished

    class Counting(Timer):
        def __init__(self) -> None:
            super().__init__()
            self.at_once, self.going, self.most = at_once, 0, 0

        async def head_to_head(self, requests: Sequence[GradingRequest]) -> HeadToHead:
            self.going += 1
            self.most = max(self.most, self.going)
            try:
                await asyncio.sleep(0.2)
                return await super().head_to_head(requests)
            finally:
                self.going -= 1

    judge = Counting()
    spec = spec.model_copy(update={"concurrency": Concurrency(sandboxes=2, judges=judges)})
    assert run(spec, store, judge).remaining == 0
    assert judge.most == most


def test_a_mistake_ends_the_run_at_once(finished: tuple[ExperimentSpec, Store]) -> None:
    spec, store = finished

    class Refusing(Timer):
        async def head_to_head(self, requests: Sequence[GradingRequest]) -> HeadToHead:
            raise UserError("this machine has no CUDA GPU")

    with pytest.raises(UserError, match="no CUDA GPU"):
        run(spec, store, Refusing())
    assert store.leases.held(spec.name) == {}


def test_an_interruption_ends_after_what_is_measured_and_a_second_one_at_once(
    finished: tuple[ExperimentSpec, Store],
) -> None:
    spec, store = finished
    interruption = Interruption()

    class Interrupted(Timer):
        async def head_to_head(self, requests: Sequence[GradingRequest]) -> HeadToHead:
            interruption.request()
            return await super().head_to_head(requests)

    spec = spec.model_copy(update={"concurrency": Concurrency(judges=1)})
    outcome = run(spec, store, Interrupted(), interruption=interruption)
    assert outcome.interrupted and len(outcome.measured) == 1 and outcome.remaining == 5

    class Endless(Timer):
        async def head_to_head(self, requests: Sequence[GradingRequest]) -> HeadToHead:
            asyncio.get_running_loop().call_soon(again.request)
            asyncio.get_running_loop().call_soon(again.request)
            await asyncio.sleep(1000)
            raise AssertionError

    again = Interruption()
    outcome = run(spec, store, Endless(), interruption=again)
    assert outcome.interrupted and not outcome.measured
    assert store.leases.held(spec.name) == {}
