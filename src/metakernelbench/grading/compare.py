"""The contract's comparison: one set of outputs against the reference and its float64 anchor.

Runs in the verifier only, on tensors that the verifier holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from metakernelbench.grading.contract import CONTRACT
from metakernelbench.grading.verdict import Comparison
from metakernelbench.problems.problem import Inputs, Outputs

_PROMOTED = (torch.float32, torch.float16, torch.bfloat16)


@contextmanager
def reference_numerics() -> Iterator[None]:
    """The numerics under which inputs are drawn and references run and are timed: no TF32, no reduced-precision
    reductions, float32 matmul precision highest, default dtype float32, no gradients. Restores what was set before."""
    matmul = torch.backends.cuda.matmul
    before = (
        matmul.allow_tf32,
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
        torch.backends.cudnn.allow_tf32,
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
    )
    try:
        matmul.allow_bf16_reduced_precision_reduction = False
        matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cudnn.allow_tf32 = False
        torch.set_float32_matmul_precision("highest")  # also switches TF32 off for matmuls
        torch.set_default_dtype(torch.float32)
        with torch.no_grad():
            yield
    finally:
        torch.set_float32_matmul_precision(before[4])
        (
            matmul.allow_tf32,
            matmul.allow_bf16_reduced_precision_reduction,
            matmul.allow_fp16_reduced_precision_reduction,
            torch.backends.cudnn.allow_tf32,
        ) = before[:4]
        torch.set_default_dtype(before[5])


def promote(inputs: Inputs) -> Inputs:
    """The anchor's inputs: float32, float16 and bfloat16 tensors as float64, everything else as it is."""
    return tuple(x.double() if isinstance(x, torch.Tensor) and x.dtype in _PROMOTED else x for x in inputs)


def as_tuple(outputs: Outputs) -> tuple[torch.Tensor, ...]:
    """The output tensors in order, whether the reference returns one or several."""
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


def anchor_of(reference: Callable[..., Outputs], inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """The reference on promoted copies of `inputs`, which stay as they are."""
    promoted = promote(inputs)
    copies = (p.clone() if isinstance(p, torch.Tensor) and p is x else p for p, x in zip(promoted, inputs, strict=True))
    return as_tuple(reference(*copies))


def compare(
    name: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    anchor: torch.Tensor,
    *,
    tolerance_factor: float = CONTRACT.tolerance_factor,
) -> Comparison:
    """One output against the reference's (`expected`) and the anchor's, all of one shape.

    Integer and Boolean outputs must be equal to `expected`. Float outputs pass where
    max|actual − anchor| ≤ factor · max(max|expected − anchor|, ε(dtype) · max|anchor|), over the elements whose anchor
    is finite; elsewhere `actual` must equal `expected`. A NaN that the reference does not have always fails.
    """
    if not expected.dtype.is_floating_point:
        unequal = int((actual != expected).sum())
        return Comparison(
            output=name,
            error=None,
            allowance=None,
            mismatches=unequal,
            elements=expected.numel(),
            passed=unequal == 0,
        )
    u, v, z = actual.double(), expected.double(), anchor.double()
    finite = z.isfinite()
    zero = z.new_zeros(())
    own_error = torch.where(finite, (v - z).abs(), zero).max() if z.numel() else zero
    largest = torch.where(finite, z.abs(), zero).max() if z.numel() else zero
    allowance = tolerance_factor * max(float(own_error), torch.finfo(expected.dtype).eps * float(largest))
    difference = torch.where(finite, (u - z).abs(), zero)
    same_nonfinite = (u == v) | (u.isnan() & v.isnan())
    wrong = torch.where(finite, ~(difference <= allowance), ~same_nonfinite)
    mismatches = int(wrong.sum())
    error = float(difference.nan_to_num(nan=float("inf")).max()) if z.numel() else 0.0
    return Comparison(
        output=name,
        error=min(error, torch.finfo(torch.float64).max),  # JSON has no infinity
        allowance=allowance,
        mismatches=mismatches,
        elements=z.numel(),
        passed=mismatches == 0,
    )


def compare_all(
    names: Sequence[str], actual: Outputs, expected: Outputs, anchor: Sequence[torch.Tensor]
) -> tuple[Comparison, ...]:
    """`compare` for every output, in order."""
    return tuple(
        compare(name, u, v, z)
        for name, u, v, z in zip(names, as_tuple(actual), as_tuple(expected), anchor, strict=True)
    )
