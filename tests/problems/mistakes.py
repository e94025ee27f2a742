"""Mistakes that are easier to say than to program, and which of them the contract would let pass.

Shared by the tests of all families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature

import torch

from metakernelbench.grading.compare import as_tuple
from tests.problems.support import Case


def altered(reference: Callable, **changes: Callable) -> Callable:
    """`reference` with some of its arguments, given by name, changed first."""
    names = list(signature(reference).parameters)
    if unknown := set(changes) - set(names):
        raise ValueError(f"{sorted(unknown)} are not among the parameters {names}")

    def implementation(*inputs):
        return reference(*(changes.get(n, lambda x: x)(x) for n, x in zip(names, inputs, strict=True)))

    return implementation


def one_output_off(reference: Callable, index: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    """`reference` with one of its several outputs changed, in its dtype."""

    def implementation(*inputs):
        outputs = list(as_tuple(reference(*inputs)))
        outputs[index] = change(outputs[index]).to(outputs[index].dtype)
        return tuple(outputs)

    return implementation


def accepted(draw: Case, wrong: Mapping[str, Callable]) -> list[str]:
    """The names of those that the contract accepts: none, where its allowance means something."""
    return [name for name, implementation in wrong.items() if draw.accepts(implementation)]
