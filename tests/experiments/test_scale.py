"""The benchmark of the machinery, on a small part of the experiment: it looks for what is lost or run twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.postgresql import Server

ROOT = Path(__file__).parents[2]


def measured(*options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.scale", "--problems", "6", "--models", "1", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_a_runner_is_killed_and_replaced_and_nothing_is_lost_or_run_twice() -> None:
    result = measured()
    assert (result["records"], result["records_replaced"], result["leases_left"]) == (24, 0, 0)
    assert result["peak_mb_of_one_process"] < 1000


def test_runners_of_several_processes_share_a_server(postgresql: Server) -> None:
    result = measured("--processes", "3", "--database", postgresql.new_database())
    assert (result["records"], result["run_again_for_no_reason"], result["records_replaced"]) == (24, 0, 0)
