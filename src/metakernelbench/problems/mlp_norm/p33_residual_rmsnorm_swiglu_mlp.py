"""Residual add, RMSNorm and a SiLU-gated MLP at the size of Hermes 405B, in bf16.

Inputs (full workload):

    hidden_states  [64, 128, 16384]  bf16  standard normal
    residual       [64, 128, 16384]  bf16  standard normal
    norm_weight    [16384]           bf16  0.1 * standard normal + 1
    gate_weight    [53248, 16384]    bf16  standard normal / 128; [out, in], as all weights
    up_weight      [53248, 16384]    bf16  standard normal / 128
    down_weight    [16384, 53248]    bf16  standard normal / sqrt(53248)
    eps            1e-5

Output: [64, 128, 16384] bf16, that of the MLP; the residual is not added a second time.

The sum is rounded to bf16 before it is normalised in fp32; the normalised value is rounded before the weight multiplies
it. Every product, silu(gate) and silu(gate) · up are rounded to bf16.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import linear, silu

from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = "Add a residual, RMS-normalise the sum, and run a SiLU-gated MLP of the size of a 405B model on it."

PROVENANCE = Provenance(
    upstream="SOL-ExecBench, subset L2, row 3, workload 4",
    licence="NVIDIA Evaluation Dataset License Agreement (nothing of the dataset is used)",
    source_model="Hermes 405B (sizes of Llama 3.1 405B)",
    inferred=(
        "The order of hidden_states and residual, and of gate and up: as in Llama.",
        "The sum is rounded before the norm, and the normalised value before the weight: as in Llama's public modules.",
        "Only the MLP's result is returned: from the number of tensors that upstream returns and from its subject.",
    ),
)


@dataclass(frozen=True)
class Workload:
    batch: int
    sequence: int
    width: int
    inner: int


FULL = Workload(batch=64, sequence=128, width=16384, inner=53248)
SMOKE = Workload(batch=2, sequence=5, width=64, inner=96)

OUTPUTS = ("output",)


def reference(
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    total = (hidden_states + residual).to(wide(hidden_states))
    normalised = total * torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + eps)
    x = norm_weight * normalised.to(hidden_states.dtype)
    return linear(silu(linear(x, gate_weight)) * linear(x, up_weight), down_weight)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    width, inner = workload.width, workload.inner
    hidden_states = normal(workload.batch, workload.sequence, width)
    residual = normal(workload.batch, workload.sequence, width)
    norm_weight = 0.1 * normal(width) + 1
    gate_weight, up_weight = normal(inner, width) / width**0.5, normal(inner, width) / width**0.5
    down_weight = normal(width, inner) / inner**0.5
    return hidden_states, residual, norm_weight, gate_weight, up_weight, down_weight, 1e-5


def cost(workload: Workload) -> Cost:
    width, inner = workload.width, workload.inner
    tokens = workload.batch * workload.sequence
    return Cost(
        bytes_read=2 * (2 * tokens * width + width + 3 * width * inner),
        bytes_written=2 * tokens * width,
        flops={"bf16": 3 * 2 * tokens * width * inner},
    )
