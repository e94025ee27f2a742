"""What a whole verdict costs, beside the work that the contract asks of whoever grades.

    python benchmarks/cost.py p28:cute p21:cute --out cost.jsonl

The mandated work is done here by itself, in one process, without a worker, a check or a clock: inputs, references and
anchors of the correctness draws, warm-up and timed calls of both sides on fresh inputs, anchors of the rechecked calls.
Then the verdict is asked for, in fresh processes, from the asking until all of them have ended. At most 1.3 times the
mandated work and 5 s for process starts and imports are wanted; the exit code is 1 where a case takes longer.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import tree
import verifier_environment  # noqa: F401

from metakernelbench.grading.client import VerifierProcess
from metakernelbench.grading.compare import anchor_of, reference_numerics
from metakernelbench.grading.contract import CONTRACT
from metakernelbench.grading.profile import STARTS
from metakernelbench.problems import catalog
from metakernelbench.problems.problem import Problem, copies

FACTOR, STARTS_S = 1.3, 5.0


def main() -> None:
    asked = parsed()
    within = [report(case, asked) for case in asked.cases]
    sys.exit(0 if all(within) else 1)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What a whole verdict costs, beside the mandated work.")
    parser.add_argument("cases", nargs="+", metavar="PROBLEM:DSL", help="witnesses, such as p28:cute")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--workload", help="full on a GPU, else smoke")
    parser.add_argument("--out", type=Path, default=Path("cost.jsonl"), help="file to append to (cost.jsonl)")
    asked = parser.parse_args()
    asked.workload = asked.workload or ("full" if asked.device == "cuda" else "smoke")
    return asked


def report(case: str, asked: argparse.Namespace) -> bool:
    """Measure and print one case; whether it costs no more than it may."""
    problem, dsl = case.split(":")
    kernel = tree.ROOT / "witnesses" / dsl / f"{problem}.py"
    began = time.monotonic()
    with VerifierProcess() as verifier:
        verdict = verifier.grade(problem, kernel.read_bytes(), dsl, workload=asked.workload, device=asked.device)
    whole_s = time.monotonic() - began
    assert verifier.profile is not None
    if not verdict.passed:
        print(f"{case}: {verdict.code}: {verdict.findings[0].message}", flush=True)
        return False
    parts = mandated(catalog.load(problem), kernel, asked.workload, asked.device)
    mandated_s, starts_s = sum(parts.values()), verifier.profile.part(STARTS)
    allowed_s = FACTOR * mandated_s + STARTS_S
    print(
        f"{case}: verdict {whole_s:.2f} s, of which starts and imports {starts_s:.2f} s; mandated {mandated_s:.2f} s; "
        f"allowed {allowed_s:.2f} s; without starts {(whole_s - starts_s) / mandated_s:.2f} times the mandated",
        flush=True,
    )
    for title, seconds in (("mandated", parts), ("verdict", verifier.profile.seconds)):
        print(f"  {title}: " + ", ".join(f"{name} {spent:.2f}" for name, spent in seconds.items()), flush=True)
    line = {"case": case, "whole_s": whole_s, "mandated": parts, "profile": verifier.profile.seconds}
    with asked.out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    return whole_s <= allowed_s


def mandated(problem: Problem, kernel: Path, workload: str, device: str) -> dict[str, float]:
    """Seconds of the work that a verdict needs, by what is done."""
    parts: dict[str, float] = {}

    @contextmanager
    def counted(name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        if device == "cuda":
            torch.cuda.synchronize()
        parts[name] = parts.get(name, 0.0) + time.monotonic() - start

    def draw() -> tuple[Any, ...]:
        with counted("inputs"), reference_numerics():
            return problem.draw(workload, 1, torch.device(device))

    def call(name: str, function: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
        own = copies(inputs)
        with counted(name):
            function(*own)

    solve = imported(kernel)
    torch.zeros(1, device=device)
    for _ in range(CONTRACT.correctness_draws):
        inputs = draw()
        with reference_numerics():
            call("references", problem.reference, inputs)
            with counted("anchors"):
                anchor_of(problem.reference, inputs)
        call("implementation", solve, inputs)
    for _ in range(CONTRACT.warmup_calls + CONTRACT.timed_calls):
        inputs = draw()
        with reference_numerics():
            call("eager calls", problem.reference, inputs)
        call("implementation", solve, inputs)
    for _ in range(CONTRACT.rechecked_calls):
        with reference_numerics(), counted("anchors"):
            anchor_of(problem.reference, inputs)
    return parts


def imported(kernel: Path) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location("kernel", kernel)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernel"] = module
    spec.loader.exec_module(module)
    solve: Callable[..., Any] = module.solve
    return solve


if __name__ == "__main__":
    main()
