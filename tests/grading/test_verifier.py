"""Whole gradings of p28 in a DSL that runs at once."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from metakernelbench.errors import UnknownName, UserError
from metakernelbench.grading import verifier
from metakernelbench.grading.contract import CONTRACT
from metakernelbench.grading.verdict import Stage, Verdict
from tests.grading.support import HONEST, QUICK, SMUGGLED, Grader, plugin_installed


def test_honest_kernel_passes_with_everything_a_record_needs(grade: Grader) -> None:
    verdict = grade(HONEST, contract=CONTRACT)
    assert verdict.passed, verdict.findings
    timing = verdict.timing
    assert timing is not None and timing.speedup_interval is not None
    assert len(timing.implementation_ms) == len(timing.eager_ms) == CONTRACT.timed_calls
    assert timing.speedup_interval[0] <= timing.speedup <= timing.speedup_interval[1]
    assert timing.speedup == timing.eager_median_ms / timing.implementation_median_ms
    assert verdict.draws_passed == CONTRACT.correctness_draws
    assert [c.output for c in verdict.comparisons] == ["normalised"]
    assert verdict.versions["toydsl"] == "1.0" and "torch" in verdict.versions
    assert verdict.isolation.method in ("bubblewrap", "process")
    assert Verdict.from_json(verdict.to_json()) == verdict


def test_feedback_ends_at_a_rule_and_final_measures_on(grade: Grader) -> None:
    source = "import os\n" + HONEST
    feedback = grade(source)
    assert (feedback.ended_at, feedback.code, feedback.timing) == (Stage.RULES, "forbidden-import", None)
    final = grade(source, final=True)
    assert (final.ended_at, final.code) == (Stage.RULES, "forbidden-import")
    assert final.timing is not None and final.draws_passed == CONTRACT.correctness_draws
    assert final.speedup is None


def test_final_keeps_what_the_rules_say_beside_a_later_fault(grade: Grader) -> None:
    verdict = grade("import os\ndef solve(h, r, w): return h", final=True)
    assert verdict.ended_at is Stage.RULES
    assert [item.code for item in verdict.findings] == ["forbidden-import", "wrong-output"]


def test_wrong_outputs_say_how_wrong(grade: Grader) -> None:
    verdict = grade(HONEST.replace("1e-5", "1.0"))
    assert (verdict.ended_at, verdict.code) == (Stage.CORRECTNESS, "wrong-output")
    (comparison,) = verdict.comparisons
    assert comparison.error is not None and comparison.allowance is not None
    assert comparison.error > comparison.allowance and comparison.mismatches > 0


UNUSUAL = {
    "cached output buffer": """
buffers = {}
def solve(h, r, w):
    out = buffers.setdefault(h.shape, torch.empty_like(h))
    rms(h, r, w, out)
    return out
""",
    "result in place of an input": """
def solve(h, r, w):
    rms(h, r, w, h)
    return h
""",
    "view of a larger buffer": """
def solve(h, r, w):
    space = torch.empty(2 * len(h), h.shape[1], dtype=h.dtype)
    rms(h, r, w, space[::2])
    return space[::2]
""",
    "transposed buffer": """
def solve(h, r, w):
    out = torch.empty(h.shape[1], h.shape[0], dtype=h.dtype).T
    rms(h, r, w, out)
    return out
""",
    "work in eager PyTorch before, moved by a second kernel after": """
@toydsl.kernel
def move(source, target): target.copy_(source)
def solve(h, r, w):
    x, out, moved = h.float() + r.float(), torch.empty_like(h), torch.empty_like(h)
    rms(x, torch.zeros_like(x), w, out)
    move(out, moved)
    return moved
""",
    "cast afterwards, printed, logged": """
import logging
def solve(h, r, w):
    out = torch.empty(h.shape)
    rms(h, r, w, out)
    print("called"); logging.getLogger("kernel").warning("called")
    return out.to(h.dtype)
""",
    "class with state, compiled on first use": """
from dataclasses import dataclass, field
from collections import namedtuple
Key = namedtuple("Key", "rows width")
@dataclass
class Op:
    plans: dict = field(default_factory=dict)
    def __call__(self, h, r, w):
        run = self.plans.setdefault(Key(*h.shape), rms)
        out = torch.empty_like(h)
        run(h, r, w, out)
        return out
solve = Op()
""",
    "noise in the last bits": """
def solve(h, r, w):
    out = torch.empty(h.shape)
    rms(h, r, w, out)
    return (out * (1 + 1e-4 * torch.randn_like(out))).to(h.dtype)
""",
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_honest_but_unusual_kernels_pass(grade: Grader, name: str) -> None:
    source = HONEST[: HONEST.index("def solve")] + UNUSUAL[name]
    verdict = grade(source)
    assert verdict.passed, verdict.findings


def test_time_that_nobody_claims_is_found(grade: Grader) -> None:
    lie = SMUGGLED + "modules['metakernelbench.grading.worker']._clock = iter(range(0, 10**9, 1000)).__next__\n"
    slow = HONEST.replace("    rms(", "    modules['time'].sleep(0.01)\n    rms(")
    verdict = grade(lie + slow, contract=replace(QUICK, timing_tries=2))
    assert (verdict.ended_at, verdict.code) == (Stage.TIMING, "clock-disagreement")
    assert len(verdict.clocks) == 2
    assert all(told.hidden_ms > told.allowed_ms + told.noise_ms for told in verdict.clocks)
    assert grade(SMUGGLED + slow).passed


def test_output_written_after_the_call_is_found(grade: Grader) -> None:
    late = """
def solve(h, r, w):
    out = torch.empty_like(h)
    rms(h, r, w, out)
    modules["_thread"].start_new_thread(scribble, ())
    return out
def scribble():
    for _ in range(50):
        modules["time"].sleep(0.0005)
        for page in [m for m in modules["gc"].get_objects() if type(m).__name__ == "mmap"]:
            page[:] = page[:][::-1]
"""
    verdict = grade(SMUGGLED + HONEST[: HONEST.index("def solve")] + late, final=True)
    assert {found.code for found in verdict.findings} & {"late-write", "wrong-output"}


def test_progress_names_the_stages(grade: Grader) -> None:
    seen: list[str] = []
    grade(HONEST, progress=seen.append)
    stages = list(dict.fromkeys(name for name in seen if name in set(Stage)))  # a busy machine has calls timed again
    assert stages == ["source", "rules", "import", "correctness", "dependence", "timing"]


def test_second_grading_pays_no_start(grade: Grader) -> None:
    grade(HONEST)
    started = time.monotonic()
    verdict = grade(HONEST)
    assert verdict.seconds["start"] < 10
    assert time.monotonic() - started < 60


def test_grade_is_one_grading_in_a_process_of_its_own() -> None:
    with plugin_installed():
        verdict = verifier.grade("p28", b"def solve(): pass", "toy", workload="smoke", device="cpu", contract=QUICK)
    assert verdict.code == "runtime-error"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"problem": "p999"}, UserError),
        ({"dsl": "toi"}, UserError),
        ({"workload": "huge"}, UserError),
        ({"device": "cuda"}, UserError),
    ],
)
def test_senseless_requests_are_refused_with_a_sentence(grade: Grader, options: dict[str, str], error: type) -> None:
    with pytest.raises(error) as raised:
        grade(HONEST, **options)
    assert raised.value.message
    assert not isinstance(raised.value, UnknownName) or raised.value.hint
