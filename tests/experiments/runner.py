"""`python -m tests.experiments.runner FOLDER LOG [SECONDS]`: runs a small experiment with attempts that are instant or
last so long, and writes the key of each that has run to its end into LOG. Tests start it to kill and interrupt it."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path
from typing import Any

from metakernelbench.attempts.record import AttemptRecord
from metakernelbench.errors import MkbError
from metakernelbench.experiments.interruption import Interruption
from metakernelbench.experiments.run import run_experiment
from metakernelbench.store.store import Store
from tests.experiments.support import Instant, NoJudge, lines, spec_of

PROBLEMS = ("p03", "p21", "p28", "p49", "p61", "p72")


async def main(folder: Path, log: Path, seconds: float) -> int:
    class Logged(Instant):
        async def run(self, planned: Any, **options: Any) -> AttemptRecord:
            await asyncio.sleep(seconds)
            record = await super().run(planned, **options)
            with log.open("a") as file:
                file.write(f"{planned.key}\n")
            # Large and incompressible, so that a small disk fills up.
            return record.model_copy(
                update={"trajectory": {"steps": [random.Random(planned.key).randbytes(20_000).hex()]}}
            )

    print("started", flush=True)
    interruption = Interruption(lambda times: print(f"interrupted {times}", flush=True))
    with Store.open(folder, create=True) as store, interruption.on_signals():
        outcome = await run_experiment(
            spec_of(folder, problems=PROBLEMS),
            store,
            judge=NoJudge(),
            progress=lines(),
            machinery=Logged().machinery(),
            interruption=interruption,
            backoff=lambda _: 0.05,
            poll_s=0.05,
        )
    return 130 if outcome.interrupted else min(outcome.remaining, 3)


if __name__ == "__main__":
    arguments = [*sys.argv[1:], "0"]
    try:
        code = asyncio.run(main(Path(arguments[0]), Path(arguments[1]), float(arguments[2])))
    except MkbError as error:
        print(error.message, error.hint, flush=True)
        code = 2
    os._exit(code)
