"""Draws: fresh inputs from secret seeds, what the reference makes of them, and what a call of it takes.

Verifier only. No seed, reference or expected output ever leaves this process.
"""

from __future__ import annotations

import gc
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import starmap
from typing import Any

import torch

from metakernelbench.grading.buffers import Form
from metakernelbench.grading.compare import anchor_of, as_tuple, compare_all, reference_numerics, slices
from metakernelbench.grading.disturbance import waited_ms
from metakernelbench.grading.profile import Stopwatch
from metakernelbench.grading.verdict import Comparison
from metakernelbench.grading.warming import WARMING_NS, Warming
from metakernelbench.problems.problem import Inputs, Outputs, Problem, copies

_SCARCE = 0.4
"""The share of the GPU's memory that should be free."""
_LARGE = 1 / 16
"""Inputs that take this share of the GPU's memory leave none for what can be made again."""


class Draw:
    """One set of inputs. Nobody writes to them: reference and submission get copies."""

    def __init__(self, problem: Problem, inputs: Inputs, stopwatch: Stopwatch) -> None:
        self.problem, self.inputs, self._stopwatch = problem, inputs, stopwatch
        self._result: Outputs | None = None

    def copies(self) -> Inputs:
        """Private copies of the inputs."""
        return copies(self.inputs)

    def result(self) -> Outputs:
        """What the reference returns, computed once."""
        if self._result is None:
            with self._stopwatch.span("references"), reference_numerics():
                self._result = self.problem.reference(*self.copies())
        return self._result

    def time_reference(self, device: str) -> Timed:
        """One timed call of the reference, whose result is kept."""
        with self._stopwatch.span("eager calls"):
            call = timed(self.problem.reference, self.copies(), device)
        self._result = call.result
        return call

    def time_vectorized(self, device: str) -> float:
        """Milliseconds of one call of the problem's vectorized form."""
        assert self.problem.vectorized is not None
        with self._stopwatch.span("eager calls"):
            return timed(self.problem.vectorized, self.copies(), device).milliseconds

    def form(self) -> Form:
        """What goes in and out of a call on this draw. Of other draws of its workload, inputs may differ in shape."""
        return Form.of(self.problem.outputs, self.inputs, self.result())

    @property
    def expected(self) -> tuple[torch.Tensor, ...]:
        """The reference's outputs."""
        return as_tuple(self.result())

    def compare(self, actual: Sequence[torch.Tensor]) -> tuple[Comparison, ...]:
        """The contract's comparison of every output. The anchor is made for it and not kept: it can take a good part
        of a GPU's memory. It comes before the reference's outputs, so that they need not lie beside its inputs; where
        inputs are large, outputs that are there already are given up for it and made again."""
        large = _are_large(self.inputs)
        if large:
            self._result = None
            torch.cuda.empty_cache()
        with self._stopwatch.span("anchors"), reference_numerics():
            anchor = anchor_of(self.problem.reference, self.inputs)
        if large:
            torch.cuda.empty_cache()  # what the anchor's inputs took comes in pieces of another size now
        expected = self.expected
        with self._stopwatch.span("comparisons"):
            found = compare_all(self.problem.outputs, tuple(actual), expected, anchor)
        del anchor
        _give_back_if_scarce(self.inputs)
        return found

    def nearly(self, actual: Sequence[torch.Tensor], allowances: Sequence[float]) -> bool:
        """A cheap test without the anchor: is every output within `allowances` of the reference's (equal, for
        integers)? False settles nothing; the contract's comparison does."""
        with self._stopwatch.span("comparisons"):
            return all(starmap(_is_near, zip(actual, self.expected, allowances, strict=True)))

    def far_off(self, actual: Sequence[torch.Tensor], allowances: Sequence[float]) -> bool:
        """Whether outputs are certainly wrong, without the reference, which can take a hundred times as long as the
        problem's vectorized form: both are within the allowance of the anchor, so what is twice as far from one is
        outside of it for the other. False settles nothing."""
        if self._result is not None or self.problem.vectorized is None:
            return False
        with self._stopwatch.span("comparisons"), reference_numerics():
            expected = as_tuple(self.problem.vectorized(*self.copies()))
            far = not all(starmap(_is_near, zip(actual, expected, [2 * x for x in allowances], strict=True)))
        _give_back_if_scarce(self.inputs)
        return far


class Draws:
    """Makes the draws of one grading."""

    def __init__(self, problem: Problem, workload: str, device: str, stopwatch: Stopwatch | None = None) -> None:
        self._problem, self._workload, self._device = problem, workload, torch.device(device)
        self._stopwatch = stopwatch or Stopwatch()

    def next(self) -> Draw:
        """A draw from a seed that nobody can guess."""
        with self._stopwatch.span("inputs"), reference_numerics():
            inputs = self._problem.draw(self._workload, secrets.randbits(48), self._device)
        return Draw(self._problem, inputs, self._stopwatch)


def _give_back_if_scarce(inputs: Inputs) -> None:
    """Give unused GPU memory back where there is little left: pieces of an anchor's size, once cut up for smaller
    tensors, would not do for the next anchor."""
    if _bytes_on_gpu(inputs):
        free, total = torch.cuda.mem_get_info()
        if free < _SCARCE * total:
            torch.cuda.empty_cache()


def _are_large(inputs: Inputs) -> bool:
    """Whether inputs take much of the GPU's memory; never on a CPU."""
    size = _bytes_on_gpu(inputs)
    return size > 0 and size > _LARGE * torch.cuda.mem_get_info()[1]


def _bytes_on_gpu(inputs: Inputs) -> int:
    return sum(x.nbytes for x in inputs if isinstance(x, torch.Tensor) and x.is_cuda)


def _is_near(actual: torch.Tensor, expected: torch.Tensor, allowance: float) -> bool:
    if not expected.dtype.is_floating_point:
        return torch.equal(actual, expected)
    return all(bool((((a - b).abs() <= allowance) | (a == b)).all()) for a, b in slices(actual, expected))


@dataclass(frozen=True)
class Timed:
    """One call of an eager function."""

    milliseconds: float
    waited_ms: float
    """For how long of that the process had no processor."""
    turns: int
    """How often the small work before was done."""
    result: Any


def timed(function: Callable[..., Any], inputs: Inputs, device: str) -> Timed:
    """Call an eager function by the contract's procedure."""
    with reference_numerics():
        gc.disable()
        turns = _warming().run(WARMING_NS) if device != "cpu" else 0
        waited = waited_ms()
        try:
            if device == "cpu":
                start = time.perf_counter_ns()
                result = function(*inputs)
                milliseconds = (time.perf_counter_ns() - start) / 1e6
            else:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()
                begin.record()
                result = function(*inputs)
                torch.cuda.synchronize()
                end.record()
                end.synchronize()
                milliseconds = begin.elapsed_time(end)
            return Timed(milliseconds, waited_ms() - waited, turns, result)
        finally:
            gc.enable()


@cache
def _warming() -> Warming:
    return Warming()
