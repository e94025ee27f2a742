"""Typing mistakes are answered at once: nothing is imported or started for them, and no device is waited for."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from metakernelbench.errors import UnknownName
from metakernelbench.grading.contract import CONTRACT
from metakernelbench.grading.screening import screen
from metakernelbench.grading.verdict import Stage, Verdict

SENT = {"workload": "smoke", "device": "cpu", "final": False, "contract": CONTRACT}
FORBIDDEN = b"import os\ndef solve(*inputs): pass\n"


def screened(kernel: bytes | None, **changed: object) -> Verdict | None:
    return screen("p28", kernel, "triton", **{**SENT, **changed})  # type: ignore[arg-type]


def test_source_and_rules_end_a_feedback_grading() -> None:
    verdict = screened(None)
    assert verdict is not None and (verdict.ended_at, verdict.code) == (Stage.SOURCE, "missing")
    verdict = screened(FORBIDDEN)
    assert verdict is not None and (verdict.ended_at, verdict.code) == (Stage.RULES, "forbidden-import")
    assert verdict.isolation.method == "none" and verdict.source_sha256 is not None


def test_what_has_to_be_run_is_left_to_the_verifier() -> None:
    assert screened(b"def solve(*inputs): pass\n") is None
    assert screened(FORBIDDEN, final=True) is None  # a final grading measures on
    assert screened(FORBIDDEN, workload="tiny") is None  # a mistake that the verifier names
    assert screened(FORBIDDEN, device="tpu") is None


def test_source_faults_end_a_final_grading_too() -> None:
    verdict = screened(b"def solve(:", final=True)
    assert verdict is not None and verdict.code == "syntax-error" and verdict.final


def test_unknown_problem_is_named() -> None:
    with pytest.raises(UnknownName, match="p28"):
        screen("p282", FORBIDDEN, "triton", **SENT)  # type: ignore[arg-type]


def test_a_verifier_that_only_screens_imports_no_torch() -> None:
    request = {"problem": "p28", "kernel": None, "dsl": "triton", "workload": "smoke", "device": "cpu", "final": False}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "metakernelbench.grading"],
        input=json.dumps({**request, "contract": {}}) + "\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["verdict"]["findings"][0]["code"] == "missing"
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "metakernelbench.grading.screening" in imported and "torch" not in imported
