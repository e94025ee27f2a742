"""Residual add followed by RMSNorm, as before every block of Llama-3.1-8B.

Inputs (full workload):

    hidden_states  [14509, 4096]  bf16  standard normal
    residual       [14509, 4096]  bf16  standard normal
    weight         [4096]         bf16  1 + 0.1 * standard normal, rounded once

Output: [14509, 4096] bf16, the normalised sum. The sum itself is neither rounded nor returned.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "Add a residual to the hidden states and RMS-normalise the sum with a weight; only the normalised sum is returned."
)

PROVENANCE = Provenance(
    upstream="FlashInfer-Trace",
    definition="fused_add_rmsnorm_h4096",
    record="3e460c8c-7cad-4071-959f-e689ca024206",
    licence="Apache-2.0",
    source_model="Llama-3.1-8B",
)

EPS = 1e-5


@dataclass(frozen=True)
class Workload:
    rows: int
    width: int


FULL = Workload(rows=14509, width=4096)
SMOKE = Workload(rows=13, width=64)

OUTPUTS = ("normalised",)


def reference(hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    compute = wide(hidden_states)
    x = hidden_states.to(compute) + residual.to(compute)
    inverse_rms = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + EPS)
    return (x * inverse_rms * weight.to(compute)).to(hidden_states.dtype)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    rows, width = workload.rows, workload.width
    hidden_states = torch.randn(rows, width, dtype=torch.bfloat16, device=device)
    residual = torch.randn(rows, width, dtype=torch.bfloat16, device=device)
    weight = (1 + 0.1 * torch.randn(width, device=device)).to(torch.bfloat16)
    return hidden_states, residual, weight


def cost(workload: Workload) -> Cost:
    activation = 2 * workload.rows * workload.width
    return Cost(bytes_read=2 * activation + 2 * workload.width, bytes_written=activation)
