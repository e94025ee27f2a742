"""How much the machinery itself costs at the benchmark's scale: `python -m benchmarks.scale`.

Runs the benchmark's own experiment, 1,776 attempts of the cross-DSL design, with attempts and judges that answer at
once, so that all the time that passes is ours: planner, store, leases, retries. One in twenty attempts and gradings is
lost and tried again. In the middle, one of the processes is killed with SIGKILL and another takes its place. At the end
every planned attempt must have exactly one record, and none that was finished may have run again.

    python -m benchmarks.scale                                          # one process, SQLite
    python -m benchmarks.scale --processes 8 --database postgresql://…  # eight runners, one PostgreSQL server
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from io import StringIO
from pathlib import Path
from typing import Any

from benchmarks.attempts import InstantAttempts, InstantJudge
from rich.console import Console
from sqlalchemy import func, select

from metakernelbench.experiments.loading import open_store
from metakernelbench.experiments.plan import plan_of
from metakernelbench.experiments.progress import Lines
from metakernelbench.experiments.run import run_experiment
from metakernelbench.experiments.spec import Concurrency, ExperimentSpec
from metakernelbench.problems.catalog import problem_ids
from metakernelbench.store.schema import attempts
from metakernelbench.store.store import Store

ROOT = Path(__file__).parents[1]
FAULT_SHARE = 0.05
SANDBOXES = 16
"""Attempts at once, of each runner."""


def spec_of(folder: Path, database: str | None, problems: int, models: int) -> ExperimentSpec:
    """The benchmark's own experiment, or a part of it."""
    return ExperimentSpec.model_validate(
        {
            "name": "scale",
            "design": "cross-dsl",
            "problems": tuple(problem_ids()[:problems]),
            "dsls": ("cute", "tirx"),
            "models": tuple(f"vendor/model-{number}" for number in range(1, models + 1)),
            "concurrency": Concurrency(sandboxes=SANDBOXES, judges=4),
            "store": database or str(folder / "store"),
            "artifacts": str(folder / "store") if database else None,
        }
    )


async def work(spec: ExperimentSpec, log: Path) -> int:
    """One runner; returns how many attempts remain."""
    with open_store(spec, create=True) as store:
        outcome = await run_experiment(
            spec,
            store,
            judge=InstantJudge(FAULT_SHARE),
            progress=Lines(Console(file=StringIO())),
            machinery=InstantAttempts(log, FAULT_SHARE).machinery(),
            backoff=lambda _: 0.1,
        )
    return outcome.remaining


class Runners:
    """The processes that share the experiment."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self._folder = folder
        self._arguments = arguments
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """One more runner, with a log of its own."""
        log = self._folder / f"log-{len(self.processes)}"
        options = ["--problems", str(self._arguments.problems), "--models", str(self._arguments.models)]
        if self._arguments.database:
            options += ["--database", self._arguments.database]
        command = [sys.executable, "-m", "benchmarks.scale", "--work", str(self._folder), "--log", str(log), *options]
        self.processes.append(subprocess.Popen(command, cwd=ROOT))

    def finished(self) -> list[list[str]]:
        """Runner by runner, the keys of the attempts that have come to their end."""
        logs = [self._folder / f"log-{number}" for number in range(len(self.processes))]
        return [log.read_text().split() if log.exists() else [] for log in logs]

    def wait(self) -> None:
        """Until all have ended; raises where one that nobody killed did not finish the experiment."""
        codes = [process.wait() for process in self.processes]
        if set(codes) - {0, -signal.SIGKILL}:
            raise SystemExit(f"runners ended with {codes}")


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run it all and look at what is left."""
    spec = spec_of(folder, arguments.database, arguments.problems, arguments.models)
    planned = len(plan_of(spec).attempts)
    runners, begun = Runners(folder, arguments), time.monotonic()
    for _ in range(arguments.processes):
        runners.start()
    while sum(map(len, runners.finished())) < planned / 2:
        if all(process.poll() is not None for process in runners.processes):
            raise SystemExit("the runners have ended before one could be killed")
        time.sleep(0.2)
    runners.processes[0].kill()
    runners.start()
    runners.wait()
    wall = time.monotonic() - begun
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "attempts": planned,
        "processes": arguments.processes,
        "database": "postgresql" if arguments.database else "sqlite",
        "cores": os.cpu_count(),
        "wall_s": round(wall, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "peak_mb_of_one_process": round(used.ru_maxrss / 1024),
        **looked_at(spec, runners.finished()),
    }


def looked_at(spec: ExperimentSpec, finished: list[list[str]]) -> dict[str, Any]:
    """What is left. Raises where something is lost, or has run again that was finished; the first runner was killed."""
    planned = {attempt.key for attempt in plan_of(spec).attempts}
    with open_store(spec) as store:
        standings, faults = store.standings(spec.name), store.faults(spec.name)
        leases, readable = store.leases.held(spec.name), sum(1 for _ in store.attempts(spec.name))
        replaced = _replaced(store)
    ran = Counter(key for keys in finished for key in keys)
    repeated = [key for key, times in ran.items() if times > 1]
    in_flight = [key for key in repeated if ran[key] == 2 and key in finished[0]]
    skipped = sum(standing.ended == "skipped" for standing in standings.values())
    result = {
        "records": len(standings),
        "skipped": skipped,
        "faults_injected_and_retried": len(faults),
        "given_up": sum(fault.gave_up for fault in faults),
        "ended_but_not_yet_kept_at_the_kill": len(in_flight),
        "run_again_for_no_reason": len(repeated) - len(in_flight),
        "records_replaced": replaced,
        "leases_left": len(leases),
    }
    whole = set(standings) == planned and readable == len(planned) == len(ran) + skipped
    if not whole or len(repeated) > len(in_flight) or len(in_flight) > SANDBOXES or replaced or leases:
        raise SystemExit(f"something was lost or run twice: {json.dumps(result)}")
    return result


def _replaced(store: Store) -> int:
    """Records that a later one has taken the place of: attempts that were finished and ran again."""
    query = select(func.count()).select_from(attempts).where(attempts.c.superseded_at.is_not(None))
    with store._database.reading() as connection:
        return connection.execute(query).scalar_one()


def main() -> None:
    """Measure, or be one of the runners that are measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--database", help="URL of an empty PostgreSQL database; SQLite in a temporary folder without")
    parser.add_argument("--problems", type=int, default=74)
    parser.add_argument("--models", type=int, default=6)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is not None:
        spec = spec_of(arguments.work, arguments.database, arguments.problems, arguments.models)
        sys.exit(0 if asyncio.run(work(spec, arguments.log)) == 0 else 3)
    with tempfile.TemporaryDirectory(prefix="mkb-scale-") as folder:
        print(json.dumps(measure(Path(folder), arguments), indent=2))


if __name__ == "__main__":
    main()
