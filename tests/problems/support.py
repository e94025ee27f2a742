"""What the tests of problems share: a draw with its expectation, and what the contract says of an implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from metakernelbench.grading.compare import anchor_of, as_tuple, compare_all, reference_numerics
from metakernelbench.problems.catalog import load
from metakernelbench.problems.problem import Inputs, Outputs, Problem

CPU = torch.device("cpu")


def clone(inputs: Inputs) -> Inputs:
    """Private copies, for an implementation that may write to its inputs."""
    return tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in inputs)


@dataclass(frozen=True)
class Case:
    """One smoke draw of a problem with what the reference makes of it."""

    problem: Problem
    inputs: Inputs
    expected: Outputs
    anchor: tuple[torch.Tensor, ...]

    def accepts(self, implementation: Callable[..., Outputs]) -> bool:
        """Whether the contract accepts what `implementation` returns for this draw."""
        return self.accepts_outputs(implementation(*clone(self.inputs)))

    def accepts_outputs(self, outputs: Outputs) -> bool:
        actual, expected = as_tuple(outputs), as_tuple(self.expected)
        if [(a.shape, a.dtype) for a in actual] != [(e.shape, e.dtype) for e in expected]:
            return False
        return all(c.passed for c in compare_all(self.problem.outputs, actual, expected, self.anchor))


def case(problem_id: str, seed: int = 7) -> Case:
    """The smoke draw of `problem_id` under `seed`."""
    problem = load(problem_id)
    with reference_numerics():
        inputs = problem.draw("smoke", seed, CPU)
        expected = problem.reference(*clone(inputs))
        return Case(problem, inputs, expected, anchor_of(problem.reference, inputs))
