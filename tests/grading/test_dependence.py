"""Kernels for show: ways of doing without them that the observed pass finds, and honest ones that it lets pass."""

from __future__ import annotations

import pytest

from tests.grading.support import HONEST, Grader

KERNEL = HONEST[: HONEST.index("def solve")]
EAGER = """
def eager(h, r, w):
    x = h.float() + r.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w.float()).to(h.dtype)

def honest(h, r, w):
    out = torch.empty_like(h)
    rms(h, r, w, out)
    return out

calls = [0]
"""

FOR_SHOW = {
    "no launch in later calls": """
def solve(h, r, w):
    calls[0] += 1
    return (honest if calls[0] <= 8 else eager)(h, r, w)
""",
    "a decoy in later calls": """
def solve(h, r, w):
    calls[0] += 1
    out = honest(h, r, w)
    return out if calls[0] <= 8 else eager(h, r, w)
""",
    "a canary that tells whether kernels run": """
@toydsl.kernel
def sing(out): out.fill_(3)
def solve(h, r, w):
    canary = torch.zeros(4)
    sing(canary)
    out = eager(h, r, w)
    return out if canary[0].item() == 3 else -out
""",
}


@pytest.mark.parametrize("name", FOR_SHOW)
def test_kernels_for_show_are_found(grade: Grader, name: str) -> None:
    verdict = grade(KERNEL + EAGER + FOR_SHOW[name])
    assert verdict.code in {"no-launch", "not-dependent", "laundering"}, verdict.code


HONEST_TO_THE_END = {
    "a workspace that the call before left clean": """
work = torch.zeros(64 * 64)

@toydsl.kernel
def partial(h, r, work):
    work[: h.shape[0]] += (h.float() + r.float()).square().mean(-1)

@toydsl.kernel
def finish(h, r, w, work, out):
    scale = torch.rsqrt(work[: h.shape[0], None] + 1e-5)
    out.copy_((h.float() + r.float()) * scale * w.float())
    work.zero_()

def solve(h, r, w):
    out = torch.empty_like(h)
    partial(h, r, work)
    finish(h, r, w, work, out)
    return out
""",
    "a crash without its kernel": """
def solve(h, r, w):
    out = torch.full_like(h, float("nan"))
    rms(h, r, w, out)
    if bool(out.isnan().any()):
        raise RuntimeError("nothing was written")
    return out
""",
}


@pytest.mark.parametrize("name", HONEST_TO_THE_END)
def test_what_an_intervention_does_to_honest_kernels_is_not_held_against_them(grade: Grader, name: str) -> None:
    verdict = grade(KERNEL + HONEST_TO_THE_END[name])
    assert verdict.passed, verdict.findings


def test_a_process_that_ends_when_its_kernel_is_left_out_is_replaced(grade: Grader) -> None:
    source = (
        KERNEL
        + """
import torch._dynamo as way
def solve(h, r, w):
    out = torch.full_like(h, float("nan"))
    rms(h, r, w, out)
    if bool(out.isnan().any()):
        way.utils.os._exit(1)
    return out
"""
    )
    verdict = grade(source, final=True)  # the rules forbid the way, and a final grading measures on
    assert {f.code for f in verdict.findings} <= {"forbidden-import", "forbidden-attribute", "other-compiler"}
    assert verdict.timing is not None
