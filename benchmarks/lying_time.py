"""Which lies about time pass? Submissions whose clock hides a known part of every call, and honest ones, in a row.

    python benchmarks/lying_time.py lies                        # on a CPU, at the smoke workload
    python benchmarks/lying_time.py lies --device cuda          # on a GPU, at the full workload
    python benchmarks/lying_time.py honest --gradings 100       # witnesses: none may be refused

A liar is a witness of p28 that goes on for a known time after its kernel and takes a known part of that off the clock
that its process reports. The contract refuses what is hidden beyond a tenth of the claim or the floor, whichever is
larger; what it allows on top for the noise of the machine is what this shows. A grading that the verifier gives up for
noise is tried again, as a judge does, and counted. One JSON object a grading goes to `--out`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import tree

from metakernelbench.errors import InfrastructureFault
from metakernelbench.grading.client import VerifierProcess
from metakernelbench.grading.contract import CONTRACT

_TRIES = 3
_CALLS_MS = {"cpu": (1.0, 10.0), "cuda": (0.1, 1.0)}
"""How long the liars' calls go on after their kernels."""
_SHARES = (0.02, 0.05, 0.08, 0.12, 0.15, 0.2, 0.3, 0.5)
"""What they hide, as a share of what they then claim."""

_LIAR = """
import warnings as _warnings

_modules = getattr(_warnings.catch_warnings()._module, "".join(["s", "ys"])).modules
_worker = _modules["metakernelbench.grading.worker"]
_true_clock = _modules["time"].perf_counter_ns
_hidden = [0]
_worker._clock = lambda: _true_clock() - _hidden[0]
_true_elapsed = torch.cuda.Event.elapsed_time
_modules["torch.cuda"].Event.elapsed_time = lambda self, end: _true_elapsed(self, end) - {hidden_ms!r}
_honest = solve


def solve(*inputs):
    end = _true_clock() + {busy_ns!r}
    result = _honest(*inputs)
    while _true_clock() < end:
        pass
    _hidden[0] += {hidden_ns!r}
    return result
"""


@dataclass(frozen=True)
class Grading:
    """One grading and what came of it."""

    case: str
    busy_ms: float
    hidden_ms: float
    """Taken off the clock in every call."""
    met: str
    message: str
    claimed_ms: float | None
    given_up: int
    """Tries that ended without a verdict before this one, for noise."""
    seconds: float
    draws: list[Any]
    """Every timed draw with all its clocks, so that other ways to compare them can be tried on the same calls."""


