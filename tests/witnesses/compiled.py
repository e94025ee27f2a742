"""Which witnesses are on record as having compiled: `python -m tests.witnesses.compiled` compiles all others.

What comes out of compiling depends on the witness and the versions of its DSL's packages, and takes seconds a witness.
So an entry stands for as long as neither changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metakernelbench.dsls.dsl import load

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "records" / "compiled.jsonl"
ARCHS = ("sm_90a", "sm_100a")
DSLS = ("cute", "tirx")


def witnesses(dsl: str) -> list[str]:
    """The problems that have a witness for a GPU in a DSL."""
    paths = sorted((ROOT / "witnesses" / dsl).glob("p*.py"))
    return [path.stem for path in paths if "def compile_for(" in path.read_text()]


def on_record(dsl: str) -> dict[str, dict[str, Any]]:
    """Problem → the entry of its present witness, made with the versions that are installed."""
    lines = RECORD.read_text().splitlines() if RECORD.exists() else []
    entries = {entry["problem"]: entry for entry in map(json.loads, lines) if entry["dsl"] == dsl}
    made_with = load(dsl).versions()
    return {
        problem: entry
        for problem in witnesses(dsl)
        if (entry := entries.get(problem)) is not None
        and entry["sha256"] == _digest(dsl, problem)
        and entry["made_with"] == made_with
        and set(entry["bytes"]) == set(ARCHS)
    }


def compiled(dsl: str, problems: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Problem → what compiling its witness gives now: an entry for the record, or an `error`."""
    if not problems:
        return {}
    command = [sys.executable, "-m", "tests.witnesses.compile", dsl, ",".join(ARCHS), *problems]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0 and lines, done.stderr[-3000:]
    common = {"dsl": dsl, "made_with": load(dsl).versions()}
    return {line["problem"]: {**line, **common, "sha256": _digest(dsl, line["problem"])} for line in lines}


def _digest(dsl: str, problem: str) -> str:
    return hashlib.sha256((ROOT / "witnesses" / dsl / f"{problem}.py").read_bytes()).hexdigest()


def main() -> int:
    """Bring the record up to date; the number of witnesses that do not compile."""
    entries, failed = [], 0
    for dsl in DSLS:
        known = on_record(dsl)
        made = compiled(dsl, [problem for problem in witnesses(dsl) if problem not in known])
        for problem, entry in sorted((known | made).items()):
            if "error" in entry:
                failed += 1
                print(f"{dsl} {problem}: {entry['error']}", file=sys.stderr)
            else:
                entries.append(entry)
        print(f"{dsl}: {len(made)} compiled now, {len(known)} were on record")
    RECORD.write_text("".join(json.dumps(entry, sort_keys=True) + "\n" for entry in entries))
    return failed


if __name__ == "__main__":
    sys.exit(min(main(), 1))
