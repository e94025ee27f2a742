"""What an attempt is given of its source reaches it, decides whether its record is fresh, and may be waited for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from metakernelbench.annotation.labels import SkillLabels
from metakernelbench.annotation.rubric import rubric
from metakernelbench.attempts.record import AttemptRecord
from metakernelbench.experiments.plan import State, plan_missing, plan_of
from metakernelbench.experiments.run import Outcome, run_experiment
from metakernelbench.experiments.spec import ExperimentSpec
from metakernelbench.store.annotations import Answer
from metakernelbench.store.artifacts import digest_of
from metakernelbench.store.store import Store
from tests.annotation.test_statements import SKILL, labelled
from tests.experiments.support import Instant, NoJudge, fingerprint, lines, spec_of

SOLO = "p28/tirx/vendor/model/0/solo"


class Telling(Instant):
    """Attempts that leave a known skill and a known trajectory, and no kernel in Triton."""

    async def run(self, planned: Any, **options: Any) -> AttemptRecord:
        record = await super().run(planned, **options)
        trajectory = {"steps": [{"source": "agent", "message": f"I am {planned.key}."}]}
        kernel = None if planned.dsl == "triton" else record.kernel
        return record.model_copy(update={"skill": SKILL, "trajectory": trajectory, "kernel": kernel})


def run(spec: ExperimentSpec, attempts: Instant) -> Outcome:
    with Store.open(spec.store, create=True) as store:
        return asyncio.run(
            run_experiment(
                spec,
                store,
                judge=NoJudge(),
                progress=lines(),
                machinery=attempts.machinery(),
                backoff=lambda _: 0.0,
                poll_s=0.02,
            )
        )


def states(spec: ExperimentSpec) -> dict[str, State]:
    with Store.open(spec.store) as store:
        plan = plan_missing(spec, plan_of(spec), store, fingerprint)
    return {item.attempt.key: item.state for item in plan.items}


def annotated(folder: Path, category: str, *quotes: str) -> None:
    labels = SkillLabels(statements=tuple(labelled(SKILL, category, *quotes)))
    with Store.open(folder) as store:
        store.annotations.save(
            [
                Answer(
                    question="skill",
                    subject=digest_of(SKILL),
                    request="1",
                    annotator="vendor/annotator",
                    pass_number=1,
                    words_version=rubric().version,
                    prompt_version="1",
                    temperature=0.0,
                    labels=labels.model_dump_json(),
                    answered_at="2026-01-01T00:00:00+00:00",
                )
            ]
        )


def test_an_attempt_is_given_what_its_design_says(tmp_path: Path) -> None:
    spec, attempts = spec_of(tmp_path, design=("content",), problems=("p28",)), Telling()
    outcome = run(spec, attempts)
    given = attempts.skills
    target = "p28/triton/vendor/model/0"
    assert given[f"{target}/from-tirx"] == SKILL
    assert given[f"{target}/from-tirx-implementation"] == "```python\n" + f"# {SOLO}\n" * 300 + "```"
    assert given[f"{target}/from-tirx-trajectory"] == f"Step 1\n\nI am {SOLO}."
    assert given[f"{target}/again"] is None
    assert outcome.skipped == ["p28/tirx/vendor/model/0/from-triton-implementation"]
    again = Telling()
    assert run(spec, again).remaining == 0
    assert again.ran == []


def test_only_what_was_given_makes_a_record_stale(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, design=("content",), problems=("p28",))
    run(spec, Telling())
    with Store.open(tmp_path) as store:
        record = store.attempt("small", SOLO)
        assert record is not None
        changed = record.model_copy(update={"kernel": "# another\n"})
        planned = plan_of(spec).attempts[0]
        store.save_attempt("small", planned, changed, task=fingerprint(planned, spec.attempt, None))
    stale = {key for key, state in states(spec).items() if state is State.STALE}
    assert stale == {"p28/triton/vendor/model/0/from-tirx-implementation"}


def test_a_part_of_a_skill_waits_for_its_annotation_and_everything_else_runs(tmp_path: Path) -> None:
    options = {"ablate": {"categories": ["work_partition", "workload_fact"]}}
    spec = spec_of(tmp_path, design=("ablate",), problems=("p28",), options=options)
    outcome = run(spec, Telling())
    waiting = {key for key, state in states(spec).items() if state is State.WAITING}
    assert len(waiting) == 4 == outcome.remaining
    assert set(outcome.waiting) == waiting
    assert outcome.failed == {}
    assert (
        f"the skill of `{SOLO}` is not annotated"
        in outcome.waiting["p28/triton/vendor/model/0/from-tirx-without-work_partition"]
    )

    annotated(tmp_path, "work_partition", "One worker takes several rows.")
    attempts = Telling()
    outcome = run(spec, attempts)
    part = "p28/triton/vendor/model/0/from-tirx-without-work_partition"
    assert sorted(attempts.ran) == sorted(
        [part, part.replace("triton", "x").replace("tirx", "triton").replace("x", "tirx")]
    )
    assert "One worker" not in str(attempts.skills[part])
    assert "One worker" in SKILL
    assert outcome.remaining == 0
    assert sorted(outcome.skipped) == sorted(key for key in waiting if key.endswith("without-workload_fact"))
