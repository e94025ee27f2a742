"""How far gradings of one unchanged file lie apart: each in fresh processes, one after the other.

    python benchmarks/noise.py p28:cute p21:cute --gradings 10 --out noise.jsonl

Prints a line a grading and, for each case, the spread (largest less smallest, over the median) of the speedup and of
the two medians that it is made of. The file gets a line a grading as soon as it is there: the verdict, and every timed
draw with all its clocks, so that other estimates can be tried on the same calls later.

The processes of the next gradings start while nothing is graded (`--ahead`), which costs no fidelity: they are as
fresh. About 8 s a grading on a GPU where calls are short.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import tree

from metakernelbench.errors import InfrastructureFault
from metakernelbench.grading.client import VerifierProcess
from metakernelbench.grading.verdict import Verdict


def main() -> None:
    asked = parsed()
    for case in asked.cases:
        problem, dsl = case.split(":")
        source = (tree.ROOT / "witnesses" / dsl / f"{problem}.py").read_bytes()
        verdicts = []
        for number, verifier in enumerate(fresh_verifiers(asked.gradings, dsl, asked.device, asked.ahead), 1):
            started = time.monotonic()
            try:
                verdict = verifier.grade(problem, source, dsl, workload=asked.workload, device=asked.device)
            except InfrastructureFault as fault:
                print(f"{case} {number}: no verdict: {fault.message}", flush=True)
                continue
            seconds = time.monotonic() - started
            keep(asked.out, {"case": case, "number": number, "wall_s": seconds}, verdict, verifier)
            print(f"{case} {number}: {told(verdict)}; {seconds:.1f} s", flush=True)
            verdicts.append(verdict)
        summarise(case, [verdict for verdict in verdicts if verdict.timing is not None])


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How far gradings of one unchanged file lie apart.")
    parser.add_argument("cases", nargs="+", metavar="PROBLEM:DSL", help="witnesses to grade, such as p28:cute")
    parser.add_argument("--gradings", type=int, default=10, help="of each witness (10)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--workload", help="full on a GPU, else smoke")
    parser.add_argument("--out", type=Path, default=Path("noise.jsonl"), help="file to append to (noise.jsonl)")
    parser.add_argument("--ahead", type=int, default=max(1, (os.cpu_count() or 2) // 3), help="verifiers started ahead")
    asked = parser.parse_args()
    asked.workload = asked.workload or ("full" if asked.device == "cuda" else "smoke")
    return asked


def fresh_verifiers(count: int, dsl: str, device: str, ahead: int) -> Iterator[VerifierProcess]:
    """One verifier after the other, each ended before the next is given out; up to `ahead` are started together, and
    nothing is given out before they had time to import what they need."""
    for first in range(0, count, ahead):
        batch = [VerifierProcess() for _ in range(min(ahead, count - first))]
        for verifier in batch:
            verifier.start_ahead(dsl, device)
        for verifier in batch:
            verifier.await_start()
        for verifier in batch:
            with verifier:
                yield verifier


def keep(path: Path, what: dict[str, object], verdict: Verdict, verifier: VerifierProcess) -> None:
    draws = verifier.profile.to_dict()["draws"] if verifier.profile else []
    with path.open("a") as file:
        file.write(json.dumps({**what, "verdict": dataclasses.asdict(verdict), "draws": draws}) + "\n")


def told(verdict: Verdict) -> str:
    timing = verdict.timing
    if timing is None:
        return f"{verdict.code}: {verdict.findings[0].message}"
    low, high = timing.speedup_interval or (0.0, 0.0)
    return (
        f"speedup {timing.speedup:.3f} [{low:.3f}, {high:.3f}], "
        f"implementation {timing.implementation_median_ms:.5f} ms, eager {timing.eager_median_ms:.5f} ms"
    )


def spread(values: Sequence[float]) -> str:
    return f"{(max(values) - min(values)) / median(values):.1%}"


def summarise(case: str, verdicts: Sequence[Verdict]) -> None:
    timings = [verdict.timing for verdict in verdicts if verdict.timing is not None]
    if not timings:
        print(f"{case}: nothing was timed", flush=True)
        return
    print(
        f"{case}: spread over {len(timings)} gradings: speedup {spread([t.speedup for t in timings])}, "
        f"implementation {spread([t.implementation_median_ms for t in timings])}, "
        f"eager {spread([t.eager_median_ms for t in timings])}",
        flush=True,
    )


if __name__ == "__main__":
    main()
