"""What the tests of judges share."""

from __future__ import annotations

import os
from pathlib import Path

from metakernelbench.judging.judge import GradingRequest
from tests.grading.support import HONEST


def request(source: str = HONEST, **changes: object) -> GradingRequest:
    """p28 in Toy on the CPU, unless told otherwise."""
    fields = {
        "problem": "p28",
        "dsl": "toy",
        "source": source.encode(),
        "workload": "smoke",
        "device": "cpu",
        **changes,
    }
    return GradingRequest(**fields)  # type: ignore[arg-type]


def processes(text: str, parent: int | None = None) -> set[int]:
    """Processes whose command line holds a text; with `parent`, only its children."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                above = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                command = (folder / "cmdline").read_text()
            except OSError:
                continue
            if text in command and parent in (None, above):
                found.add(int(folder.name))
    return found


def verifiers() -> set[int]:
    """Verifier processes that are children of this one."""
    return processes("metakernelbench.grading", os.getpid())
