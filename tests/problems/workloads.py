"""Draws at sizes of a test's own choice, for what smoke sizes cannot show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from metakernelbench.grading.compare import anchor_of, reference_numerics
from metakernelbench.problems.catalog import load
from tests.problems.support import CPU, Case, clone


def case_at(problem_id: str, workload: Any, seed: int = 7) -> Case:
    """A draw of `workload`, with what the reference makes of it."""
    problem = replace(load(problem_id), workloads={"smoke": workload})
    with reference_numerics():
        inputs = problem.draw("smoke", seed, CPU)
        expected = problem.reference(*clone(inputs))
        return Case(problem, inputs, expected, anchor_of(problem.reference, inputs))


def tf32(x: torch.Tensor) -> torch.Tensor:
    """A float32 tensor rounded to the 10 bits of mantissa that a TF32 product reads."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
