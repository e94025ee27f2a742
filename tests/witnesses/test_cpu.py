"""The witnesses that run on a CPU meet the contract at the smoke workload."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from metakernelbench.dsls.dsl import load

ROOT = Path(__file__).parents[2]
CASES = [(dsl, path.stem) for dsl in ("tirx", "triton") for path in sorted((ROOT / "witnesses" / dsl).glob("p*.py"))]
FIRST = {"p03", "p21", "p28", "p49", "p61", "p72"}


class Checks:
    """What `tests.witnesses.check` says of a DSL's witnesses, read as it is printed: no test waits for all of them."""

    def __init__(self, dsl: str) -> None:
        self._accepted: dict[str, list[bool]] = {}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.witnesses.check", dsl],
            cwd=ROOT,
            env={**os.environ, **load(dsl).environment("cpu"), "OMP_NUM_THREADS": "2"},
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def accepted(self, problem: str) -> list[bool]:
        assert self._process.stdout is not None
        while problem not in self._accepted:
            line = self._process.stdout.readline()
            assert line, self._what_went_wrong()
            if line.startswith("{"):
                told = json.loads(line)
                self._accepted[told["problem"]] = told["accepted"]
        return self._accepted[problem]

    def _what_went_wrong(self) -> str:
        self._errors.seek(0)
        return f"the check ended after {sorted(self._accepted)}: {self._errors.read()[-3000:]}"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()


@pytest.fixture(scope="module")
def checks() -> Iterator[dict[str, Checks]]:
    started = {dsl: Checks(dsl) for dsl in ("tirx", "triton")}
    yield started
    for check in started.values():
        check.close()


@pytest.mark.parametrize(("dsl", "problem"), CASES)
def test_witness_is_accepted(checks: dict[str, Checks], dsl: str, problem: str) -> None:
    assert checks[dsl].accepted(problem) == [True, True, True]


@pytest.mark.parametrize("dsl", ["tirx", "triton"])
def test_the_first_problem_of_each_family_has_a_witness(dsl: str) -> None:
    assert {problem for name, problem in CASES if name == dsl} >= FIRST
