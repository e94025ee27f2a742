"""SiLU-gated MLP in float32 whose gate and up matrices are stacked in one; no biases.

Inputs (full workload):

    hidden_states   [64, 128, 1024]  fp32  standard normal
    gate_up_weight  [8192, 1024]     fp32  standard normal / sqrt(1024); [out, in]; rows 0 to 4095 are the gate
    down_weight     [1024, 4096]     fp32  standard normal / sqrt(4096)

Output: [64, 128, 1024] fp32, the down projection of silu(gate) · up.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import linear, silu

from metakernelbench.problems.problem import Cost, Inputs, Provenance

SUBJECT = "Run a SiLU-gated MLP in float32 whose gate and up projections are one stacked matrix."

PROVENANCE = Provenance(
    upstream="SOL-ExecBench, subset L1, row 73, workload 9",
    licence="NVIDIA Evaluation Dataset License Agreement (nothing of the dataset is used)",
    source_model="Parakeet, as upstream names it (the public encoder's feed-forward has no gate)",
    inferred=(
        "The gate comes first in the stacked matrix: as in every public layer of this form.",
        "The names of the inputs; their roles follow from the shapes.",
    ),
)


@dataclass(frozen=True)
class Workload:
    batch: int
    sequence: int
    width: int
    inner: int


FULL = Workload(batch=64, sequence=128, width=1024, inner=4096)
SMOKE = Workload(batch=2, sequence=6, width=32, inner=48)

OUTPUTS = ("output",)


def reference(hidden_states: torch.Tensor, gate_up_weight: torch.Tensor, down_weight: torch.Tensor) -> torch.Tensor:
    gate, up = linear(hidden_states, gate_up_weight).chunk(2, dim=-1)
    return linear(silu(gate) * up, down_weight)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    width, inner = workload.width, workload.inner
    hidden_states = torch.randn(workload.batch, workload.sequence, width, device=device)
    gate_up_weight = torch.randn(2 * inner, width, device=device) / width**0.5
    down_weight = torch.randn(width, inner, device=device) / inner**0.5
    return hidden_states, gate_up_weight, down_weight


def cost(workload: Workload) -> Cost:
    width, inner = workload.width, workload.inner
    tokens = workload.batch * workload.sequence
    return Cost(
        bytes_read=4 * (tokens * width + 3 * width * inner),
        bytes_written=4 * tokens * width,
        flops={"fp32_matrix": 3 * 2 * tokens * width * inner},
    )
