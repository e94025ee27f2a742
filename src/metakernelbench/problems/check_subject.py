"""A problem under check: its draws, results and anchors, each made once, and the way a check says what is wrong."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cached_property

import torch

from metakernelbench.grading.compare import anchor_of, as_tuple
from metakernelbench.problems.problem import Inputs, Outputs, Problem, copies

SEEDS = (101, 102, 103)
"""The draws that are checked."""


class Wrong(Exception):
    """What a check found wrong, and what to do about it."""


class Subject:
    """A problem with the draws and results that several checks look at, each made once."""

    def __init__(self, problem: Problem, workload: str, device: torch.device) -> None:
        self.problem, self.workload, self.device = problem, workload, device
        self.parameters = tuple(inspect.signature(problem.reference).parameters)

    def draw(self, seed: int) -> Inputs:
        inputs = self.problem.draw(self.workload, seed, self.device)
        if len(inputs) != len(self.parameters):
            raise Wrong(
                f"`make_inputs` returns {len(inputs)} values and `reference` takes {len(self.parameters)} "
                f"({', '.join(self.parameters)}): return one for each, in that order"
            )
        return inputs

    def run(self, inputs: Inputs) -> Outputs:
        """The reference on private copies: it may update a cache in place."""
        return self.problem.reference(*copies(inputs))

    @cached_property
    def draws(self) -> tuple[Inputs, ...]:
        return tuple(self.draw(seed) for seed in SEEDS)

    @cached_property
    def results(self) -> tuple[Outputs, ...]:
        return tuple(self.run(inputs) for inputs in self.draws)

    @cached_property
    def expected(self) -> tuple[tuple[torch.Tensor, ...], ...]:
        return tuple(as_tuple(result) for result in self.results)

    @cached_property
    def anchors(self) -> tuple[tuple[torch.Tensor, ...], ...]:
        return tuple(anchor_of(self.problem.reference, inputs) for inputs in self.draws)

    def tensors(self) -> Iterator[tuple[int, str]]:
        """Position and name of every input that is a tensor."""
        for place, (name, value) in enumerate(zip(self.parameters, self.draws[0], strict=True)):
            if isinstance(value, torch.Tensor):
                yield place, name


def same(a: object, b: object) -> bool:
    """Whether two values are identical, NaN equal to NaN."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))
    return a == b


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.bool or x.is_complex() else x.contiguous().view(torch.uint8) if x.dim() else x
