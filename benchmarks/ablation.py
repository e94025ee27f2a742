"""Which of the measures against noise matter: one worker's timed calls again and again, under each setting in turn.

    python benchmarks/ablation.py p28:cute p21:cute --rounds 4 --out ablation.jsonl

Every round makes a timing stage (fifty draws) under every setting, in an order of its own, so a drift meets all of them
alike. Prints, by setting, the medians of the stages and their spread; the file gets a line a stage with every draw.
About 10 s for each case to begin with, and a second a stage on a GPU where calls are short.

    all              what the verifier does: small work before each call, each process on a calm core of its own
    -warm            no small work
    -cores           every process where the system puts it
    -warm-cores
    all+random       either pair of buffers carries a worker's call, by chance
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import tree
import verifier_environment  # noqa: F401

from metakernelbench.dsls import dsl as dsls
from metakernelbench.grading import calls, cores, draws, transport
from metakernelbench.grading.contract import CONTRACT
from metakernelbench.grading.isolation import LIMITS
from metakernelbench.grading.stages import Order
from metakernelbench.grading.verifier import Verifier
from metakernelbench.grading.warming import WARMING_NS
from metakernelbench.problems import catalog

SETTINGS = ("all", "-warm", "-cores", "-warm-cores", "all+random")


def main() -> None:
    asked = parsed()
    verifier = Verifier()
    for case in asked.cases:
        problem, dsl = case.split(":")
        order = Order(
            problem=catalog.load(problem),
            plugin=dsls.load(dsl),
            kernel=(tree.ROOT / "witnesses" / dsl / f"{problem}.py").read_bytes(),
            workload=asked.workload,
            device=asked.device,
            final=False,
            contract=dataclasses.replace(CONTRACT, warmup_calls=3, timed_calls=asked.draws),
            limits=LIMITS,
        )
        with verifier._session([order], lambda _: None) as (grading,):
            if not grading.until_timing():
                print(f"{case}: {grading.verdict().findings}", flush=True)
                continue
            stages = partial(measure, case, grading, asked)
            summarise(case, [stages(*turn) for turn in turns(asked.rounds)])
    verifier.close()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Which of the measures against noise matter.")
    parser.add_argument("cases", nargs="+", metavar="PROBLEM:DSL", help="witnesses, such as p28:cute")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--draws", type=int, default=50, help="of a stage (50)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--workload", help="full on a GPU, else smoke")
    parser.add_argument("--out", type=Path, default=Path("ablation.jsonl"), help="file to append to")
    asked = parser.parse_args()
    asked.workload = asked.workload or ("full" if asked.device == "cuda" else "smoke")
    return asked


def turns(rounds: int) -> Iterator[tuple[int, str]]:
    for number in range(rounds):
        for setting in random.sample(SETTINGS, len(SETTINGS)):
            yield number, setting


def measure(case: str, grading: Any, asked: argparse.Namespace, number: int, setting: str) -> tuple[str, float, float]:
    """One timing stage under a setting: its name, and the medians of implementation and eager in milliseconds."""
    side = grading.side(again=False)
    with applied(setting):
        stage = grading.timed_calls([side])
        started = time.monotonic()
        stage.run()
    if side.fault is not None:
        raise SystemExit(f"{case}: {side.fault.finding.message}")
    own, eager = median(c.claimed_ms for c in side.clocks), median(stage.eager_ms)
    line = {
        "case": case,
        "round": number,
        "setting": setting,
        "started_s": started,
        "seconds": time.monotonic() - started,
        "draws": [dataclasses.asdict(draw) for draw in stage.trace],
    }
    with asked.out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(f"{case} {number} {setting}: implementation {own:.5f} ms, eager {eager:.5f} ms", flush=True)
    return setting, own, eager


@contextmanager
def applied(setting: str) -> Iterator[None]:
    """The verifier, changed so that it works under this setting."""
    kept = (calls._AWAKE_S, transport.choose_buffers, cores.CalmCores.settle)
    if "-warm" in setting:
        calls.WARMING_NS = draws.WARMING_NS = 0
        calls._AWAKE_S = 0.0
    if "-cores" in setting:
        cores.CalmCores.settle = lambda *_: None
    if "+random" in setting:
        transport.choose_buffers = random.choice
    try:
        yield
    finally:
        calls.WARMING_NS = draws.WARMING_NS = WARMING_NS
        calls._AWAKE_S, transport.choose_buffers, cores.CalmCores.settle = kept


def summarise(case: str, stages: list[tuple[str, float, float]]) -> None:
    for setting in SETTINGS:
        own = [o for name, o, _ in stages if name == setting]
        eager = [e for name, _, e in stages if name == setting]
        speedups = [e / o for o, e in zip(own, eager, strict=True)]
        spreads = ", ".join(
            f"{what} {median(values):.5g} ({(max(values) - min(values)) / median(values):.1%})"
            for what, values in (("implementation", own), ("eager", eager), ("speedup", speedups))
        )
        print(f"{case} {setting}: {spreads}", flush=True)


if __name__ == "__main__":
    main()
