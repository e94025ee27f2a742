"""A recorded verdict belongs to the witness that is in the repository, and says what it was measured on."""

import hashlib
from pathlib import Path

import pytest

from metakernelbench.grading.verdict import Verdict

ROOT = Path(__file__).parents[2]
RECORDED = [Verdict.from_json(line) for line in (ROOT / "records/h200/witnesses.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("verdict", RECORDED, ids=lambda v: f"{v.dsl}-{v.problem}")
def test_a_recorded_verdict_is_of_the_committed_witness(verdict: Verdict) -> None:
    source = (ROOT / "witnesses" / verdict.dsl / f"{verdict.problem}.py").read_bytes()
    assert hashlib.sha256(source).hexdigest() == verdict.source_sha256
    assert verdict.passed and verdict.final and verdict.workload == "full"
    assert "H200" in verdict.device and {"torch", "driver"} <= set(verdict.versions)


@pytest.mark.parametrize("problem", ["p01", "p03", "p19", "p21", "p28", "p49", "p62", "p72"])
@pytest.mark.parametrize("dsl", ["cute", "tirx"])
def test_both_languages_of_the_benchmark_have_a_measured_witness(problem: str, dsl: str) -> None:
    assert any((v.problem, v.dsl) == (problem, dsl) for v in RECORDED)
