"""A recorded verdict belongs to the witness that is in the repository, and says what it was measured on."""

import hashlib
from pathlib import Path
from statistics import geometric_mean

import pytest

from metakernelbench.grading.verdict import Verdict
from metakernelbench.problems import catalog

ROOT = Path(__file__).parents[2]
RECORDED = [Verdict.from_json(line) for line in (ROOT / "records/h200/witnesses.jsonl").read_text().splitlines()]

UNGRADED = {"p50"}
"""Problems whose witnesses have no verdict yet."""


@pytest.mark.parametrize("verdict", RECORDED, ids=lambda v: f"{v.dsl}-{v.problem}")
def test_a_recorded_verdict_is_of_the_committed_witness(verdict: Verdict) -> None:
    source = (ROOT / "witnesses" / verdict.dsl / f"{verdict.problem}.py").read_bytes()
    assert hashlib.sha256(source).hexdigest() == verdict.source_sha256
    assert verdict.passed and verdict.final and verdict.workload == "full"
    assert "H200" in verdict.device and {"torch", "driver"} <= set(verdict.versions)


@pytest.mark.parametrize("dsl", ["cute", "tirx"])
def test_both_languages_of_the_benchmark_have_a_measured_witness_of_every_problem(dsl: str) -> None:
    recorded = {verdict.problem for verdict in RECORDED if verdict.dsl == dsl}
    assert set(catalog.problem_ids()) - recorded == UNGRADED


def test_the_recorded_witnesses_are_five_times_as_fast_as_eager_in_the_geometric_mean() -> None:
    assert geometric_mean(verdict.speedup for verdict in RECORDED) >= 5
