"""A run converges: what is finished is kept, what is missing runs once, faults are tried again."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from metakernelbench.attempts.record import AttemptRecord
from metakernelbench.errors import InfrastructureFault, RateLimited, TriedEnough, UserError
from metakernelbench.experiments.interruption import Interruption
from metakernelbench.experiments.plan import State, plan_missing, plan_of
from metakernelbench.experiments.queue import Pauses
from metakernelbench.experiments.run import Outcome, run_experiment
from metakernelbench.experiments.spec import Concurrency, ExperimentSpec
from metakernelbench.judging.judge import GradingRequest
from metakernelbench.store.store import Store
from tests.experiments.support import Instant, NoJudge, fingerprint, lines, outcome_of, record_of, spec_of, verdict_of


def run(spec: ExperimentSpec, instant: Instant, **options: Any) -> Outcome:
    options = {
        "judge": NoJudge(),
        "progress": lines(),
        "machinery": instant.machinery(),
        "backoff": lambda _: 0.0,
        "poll_s": 0.02,
    } | options
    with Store.open(spec.store, create=True) as store:
        return asyncio.run(run_experiment(spec, store, **options))


def test_every_planned_attempt_runs_once_and_after_its_source(tmp_path: Path) -> None:
    spec, instant = spec_of(tmp_path), Instant()
    outcome = run(spec, instant)
    plan = plan_of(spec)
    assert outcome.remaining == 0 and not outcome.failed
    assert len(set(instant.ran)) == len(instant.ran)
    for attempt in plan.attempts:
        if attempt.source and attempt.key in instant.ran:
            assert instant.ran.index(attempt.source) < instant.ran.index(attempt.key)
            assert instant.skills[attempt.key] == f"What {attempt.source} taught."
    with Store.open(tmp_path) as store:
        assert [key for key, _ in store.attempts("small")] == [attempt.key for attempt in plan.attempts]


def test_a_source_without_a_skill_skips_the_treatment_without_running_it(tmp_path: Path) -> None:
    class NoSkill(Instant):
        async def run(self, planned: Any, **options: Any) -> AttemptRecord:
            record = await super().run(planned, **options)
            return record.model_copy(update={"skill": None}) if planned.dsl == "tirx" else record

    instant = NoSkill()
    outcome = run(spec_of(tmp_path, problems=("p28",)), instant)
    treatment = "p28/triton/vendor/model/0/from-tirx"
    assert outcome.skipped == [treatment] and treatment not in instant.ran
    with Store.open(tmp_path) as store:
        record = store.attempt("small", treatment)
    assert record is not None and record.ended == "skipped" and record.final is None and record.kernel is None


def test_a_second_run_repeats_nothing(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    run(spec, Instant())
    with Store.open(tmp_path) as store:
        before = outcome_of(store, "small")
    again = Instant()
    outcome = run(spec, again)
    assert again.ran == [] and outcome.remaining == 0 and outcome.skipped == []
    with Store.open(tmp_path) as store:
        assert outcome_of(store, "small") == before


def test_more_problems_run_only_what_is_new(tmp_path: Path) -> None:
    run(spec_of(tmp_path), Instant())
    more = Instant()
    run(spec_of(tmp_path, problems=("p03", "p28", "p72")), more)
    assert more.ran and all(key.startswith("p72/") for key in more.ran)


def test_changed_settings_make_everything_stale_and_the_old_records_stay_in_the_database(tmp_path: Path) -> None:
    run(spec_of(tmp_path), Instant())
    changed = spec_of(tmp_path, attempt=spec_of(tmp_path).attempt.model_copy(update={"budget_s": 60.0}))
    with Store.open(tmp_path) as store:
        plan = plan_missing(changed, plan_of(changed), store, fingerprint)
        solos = [item for item in plan.items if item.attempt.arm == "solo"]
        assert {item.reason for item in solos} == {"its task or settings have changed"}
        treatments = {item.reason for item in plan.items if item.attempt.arm == "conditioned"}
        assert treatments == {"its source runs again"}
    again = Instant()
    assert run(changed, again).remaining == 0
    assert len(again.ran) >= len(solos)


def test_a_source_that_runs_again_and_teaches_the_same_leaves_its_treatment_alone(tmp_path: Path) -> None:
    """Skills that have not changed by a letter transfer what they transferred before."""
    spec = spec_of(tmp_path, problems=("p28",))
    run(spec, Instant())
    with Store.open(tmp_path) as store:
        solo = plan_of(spec).attempts[0]
        old = record_of(solo, spec.attempt, None)
        store.save_attempt("small", solo, old, task="of a task that was different")
    again = Instant()
    assert run(spec, again).remaining == 0
    assert again.ran == [solo.key]


def test_a_source_that_runs_again_and_teaches_something_else_reruns_its_treatment(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, problems=("p28",))
    run(spec, Instant())
    solo, other = plan_of(spec).attempts[:2]
    assert solo.arm == other.arm == "solo"
    with Store.open(tmp_path) as store:
        changed = record_of(solo, spec.attempt, None).model_copy(update={"skill": "Something else."})
        store.save_attempt("small", solo, changed)
        plan = plan_missing(spec, plan_of(spec), store, fingerprint)
    stale = {item.attempt.key: item.reason for item in plan.items if item.state is State.STALE}
    assert stale == {"p28/triton/vendor/model/0/from-tirx": "its source skill has changed"}
    again = Instant()
    run(spec, again)
    assert again.ran == list(stale)


def test_a_transient_fault_is_tried_again_and_counted(tmp_path: Path) -> None:
    class Shaky(Instant):
        async def run(self, planned: Any, **options: Any) -> AttemptRecord:
            record = await super().run(planned, **options)
            if self.ran.count(planned.key) < 3:
                raise InfrastructureFault("the sandbox was lost")
            return record

    shaky = Shaky()
    outcome = run(spec_of(tmp_path, problems=("p28",)), shaky)
    assert outcome.remaining == 0 and not outcome.failed
    with Store.open(tmp_path) as store:
        assert {record.tries for _, record in store.attempts("small") if record.ended != "skipped"} == {3}
        assert {(fault.try_number, fault.gave_up) for fault in store.faults("small")} == {(1, False), (2, False)}


def test_an_attempt_is_given_up_after_three_tries_and_planned_again_by_the_next_run(tmp_path: Path) -> None:
    class Broken(Instant):
        async def run(self, planned: Any, **options: Any) -> AttemptRecord:
            record = await super().run(planned, **options)
            if planned.key == "p28/tirx/vendor/model/0/solo":
                raise InfrastructureFault("the provider is down")
            return record

    spec, broken = spec_of(tmp_path), Broken()
    outcome = run(spec, broken)
    assert broken.ran.count("p28/tirx/vendor/model/0/solo") == 3
    assert outcome.failed == {"p28/tirx/vendor/model/0/solo": "the provider is down"}
    assert outcome.remaining == 2, "the attempt, and the treatment that waits for its skill"
    with Store.open(tmp_path) as store:
        plan = plan_missing(spec, plan_of(spec), store, fingerprint)
    assert {item.attempt.key: item.state for item in plan.to_run} == {
        "p28/tirx/vendor/model/0/solo": State.FAILED,
        "p28/triton/vendor/model/0/from-tirx": State.MISSING,
    }
    whole = Instant()
    assert run(spec, whole).remaining == 0
    assert set(whole.ran) <= {item.attempt.key for item in plan.to_run}


def test_a_mistake_of_this_program_is_kept_with_its_traceback_and_not_tried_again(tmp_path: Path) -> None:
    class Buggy(Instant):
        async def run(self, planned: Any, **options: Any) -> AttemptRecord:
            record = await super().run(planned, **options)
            if planned.problem == "p03" and planned.dsl == "tirx":
                raise KeyError("no such thing")
            return record

    buggy = Buggy()
    outcome = run(spec_of(tmp_path), buggy)
    assert buggy.ran.count("p03/tirx/vendor/model/0/solo") == 1
    assert "KeyError: 'no such thing'" in outcome.failed["p03/tirx/vendor/model/0/solo"]


def test_a_phase_that_has_been_tried_enough_is_not_started_again_by_the_same_run(tmp_path: Path) -> None:
    class Ungraded(Instant):
        async def run(self, planned: Any, **options: Any) -> AttemptRecord:
            record = await super().run(planned, **options)
            if planned.key == "p03/tirx/vendor/model/0/solo":
                raise TriedEnough("the final grading failed 3 times: the GPU is away")
            return record

    ungraded = Ungraded()
    outcome = run(spec_of(tmp_path), ungraded)
    assert ungraded.ran.count("p03/tirx/vendor/model/0/solo") == 1
    assert outcome.failed == {"p03/tirx/vendor/model/0/solo": "the final grading failed 3 times: the GPU is away"}


def test_a_model_at_its_providers_limit_is_left_alone_while_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Limited(Instant):
        refused = False

        async def run(self, planned: Any, **options: Any) -> AttemptRecord:
            record = await super().run(planned, **options)
            if planned.model == "a/limited" and not self.refused:
                self.refused = True
                raise RateLimited("RateLimitError: slow down")
            return record

    def left(_: Pauses, model: str) -> float:
        """The pause lasts until the other model has done four attempts."""
        others = sum("b/free" in key for key in limited.ran)
        return 0.01 if limited.refused and model == "a/limited" and others < 4 else 0.0

    limited = Limited()
    monkeypatch.setattr(Pauses, "left", left)
    spec = spec_of(tmp_path, models=("a/limited", "b/free"), concurrency=Concurrency(sandboxes=2, models=1))
    outcome = run(spec, limited)
    assert (outcome.remaining, outcome.failed) == (0, {})
    first, *others = [place for place, key in enumerate(limited.ran) if "a/limited" in key]
    assert limited.ran[others[0]] == limited.ran[first], "it is the refused attempt that goes on"
    assert others[0] - first >= 4, "what could go on with the other model went on first"


def test_five_attempts_given_up_in_a_row_end_the_run(tmp_path: Path) -> None:
    class Down(Instant):
        async def run(self, planned: Any, **options: Any) -> AttemptRecord:
            await super().run(planned, **options)
            raise InfrastructureFault("the provider is down")

    problems = ("p03", "p21", "p28", "p49", "p61", "p72")
    spec = spec_of(tmp_path, problems=problems, concurrency=Concurrency(sandboxes=1))
    outcome = run(spec, Down())
    assert len(outcome.failed) == 5 and outcome.remaining == 24


def test_a_configuration_that_cannot_work_ends_the_run_at_once_and_keeps_what_is_finished(tmp_path: Path) -> None:
    class Refused(Instant):
        async def run(self, planned: Any, **options: Any) -> AttemptRecord:
            record = await super().run(planned, **options)
            if len(self.ran) == 3:
                raise UserError("the model provider refuses")
            return record

    refused = Refused()
    with pytest.raises(UserError, match="provider refuses"):
        run(spec_of(tmp_path, concurrency=Concurrency(sandboxes=1)), refused)
    with Store.open(tmp_path) as store:
        assert [key for key, _ in store.attempts("small")] == refused.ran[:2]
        assert store.leases.held("small") == {}


def test_a_model_that_cannot_be_used_is_said_before_anything_starts(tmp_path: Path) -> None:
    def refuse(model: str, _: Any) -> None:
        raise UserError(f"the model `{model}` needs a key")

    instant = Instant()
    with pytest.raises(UserError, match="needs a key"):
        run(spec_of(tmp_path), instant, machinery=instant.machinery(check_model=refuse))
    assert instant.ran == []


def test_no_more_attempts_and_gradings_than_allowed_go_on_at_once(tmp_path: Path) -> None:
    class Busy(Instant):
        now = most = grading = most_gradings = 0
        slots: set[int]

        async def run(self, planned: Any, **options: Any) -> AttemptRecord:
            self.slots = getattr(self, "slots", set())
            assert options["slot"] not in self.slots
            self.slots.add(options["slot"])
            self.now += 1
            self.most = max(self.most, self.now)
            request = GradingRequest(problem=planned.problem, dsl=planned.dsl, source=b"")
            await options["judge"].verdict(request)
            self.now -= 1
            self.slots.remove(options["slot"])
            return await super().run(planned, **options)

        async def verdict(self, request: GradingRequest) -> Any:
            self.grading += 1
            self.most_gradings = max(self.most_gradings, self.grading)
            while self.most < 3:  # until all three attempts want to be graded
                await asyncio.sleep(0.001)
            self.grading -= 1
            return verdict_of(plan_of(spec).attempts[0], passed=True)

        async def close(self) -> None: ...

    spec = spec_of(tmp_path, concurrency=Concurrency(sandboxes=3, judges=2))
    busy = Busy()
    run(spec, busy, judge=busy)
    assert (busy.most, busy.most_gradings) == (3, 2)


def test_the_first_interruption_lets_running_attempts_end_and_starts_no_more(tmp_path: Path) -> None:
    interruption: list[Interruption] = []

    class Interrupted(Instant):
        async def run(self, planned: Any, **options: Any) -> AttemptRecord:
            if not interruption[0].requested:
                interruption[0].request()
            await asyncio.sleep(0.02)
            return await super().run(planned, **options)

    async def go(spec: ExperimentSpec, store: Store, instant: Instant) -> Outcome:
        interruption.append(Interruption())
        return await run_experiment(
            spec,
            store,
            judge=NoJudge(),
            progress=lines(),
            machinery=instant.machinery(),
            interruption=interruption[0],
        )

    spec, instant = spec_of(tmp_path, concurrency=Concurrency(sandboxes=2)), Interrupted()
    with Store.open(tmp_path, create=True) as store:
        outcome = asyncio.run(go(spec, store, instant))
        assert [key for key, _ in store.attempts("small")] == sorted(instant.ran)
    assert len(instant.ran) == 2 and outcome.interrupted and outcome.remaining == 6


def test_an_interruption_ends_the_pause_before_another_try_and_the_try_is_not_made(tmp_path: Path) -> None:
    class Lost(Instant):
        async def run(self, planned: Any, **options: Any) -> AttemptRecord:
            await super().run(planned, **options)
            asyncio.get_running_loop().call_later(0.05, interruption.request)
            raise InfrastructureFault("the sandbox was lost")

    lost, interruption = Lost(), Interruption()
    spec = spec_of(tmp_path, concurrency=Concurrency(sandboxes=1))
    outcome = run(spec, lost, interruption=interruption, backoff=lambda _: 600.0)
    assert (len(lost.ran), outcome.interrupted, outcome.failed) == (1, True, {})
    with Store.open(tmp_path) as store:
        plan = plan_missing(spec, plan_of(spec), store, fingerprint)
    assert {item.state for item in plan.items} == {State.MISSING}


def test_two_runners_share_the_work_and_do_nothing_twice(tmp_path: Path) -> None:
    class Slow(Instant):
        async def run(self, planned: Any, **options: Any) -> AttemptRecord:
            await asyncio.sleep(random.uniform(0, 0.02))
            return await super().run(planned, **options)

    async def both(spec: ExperimentSpec, store: Store, one: Instant, other: Instant) -> list[Outcome]:
        options: dict[str, Any] = {"judge": NoJudge(), "poll_s": 0.01}
        return await asyncio.gather(
            run_experiment(spec, store, machinery=one.machinery(), progress=lines(), **options),
            run_experiment(spec, store, machinery=other.machinery(), progress=lines(), **options),
        )

    spec = spec_of(tmp_path, problems=("p03", "p21", "p28", "p49", "p61", "p72"))
    one, other = Slow(), Slow()
    with Store.open(tmp_path, create=True) as store:
        outcomes = asyncio.run(both(spec, store, one, other))
        assert len(list(store.attempts("small"))) == 24
    assert [outcome.remaining for outcome in outcomes] == [0, 0]
    assert one.ran and other.ran and not set(one.ran) & set(other.ran)


def test_the_files_of_a_finished_attempt_go_and_those_of_one_given_up_stay(tmp_path: Path) -> None:
    class Half(Instant):
        async def run(self, planned: Any, **options: Any) -> AttemptRecord:
            record = await super().run(planned, **options)
            if planned.problem == "p03":
                raise InfrastructureFault("lost")
            return record

    run(spec_of(tmp_path), Half())
    left = {path.parent.name for path in (tmp_path / "work" / "small").glob("*/left behind")}
    assert left == {"p03__tirx__vendor__model__0__solo", "p03__triton__vendor__model__0__solo"}
