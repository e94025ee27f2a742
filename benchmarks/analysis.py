"""How long the whole analysis of a full study takes, and how much memory: 6 models, 74 problems, 888 comparisons.

    python -m benchmarks.analysis                         # from records in memory: frames, every table, every caveat
    python -m benchmarks.analysis --store runs/simulated  # from a store that `mkb simulate` has written
    python -m benchmarks.analysis --pictures              # and every picture as SVG

Runs in a fresh process on two cores and prints seconds of the clock, seconds of the processors and the largest resident
set, part by part; imports count. The study is simulated: its numbers mean nothing, its size is the benchmark's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CORES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, help="read this store's experiment `simulated`")
    parser.add_argument("--pictures", action="store_true", help="draw the pictures as well")
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["POLARS_MAX_THREADS"] = str(CORES)
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=measured, args=(asked.store, asked.pictures))
    process.start()
    process.join()
    raise SystemExit(process.exitcode)


def measured(store: Path | None, pictures: bool) -> None:
    """Everything of interest, in a process that has done nothing else."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    study = made() if store is None else None  # before the clock starts: chance is no part of the analysis
    parts: dict[str, tuple[float, float]] = {}
    with timed(parts, "imports"):
        from metakernelbench.analysis import caveats, figures, frames, registry, resampling  # noqa: PLC0415
        from metakernelbench.store.store import Store  # noqa: PLC0415
    with timed(parts, "frames"):
        if study is not None:
            found = frames.frames_of(*study)
        else:
            with Store.open(str(store)) as opened:
                found = frames.frames_from_store(opened, "simulated")
    with timed(parts, "tables"):
        tables = registry.tables(found)
        notes = caveats.caveats(found)
    if pictures:
        with timed(parts, "pictures"):
            drawn = [figures.svg(picture.chart) for picture in figures.pictures(found)]
        print(f"{len(drawn)} pictures, {sum(map(len, drawn)) / 1e6:.1f} MB of SVG")
    counts = (("bootstrap", resampling.DRAWS), ("sign-flip", resampling.FLIP_DRAWS), ("swap", resampling.SWAP_DRAWS))
    print(f"{found.main.height} comparisons, {len(tables)} tables, {len(notes)} caveats")
    print("draws: " + ", ".join(f"{draws:,} {name}" for name, draws in counts))
    for name, (wall, cpu) in parts.items():
        print(f"{name:10s} {wall:6.2f} s   {cpu:6.2f} s of processors")
    wall, cpu = (sum(numbers) for numbers in zip(*parts.values(), strict=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{'all':10s} {wall:6.2f} s   {cpu:6.2f} s of processors   {peak:.0f} MB at most")


def made() -> tuple[Any, Any]:
    """A full study without texts."""
    from metakernelbench.analysis.simulate import World, simulate  # noqa: PLC0415

    return simulate(World(effect=0.1, problem_effect=0.1), seed=1)


@contextmanager
def timed(parts: dict[str, tuple[float, float]], name: str) -> Iterator[None]:
    """Keep how long a part took."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    parts[name] = time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    main()
