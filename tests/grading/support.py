"""What the tests of grading share: a verifier process that knows the Toy DSL, and honest kernels in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from metakernelbench.grading.client import VerifierProcess
from metakernelbench.grading.contract import Contract
from metakernelbench.grading.verdict import Verdict

PLUGIN = Path(__file__).parent / "plugin"

QUICK = Contract(warmup_calls=2, timed_calls=8, rechecked_calls=1, time_limit_s=60)
"""The contract's procedure with fewer timed calls."""

HONEST = """
import torch
import toydsl

@toydsl.kernel
def rms(h, r, w, out):
    x = h.float() + r.float()
    out.copy_(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w.float())

def solve(hidden_states, residual, weight):
    out = torch.empty_like(hidden_states)
    rms(hidden_states, residual, weight, out)
    return out
"""
"""p28 in Toy."""

SMUGGLED = """import warnings
modules = getattr(warnings.catch_warnings()._module, "".join(["s", "ys"])).modules
os = modules["os"]
"""
"""Modules that the static rules refuse, by a way that they do not see."""


@contextmanager
def plugin_installed() -> Iterator[None]:
    """Let processes started meanwhile find the Toy DSL."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PLUGIN), before]))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


class Grader:
    """Grades p28 in Toy on the CPU, unless told otherwise."""

    def __init__(self, process: VerifierProcess) -> None:
        self.process = process

    def __call__(
        self, source: str | bytes | None, *, problem: str = "p28", dsl: str = "toy", **options: Any
    ) -> Verdict:
        kernel = source.encode() if isinstance(source, str) else source
        options = {"workload": "smoke", "device": "cpu", "contract": QUICK, **options}
        return self.process.grade(problem, kernel, dsl, **options)
