from __future__ import annotations

from metakernelbench.grading.codes import finding
from metakernelbench.grading.report import render
from metakernelbench.grading.verdict import Comparison, Isolation, Stage, Timing, Verdict

ISOLATION = Isolation(method="process", notes=("the network is shared",))
TIMING = Timing(
    implementation_ms=(0.5, 0.5),
    eager_ms=(1.0, 1.0),
    implementation_median_ms=0.05,
    eager_median_ms=1.0,
    vectorized_median_ms=0.1,
    speedup=20.0,
    speedup_interval=(19.0, 21.0),
    roofline_fraction=0.5,
)


def verdict(**changes: object) -> Verdict:
    fields: dict[str, object] = {
        "problem": "p28",
        "dsl": "tirx",
        "workload": "full",
        "device": "NVIDIA H200",
        "passed": True,
        "timing": TIMING,
        "isolation": ISOLATION,
        "contract_version": 1,
        "draws_passed": 5,
    }
    return Verdict(**{**fields, **changes})  # type: ignore[arg-type]


def test_passed_verdict_shows_speedup_times_and_share_of_the_bound() -> None:
    text = render(verdict())
    assert text.startswith("PASSED: p28 in tirx, full workload on NVIDIA H200: 20.00× over eager PyTorch")
    for part in ("50.0 µs", "1.000 ms", "19.00× to 21.00×", "speedup over it: 2.00×", "50%"):
        assert part in text


def test_failed_verdict_shows_code_line_error_and_what_was_printed() -> None:
    wrong = Comparison(output="y", error=0.5, allowance=0.01, mismatches=7, elements=100, passed=False)
    counts = Comparison(output="n", error=None, allowance=None, mismatches=3, elements=9, passed=False)
    text = render(
        verdict(
            passed=False,
            ended_at=Stage.CORRECTNESS,
            findings=(finding("wrong-output", "Correctness draw 2", 12),),
            comparisons=(wrong, counts),
            draws_passed=1,
            timing=None,
            submission_output="debug\n",
        )
    )
    assert text.startswith("FAILED: p28 in tirx, full workload on NVIDIA H200: stage `correctness`")
    for part in (
        "[wrong-output] kernel.py line 12: Correctness draw 2. The outputs differ",
        "1 correctness draws passed before",
        "y: largest error 0.5, allowed 0.01, 7 of 100 elements outside: WRONG",
        "n: 3 of 9 elements differ: WRONG",
        "  debug",
    ):
        assert part in text


def test_circumstances_are_for_people_only() -> None:
    assert "network" not in render(verdict())
    assert "note: the network is shared" in render(verdict(), for_feedback=False)
