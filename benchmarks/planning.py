"""How long a look at a very large plan takes, and how much memory: `python -m benchmarks.planning`.

The experiment has 101,232 attempts: the benchmark's 74 problems, two DSLs and six models in the cross-DSL design, 57
times over. It is planned twice, each time in a fresh process: against nothing, and against a store that holds a record
of every second attempt, some of them stale. Timed is what `mkb run --dry-run` does between reading the file and
printing: the plan, how each of its attempts stands, the counts, the reasons and the cost estimate. The fingerprints of
all tasks are computed for real.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import insert

from metakernelbench.attempts.attempt import fingerprint
from metakernelbench.experiments.estimate import estimate
from metakernelbench.experiments.loading import open_store
from metakernelbench.experiments.plan import Freshness, plan_missing, plan_of
from metakernelbench.experiments.planned import PlannedAttempt
from metakernelbench.experiments.spec import ExperimentSpec
from metakernelbench.grading.contract import CONTRACT_VERSION
from metakernelbench.problems.catalog import problem_ids
from metakernelbench.store import schema
from metakernelbench.store.artifacts import digest_of

ROOT = Path(__file__).parents[1]
USAGE = {"turns": 30, "input_tokens": 900_000, "cached_tokens": 700_000, "output_tokens": 50_000, "cost_usd": None}


def spec_of(folder: Path) -> ExperimentSpec:
    """The benchmark's experiment with 57 replicates."""
    return ExperimentSpec.model_validate(
        {
            "name": "planning",
            "design": "cross-dsl",
            "problems": tuple(problem_ids()),
            "dsls": ("cute", "tirx"),
            "models": tuple(f"openai/gpt-4o-{number}" for number in range(1, 7)),
            "replicates": 57,
            "store": str(folder / "store"),
        }
    )


def fill(spec: ExperimentSpec) -> None:
    """Records of every second attempt, written past `save_attempt`, whose artifacts would take hours."""
    with open_store(spec, create=True) as store, store._database.writing() as connection:
        connection.execute(insert(schema.attempts), list(rows(spec)))


def rows(spec: ExperimentSpec) -> Iterator[dict[str, Any]]:
    """What the planner reads of a record. Every tenth is of a task that has changed since."""
    freshness = Freshness(spec.attempt, fingerprint)
    for number, attempt in enumerate(plan_of(spec).attempts):
        if number % 2 == 0:
            yield {
                "experiment": spec.name,
                "key": attempt.key,
                "task": freshness.task(attempt) if number % 10 else "of another task",
                "attached": None if attempt.source is None else digest_of(attempt.source),
                "contract_version": CONTRACT_VERSION,
                "ended": "completed",
                "passed": True,
                "speedup": 2.0,
                "skill": skill_of(attempt),
                "record": json.dumps({"usage": USAGE}),
                "started_at": "2026-01-01T00:00:00+00:00",
                "finished_at": "2026-01-01T00:00:00+00:00",
            }


def skill_of(attempt: PlannedAttempt) -> str:
    """A digest that stands for a skill."""
    return digest_of(attempt.key)


def plan(folder: Path, *, with_store: bool) -> dict[str, Any]:
    """Time one look."""
    spec = spec_of(folder)
    begun, cpu = time.monotonic(), time.process_time()
    store = open_store(spec) if with_store else None
    looked = plan_missing(spec, plan_of(spec), store, fingerprint)
    counts = looked.counts()
    estimate(looked, store)
    return {
        "attempts": len(looked.items),
        "states": {kind: {state.value: number for state, number in c.items()} for kind, c in counts.items()},
        "wall_s": round(time.monotonic() - begun, 2),
        "cpu_s": round(time.process_time() - cpu, 2),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "cores": os.cpu_count(),
    }


def main() -> None:
    """Measure in fresh processes, or be one of them."""
    if len(sys.argv) == 3:
        print(json.dumps(plan(Path(sys.argv[1]), with_store=sys.argv[2] == "store")))
        return
    with tempfile.TemporaryDirectory(prefix="mkb-planning-") as folder:
        fill(spec_of(Path(folder)))
        for against in ("nothing", "store"):
            command = [sys.executable, "-m", "benchmarks.planning", folder, against]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
            print(json.dumps({"against": against, **json.loads(done.stdout)}, indent=2))


if __name__ == "__main__":
    main()
