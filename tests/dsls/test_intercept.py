"""Every way in which an honest submission launches a kernel goes through the interceptor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from metakernelbench.dsls.dsl import load

ROOT = Path(__file__).parents[2]

PATHS = {
    "tirx": (
        "exe(...)",
        "exe['main']",
        "exe.mod['main']",
        "exe.mod.main",
        "exe.mod(...)",
        "exe.jit()",
        "get_function",
        "tvm_ffi tensors",
    ),
    "triton": ("kernel[grid]", "keywords", "run", "heuristics"),
    "cute": (
        "jit",
        "jit within jit",
        "compiled, cute tensors",
        "compiled, torch tensors",
        "compiled.to",
        "compiled, pointers",
    ),
}


@cache
def observe(dsl: str) -> dict[str, Any]:
    environment = {**os.environ, **load(dsl).environment("cpu"), "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "tests.dsls.observe", dsl]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.mark.parametrize(("dsl", "path"), [(dsl, path) for dsl, paths in PATHS.items() for path in paths])
class TestLaunchPath:
    def test_is_seen_once_with_its_tensors(self, dsl: str, path: str) -> None:
        performed = observe(dsl)[path]["performed"]
        assert len(performed["kernels"]) == 1
        assert performed["sees_target"]
        assert performed["written"]

    def test_can_be_left_out(self, dsl: str, path: str) -> None:
        assert not observe(dsl)[path]["left_out"]["written"]


@pytest.mark.parametrize("dsl", PATHS)
def test_kernel_is_named_after_the_file_that_owns_it(dsl: str) -> None:
    first = next(iter(observe(dsl).values()))["performed"]["kernels"][0]
    assert first.startswith(str(ROOT / "tests" / "dsls" / f"kernels_{dsl}.py:"))
