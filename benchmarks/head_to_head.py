"""How far the ratio of a file with its own copy is from 1: head to heads, each in a session with fresh workers.

    python benchmarks/head_to_head.py p21:cute --repetitions 10 --out head_to_head.jsonl

Prints a line a repetition: the ratio with its interval, and beside it the ratio of the two medians, for comparison. The
file gets a line each: the whole result, and every timed draw with all its clocks. One verifier serves all; about 10 s a
repetition on a GPU where calls are short.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

import tree

from metakernelbench.errors import InfrastructureFault
from metakernelbench.grading.client import VerifierProcess
from metakernelbench.grading.head_to_head import Entrant


def main() -> None:
    asked = parsed()
    for case in asked.cases:
        problem, dsl = case.split(":")
        source = (tree.ROOT / "witnesses" / dsl / f"{problem}.py").read_bytes()
        ratios = []
        with VerifierProcess() as verifier:
            verifier.start_ahead(dsl, asked.device)
            for number in range(1, asked.repetitions + 1):
                started = time.monotonic()
                try:
                    result = verifier.head_to_head(
                        problem, [Entrant(dsl, source)] * 2, workload=asked.workload, device=asked.device
                    )
                except InfrastructureFault as fault:
                    print(f"{case} {number}: no result: {fault.message}", flush=True)
                    continue
                draws = verifier.profile.to_dict()["draws"] if verifier.profile else []
                with asked.out.open("a") as file:
                    line = {"case": case, "number": number, "result": dataclasses.asdict(result), "draws": draws}
                    file.write(json.dumps(line) + "\n")
                pair = result.pair(0, 1)
                first, second = (verdict.timing for verdict in result.verdicts)
                if pair is None or first is None or second is None:
                    print(f"{case} {number}: not timed: {[v.code for v in result.verdicts]}", flush=True)
                    continue
                ratios.append(pair.ratio)
                medians = first.implementation_median_ms / second.implementation_median_ms
                print(
                    f"{case} {number}: ratio {pair.ratio:.4f} [{pair.low:.4f}, {pair.high:.4f}], of medians "
                    f"{medians:.4f}; {time.monotonic() - started:.1f} s",
                    flush=True,
                )
        if ratios:
            farthest = max(max(ratio, 1 / ratio) for ratio in ratios) - 1
            print(f"{case}: farthest from 1 of {len(ratios)}: {farthest:.1%}", flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How far the ratio of a file with its own copy is from 1.")
    parser.add_argument("cases", nargs="+", metavar="PROBLEM:DSL", help="witnesses, such as p21:cute")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--workload", help="full on a GPU, else smoke")
    parser.add_argument("--out", type=Path, default=Path("head_to_head.jsonl"), help="file to append to")
    asked = parser.parse_args()
    asked.workload = asked.workload or ("full" if asked.device == "cuda" else "smoke")
    return asked


if __name__ == "__main__":
    main()
