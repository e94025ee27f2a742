"""RMSNorm of half a million rows of 128: the query and key heads of Qwen3-30B-A3B, flattened over tokens and heads.

Inputs (full workload):

    hidden_states  [520128, 128]  bf16  standard normal
    weight         [128]          bf16  1 + 0.1 * standard normal, rounded once

Output: [520128, 128] bf16, x / rms(x) · weight with eps inside the root; computed in fp32, rounded once.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = "RMS-normalise half a million rows of 128 elements with a weight."

PROVENANCE = Provenance(
    upstream="FlashInfer-Trace",
    definition="rmsnorm_h128",
    record="f2872f89-5d8d-403a-9603-5918541cb9e0",
    licence="Apache-2.0",
    source_model="Qwen3-30B-A3B",
)

EPS = 1e-6
WIDTH = 128


@dataclass(frozen=True)
class Workload:
    rows: int


FULL = Workload(rows=520128)
SMOKE = Workload(rows=37)

OUTPUTS = ("normalised",)


def reference(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    compute = wide(hidden_states)
    x = hidden_states.to(compute)
    inverse_rms = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + EPS)
    return (x * inverse_rms * weight.to(compute)).to(hidden_states.dtype)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    hidden_states = torch.randn(workload.rows, WIDTH, dtype=torch.bfloat16, device=device)
    weight = (1 + 0.1 * torch.randn(WIDTH, device=device)).to(torch.bfloat16)
    return hidden_states, weight


def cost(workload: Workload) -> Cost:
    rows = 2 * workload.rows * WIDTH
    return Cost(bytes_read=rows + 2 * WIDTH, bytes_written=rows)
