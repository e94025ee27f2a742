"""How fast each core of this machine is, again and again: a neighbour on the other half of a core shows.

    python benchmarks/cores.py --sweeps 12 --out cores.jsonl

Goes through all cores in an order of chance, a few tenths of a millisecond on each. The file gets a line a trial: when
it was in seconds, on which core, and how often a small loop turned there in a millisecond.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path
from statistics import quantiles

import tree  # noqa: F401

from metakernelbench.grading.cores import pace

_TRIAL_NS = 400_000


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast each core of this machine is, again and again.")
    parser.add_argument("--sweeps", type=int, default=12, help="through all cores (12)")
    parser.add_argument("--out", type=Path, default=Path("cores.jsonl"), help="file to write (cores.jsonl)")
    asked = parser.parse_args()
    allowed, began = os.sched_getaffinity(0), time.monotonic()
    seen: dict[int, list[float]] = {core: [] for core in sorted(allowed)}
    with asked.out.open("w") as file:
        for _ in range(asked.sweeps):
            for core in random.sample(sorted(allowed), len(allowed)):
                os.sched_setaffinity(0, {core})
                seen[core].append(pace(_TRIAL_NS))
                line = {"at_s": round(time.monotonic() - began, 4), "core": core, "pace": round(seen[core][-1], 1)}
                file.write(json.dumps(line) + "\n")
    os.sched_setaffinity(0, allowed)
    for core, paces in seen.items():
        low, middle, high = quantiles(paces, n=4)
        print(f"core {core}: {low:.0f} {middle:.0f} {high:.0f} turns a millisecond (quartiles)")


if __name__ == "__main__":
    main()
