#!/usr/bin/env python3
"""Grades /app/kernel.py where Harbor runs this, and leaves the reward.

Reads order.json beside it, and finds the verifier on PYTHONPATH. Leaves in /logs/verifier: reward.json (`reward` is 1
for a kernel that passes, else 0; `speedup` is 0 unless it passes), verdict.json and the report as text. Where the
machine fails there is no reward, which Harbor counts as an error and not as a failure of the agent.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

from metakernelbench.errors import MkbError
from metakernelbench.grading.client import VerifierProcess
from metakernelbench.grading.report import render

ROOT = Path(os.environ.get("MKB_ROOT") or "/")


def main() -> int:
    order = json.loads((Path(__file__).parent / "order.json").read_text())
    kernel = ROOT / "app" / "kernel.py"
    source = kernel.read_bytes() if kernel.is_file() and not kernel.is_symlink() else None
    try:
        with VerifierProcess() as verifier:
            verdict = verifier.grade(
                order["problem"],
                source,
                order["dsl"],
                workload=order["workload"],
                device=order["device"],
                final=True,
            )
    except MkbError as error:
        print(f"not graded: {error.message}", file=sys.stderr)
        return 1
    logs = ROOT / "logs" / "verifier"
    report = render(verdict, for_feedback=False)
    print(report)
    (logs / "verdict.json").write_text(json.dumps(dataclasses.asdict(verdict)))
    (logs / "report.txt").write_text(report)
    reward = {"reward": float(verdict.passed), "speedup": float(verdict.speedup or 0.0)}
    (logs / "reward.json").write_text(json.dumps(reward))
    return 0


if __name__ == "__main__":
    sys.exit(main())
