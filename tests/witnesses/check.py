"""Runs a DSL's witnesses on the CPU, and prints for each what the contract says: `python -m tests.witnesses.check DSL`.

A process of its own, since what a DSL needs in its environment must be there before Python starts.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

from tests.problems.support import case

WITNESSES = Path(__file__).parents[2] / "witnesses"
SEEDS = (0, 1, 2)


def witness(dsl: str, problem: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel", WITNESSES / dsl / f"{problem}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(dsl: str) -> None:
    for path in sorted((WITNESSES / dsl).glob("p*.py")):
        solve = witness(dsl, path.stem).solve
        accepted = [case(path.stem, seed).accepts(solve) for seed in SEEDS]
        print(json.dumps({"problem": path.stem, "accepted": accepted}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
