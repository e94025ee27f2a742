"""An experiment on PostgreSQL: runners share it, and a server that goes away in the middle loses nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from metakernelbench.attempts.record import AttemptRecord
from metakernelbench.experiments.plan import plan_of
from metakernelbench.experiments.run import Outcome, run_experiment
from metakernelbench.experiments.spec import ExperimentSpec
from metakernelbench.store.store import Store
from tests.experiments.support import Instant, NoJudge, lines, outcome_of, spec_of
from tests.postgresql import Server


async def run(spec: ExperimentSpec, instant: Instant) -> Outcome:
    with Store.open(spec.store, folder=Path(spec.artifacts or ""), create=True) as store:
        return await run_experiment(
            spec, store, judge=NoJudge(), progress=lines(), machinery=instant.machinery(), poll_s=0.02
        )


def spec_on(server: Server, folder: Path) -> ExperimentSpec:
    return spec_of(folder, problems=("p03", "p21", "p28"), store=server.new_database(), artifacts=str(folder))


def test_two_runners_share_an_experiment_and_repeat_nothing(postgresql: Server, tmp_path: Path) -> None:
    class Slow(Instant):
        async def run(self, planned: Any, **options: Any) -> AttemptRecord:
            await asyncio.sleep(0.02)
            return await super().run(planned, **options)

    spec, one, other = spec_on(postgresql, tmp_path), Slow(), Slow()

    async def both() -> list[Outcome]:
        return await asyncio.gather(run(spec, one), run(spec, other))

    outcomes = asyncio.run(both())
    assert [outcome.remaining for outcome in outcomes] == [0, 0]
    ran = one.ran + other.ran
    assert len(set(ran)) == len(ran) and one.ran and other.ran
    with Store.open(spec.store, folder=tmp_path) as store:
        assert set(outcome_of(store, "small")) == {attempt.key for attempt in plan_of(spec).attempts}


def test_a_server_that_goes_away_in_the_middle_loses_nothing(postgresql: Server, tmp_path: Path) -> None:
    class Interrupting(Instant):
        async def run(self, planned: Any, **options: Any) -> AttemptRecord:
            record = await super().run(planned, **options)
            if len(self.ran) == 3:
                postgresql.stop()
                asyncio.get_running_loop().call_later(0.5, postgresql.start)
            return record

    spec, instant = spec_on(postgresql, tmp_path), Interrupting()
    outcome = asyncio.run(run(spec, instant))
    assert outcome.remaining == 0 and not outcome.failed
    assert len(set(instant.ran)) == len(instant.ran)
    with Store.open(spec.store, folder=tmp_path) as store:
        assert set(outcome_of(store, "small")) == {attempt.key for attempt in plan_of(spec).attempts}
