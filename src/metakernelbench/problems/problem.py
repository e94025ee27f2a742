"""What a problem module provides, and the types it provides it in.

A problem module is read top to bottom by someone who sees nothing else. It defines:

    SUBJECT       one sentence that says what is computed
    PROVENANCE    where the problem comes from, and what of it is inferred
    Workload      a frozen dataclass of the constants, with two instances:
    FULL, SMOKE   the benchmark's sizes, and tiny ones that keep every structural feature
    OUTPUTS       the names of what `reference` returns, in order
    reference     `reference(*inputs)`: plain eager PyTorch; returns a tensor or a tuple of tensors
    vectorized    only where `reference` loops in Python: the eager rewrite a user would run instead
    make_inputs   `make_inputs(workload, device)`: one draw, in the order of `reference`'s parameters
    cost          `cost(workload)`: the bytes that must move and the FLOPs that must be done
    FIXED         only where an input tensor is the same in every draw: the names of those
    CAST_OUTPUTS  only where `reference` casts an output to a dtype of its own, in the anchor run too: their names

Rules that keep a problem honest:

* `make_inputs` takes all randomness from torch's default generator of `device`, which the caller seeds.
* `reference` takes sizes from its tensors. A constant that no tensor carries is a module constant, equal in both
  workloads. It names no float32 or bfloat16 as a cast target: it computes in `wide(x)` and returns in `x.dtype`, so
  that the same function, run on inputs promoted to float64, is its own anchor.
* Discrete outputs (top-k, routing) are made stable by `make_inputs`, so that any correct implementation agrees exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

type Inputs = tuple[Any, ...]
"""Tensors and Python numbers, in the order of `reference`'s parameters."""

type Outputs = torch.Tensor | tuple[torch.Tensor, ...]


def copies(inputs: Inputs) -> Inputs:
    """The same inputs with private copies of the tensors: some references update one in place."""
    return tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in inputs)


FAMILIES = ("attention", "kv_cache", "mlp_norm", "moe", "quantization", "linear_attention")
"""The six families, in the order of the problem numbers."""


def wide(x: torch.Tensor) -> torch.dtype:
    """The dtype to compute in: float32 for half-precision and float32 inputs, float64 for promoted ones."""
    return torch.promote_types(x.dtype, torch.float32)


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a problem comes from."""

    upstream: str
    """The collection or project the subject and sizes follow."""
    definition: str | None = None
    """Its name there; None where it is not public."""
    record: str | None = None
    """The workload record there; None where it is not public."""
    licence: str
    """The licence of the upstream."""
    source_model: str | None = None
    """The model whose layer this is."""
    inferred: tuple[str, ...] = ()
    """What no visible source fixes: each entry says what was inferred or chosen, and from what."""


DATATYPES = ("fp32", "fp32_matrix", "bf16", "fp8", "int8", "nvfp4")
"""Datatypes of `Cost.flops`. `bf16` stands for all 16-bit matrix work, `fp32` for vector arithmetic, `fp32_matrix` for
matrix products that must be accurate to float32 (no single TF32 or bf16 pass is; three 16-bit passes are)."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The work that no implementation can avoid, from which a GPU's roofline bound follows."""

    bytes_read: int
    """Bytes of input that must be read, each counted once."""
    bytes_written: int
    """Bytes of output that must be written, each counted once."""
    flops: Mapping[str, float] = field(default_factory=dict[str, float])
    """FLOPs by datatype (a multiply-add counts as 2); the datatypes are those of `DATATYPES`."""

    def __post_init__(self) -> None:
        unknown = set(self.flops) - set(DATATYPES)
        if unknown:
            raise ValueError(f"unknown datatype {sorted(unknown)}; known: {', '.join(DATATYPES)}")

    @property
    def bytes(self) -> int:
        """Bytes read plus bytes written."""
        return self.bytes_read + self.bytes_written


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One entry of the catalogue: a problem module, loaded and checked for completeness."""

    id: str
    """`p01` to `p74`."""
    slug: str
    """The words of the module's name, such as `fused_add_rmsnorm`."""
    family: str
    subject: str
    provenance: Provenance
    workloads: Mapping[str, Any]
    """`full` and `smoke`."""
    outputs: tuple[str, ...]
    reference: Callable[..., Outputs]
    vectorized: Callable[..., Outputs] | None
    make_inputs: Callable[[Any, torch.device], Inputs]
    cost: Callable[[Any], Cost]
    path: str
    """The module's file."""
    fixed: tuple[str, ...] = ()
    """Input tensors that are the same in every draw, by intention."""
    cast_outputs: tuple[str, ...] = ()
    """Outputs that the problem itself casts to a named dtype, so that the anchor has it too."""

    def draw(self, workload: str, seed: int, device: torch.device) -> Inputs:
        """One fresh set of inputs: the same seed on the same device gives the same inputs."""
        torch.manual_seed(seed)
        with torch.no_grad():
            return self.make_inputs(self.workloads[workload], device)
