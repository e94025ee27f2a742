"""What the comparisons with transformers share: its modules with our weights in them, and what counts as agreement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from metakernelbench.grading.compare import as_tuple
from metakernelbench.problems.problem import Inputs, Outputs
from tests.problems.support import Case, clone

TOLERANCE = 1e-5
"""Of the largest magnitude. transformers computes norms and softmax in float32, whatever the dtype of its weights."""


def loaded[Module: torch.nn.Module](module: Module, **weights: torch.Tensor) -> Module:
    """`module` for inference, with exactly these parameters (named with __ for a dot), in their own dtypes."""
    module.load_state_dict({name.replace("__", "."): weight for name, weight in weights.items()}, assign=True)
    return module.eval()


def single(inputs: Inputs) -> Inputs:
    """The inputs with every 16-bit tensor as float32, which changes no value."""
    return tuple(
        x.float() if isinstance(x, torch.Tensor) and x.dtype in (torch.bfloat16, torch.float16) else x
        for x in clone(inputs)
    )


def disagreements(
    ours: Sequence[torch.Tensor], theirs: Outputs, names: Sequence[str], tolerance: float = TOLERANCE
) -> Mapping[str, float]:
    """Relative distance of every output in which the two differ."""
    distances = {}
    for name, our, their in zip(names, ours, as_tuple(theirs), strict=True):
        assert our.shape == their.shape, f"{name}: {tuple(our.shape)} and {tuple(their.shape)}"
        distance = float((our.double() - their.double()).abs().max() / our.double().abs().max())
        if not distance <= tolerance:
            distances[name] = distance
    return distances


def differs(draw: Case, theirs: Callable[..., Outputs], tolerance: float = TOLERANCE) -> Mapping[str, float]:
    """Where `theirs`, on the draw's values in float32, is not the reference's anchor."""
    return disagreements(draw.anchor, theirs(*single(draw.inputs)), draw.problem.outputs, tolerance)