def main() -> None:
    asked = parsed()
    planned = lies(asked) if asked.what == "lies" else honest(asked)
    gradings = []
    with VerifierProcess() as verifier, asked.out.open("a", encoding="utf-8") as out:
        for case, dsl, problem, source, busy_ms, hidden_ms in planned:
            grading = graded(verifier, case, dsl, problem, source, busy_ms, hidden_ms, asked)
            gradings.append(grading)
            out.write(json.dumps(asdict(grading)) + "\n")
            out.flush()
            print(f"{case}: {grading.met} in {grading.seconds:.1f} s {grading.message}", flush=True)
    print()
    (table_of_lies if asked.what == "lies" else table_of_honest)(gradings, asked.device)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Which lies about time pass, and whether honest gradings do.")
    parser.add_argument("what", choices=("lies", "honest"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeat", type=int, default=2, help="gradings of each lie (2)")
    parser.add_argument("--shares", type=float, nargs="+", default=_SHARES, help="of the claims that lies hide")
    parser.add_argument("--gradings", type=int, default=100, help="of honest witnesses (100)")
    parser.add_argument("--problems", nargs="+", default=["p28", "p21", "p72", "p03", "p49"], help="of the witnesses")
    parser.add_argument("--dsl", default="tirx")
    parser.add_argument("--out", type=Path, default=Path("lying_time.jsonl"), help="file to append to")
    return parser.parse_args()


type Planned = tuple[str, str, str, str, float, float]
"""A grading to do: its name, DSL, problem, source, milliseconds that a call goes on for, and what it hides of them."""


def lies(asked: argparse.Namespace) -> Iterator[Planned]:
    """Liars of every share and length, one after the other."""
    witness = (tree.ROOT / "witnesses" / asked.dsl / "p28.py").read_text()
    for _ in range(asked.repeat):
        for busy_ms in _CALLS_MS[asked.device]:
            for share in asked.shares:
                hidden_ms = busy_ms * share / (1 + share)
                numbers = {"busy_ns": round(busy_ms * 1e6), "hidden_ns": round(hidden_ms * 1e6), "hidden_ms": hidden_ms}
                source = witness + _LIAR.format(**numbers)
                yield f"{busy_ms:g} ms hiding {hidden_ms:.3f}", asked.dsl, "p28", source, busy_ms, hidden_ms


def honest(asked: argparse.Namespace) -> Iterator[Planned]:
    """Witnesses in turn."""
    for problem in islice(cycle(asked.problems), asked.gradings):
        source = (tree.ROOT / "witnesses" / asked.dsl / f"{problem}.py").read_text()
        yield f"{problem} in {asked.dsl}", asked.dsl, problem, source, 0.0, 0.0


def graded(
    verifier: VerifierProcess,
    case: str,
    dsl: str,
    problem: str,
    source: str,
    busy_ms: float,
    hidden_ms: float,
    asked: argparse.Namespace,
) -> Grading:
    """One grading under the full contract, again where the machine was too noisy for a verdict."""
    start = time.monotonic()
    workload = "full" if asked.device == "cuda" else "smoke"
    met, message, claimed_ms, given_up = "no verdict", "", None, 0
    for _ in range(_TRIES):
        try:
            verdict = verifier.grade(problem, source.encode(), dsl, workload=workload, device=asked.device)
        except InfrastructureFault as fault:
            given_up, message = given_up + 1, fault.message
            continue
        met, message = verdict.code or "passed", verdict.findings[0].message if verdict.findings else ""
        claimed_ms = verdict.timing.implementation_median_ms if verdict.timing else None
        break
    draws = verifier.profile.to_dict()["draws"] if verifier.profile and met != "no verdict" else []
    seconds = time.monotonic() - start
    return Grading(case, busy_ms, hidden_ms, met, message, claimed_ms, given_up, seconds, draws)


def table_of_lies(gradings: list[Grading], device: str) -> None:
    """Refused and passed, by how much is hidden, and where the contract draws the line."""
    floor_ms = CONTRACT.clock_floor_cpu_ms if device == "cpu" else CONTRACT.clock_floor_ms
    by_case: dict[tuple[float, float], Counter[str]] = defaultdict(Counter)
    for grading in gradings:
        by_case[grading.busy_ms, grading.hidden_ms][grading.met] += 1
    print("| a call takes | it hides | of its claim | the contract allows | refused | passed | no verdict |")
    print("|---|---|---|---|---|---|---|")
    for (busy_ms, hidden_ms), met in sorted(by_case.items()):
        claim_ms = busy_ms - hidden_ms
        allowed_ms = max(CONTRACT.clock_tolerance * claim_ms, floor_ms)
        refused = met["clock-disagreement"]
        others = sum(met.values()) - refused - met["passed"]
        print(
            f"| {busy_ms:g} ms | {1e3 * hidden_ms:.0f} µs | {hidden_ms / claim_ms:.0%} | {1e3 * allowed_ms:.0f} µs | "
            f"{refused} | {met['passed']} | {others} |"
        )


def table_of_honest(gradings: list[Grading], _device: str) -> None:
    """Passes and refusals, by witness."""
    by_case: dict[str, Counter[str]] = defaultdict(Counter)
    for grading in gradings:
        by_case[grading.case][grading.met] += 1
    for case, met in sorted(by_case.items()):
        print(f"{case}: {dict(met)}")
    given_up = sum(grading.given_up for grading in gradings)
    passed = sum(grading.met == "passed" for grading in gradings)
    print(f"{len(gradings)} honest gradings: {passed} passed; tries given up for noise: {given_up}")


if __name__ == "__main__":
    main()
