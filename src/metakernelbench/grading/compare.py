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

_PART = 1 << 26
"""Elements compared at a time."""
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
    own_error, largest, error = torch.zeros(3, dtype=torch.float64, device=anchor.device)
    for _, v, z in slices(actual, expected, anchor):
        finite = z.isfinite()
        own_error = torch.maximum(own_error, torch.where(finite, (v - z).abs(), 0.0).max())  # a NaN stays
        largest = torch.maximum(largest, torch.where(finite, z.abs(), 0.0).max())
    allowance = tolerance_factor * max(float(own_error), torch.finfo(expected.dtype).eps * float(largest))
    mismatches = 0
    for u, v, z in slices(actual, expected, anchor):
        finite = z.isfinite()
        difference = torch.where(finite, (u - z).abs(), 0.0)
        same_nonfinite = (u == v) | (u.isnan() & v.isnan())
        mismatches += int(torch.where(finite, ~(difference <= allowance), ~same_nonfinite).sum())
        error = torch.maximum(error, difference.nan_to_num(nan=float("inf")).max())
    return Comparison(
        output=name,
        error=min(float(error), torch.finfo(torch.float64).max),  # JSON has no infinity
        allowance=allowance,
        mismatches=mismatches,
        elements=anchor.numel(),
        passed=mismatches == 0,
    )


def slices(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same elements of each, as float64, a part at a time: whole tensors could take more memory than there is."""
    flat = [x.reshape(-1) for x in tensors]
    for start in range(0, flat[0].numel(), _PART):
        yield tuple(x[start : start + _PART].double() for x in flat)


def compare_all(
    names: Sequence[str], actual: Outputs, expected: Outputs, anchor: Sequence[torch.Tensor]
) -> tuple[Comparison, ...]:
    """`compare` for every output, in order."""
    return tuple(
        compare(name, u, v, z)
        for name, u, v, z in zip(names, as_tuple(actual), as_tuple(expected), anchor, strict=True)
    )
