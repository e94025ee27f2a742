"""The feed-forward of a FLUX transformer block in float32: linear, tanh GELU, linear, with biases.

Inputs (full workload):

    hidden_states  [32, 512, 3072]  fp32  standard normal
    fc1_weight     [12288, 3072]    fp32  standard normal / sqrt(3072); [out, in]
    fc1_bias       [12288]          fp32  standard normal
    fc2_weight     [3072, 12288]    fp32  standard normal / sqrt(12288)
    fc2_bias       [3072]           fp32  standard normal

Output: [32, 512, 3072] fp32. GELU is x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))).
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import gelu, linear

from metakernelbench.problems.problem import Cost, Inputs, Provenance

SUBJECT = "Linear layer, tanh GELU, and linear layer back to the model's width, with biases, in float32."

PROVENANCE = Provenance(
    upstream="SOL-ExecBench, subset L1, row 36, workload 6",
    licence="NVIDIA Evaluation Dataset License Agreement (nothing of the dataset is used)",
    source_model="FLUX",
    inferred=("The names of the inputs; their roles follow from the shapes.",),
)


@dataclass(frozen=True)
class Workload:
    batch: int
    sequence: int
    width: int
    inner: int


FULL = Workload(batch=32, sequence=512, width=3072, inner=12288)
SMOKE = Workload(batch=2, sequence=5, width=48, inner=96)

OUTPUTS = ("output",)


def reference(
    hidden_states: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor,
    fc2_weight: torch.Tensor,
    fc2_bias: torch.Tensor,
) -> torch.Tensor:
    activated = gelu(linear(hidden_states, fc1_weight, fc1_bias), approximate="tanh")
    return linear(activated, fc2_weight, fc2_bias)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    width, inner = workload.width, workload.inner
    hidden_states = torch.randn(workload.batch, workload.sequence, width, device=device)
    fc1_weight = torch.randn(inner, width, device=device) / width**0.5
    fc1_bias = torch.randn(inner, device=device)
    fc2_weight = torch.randn(width, inner, device=device) / inner**0.5
    fc2_bias = torch.randn(width, device=device)
    return hidden_states, fc1_weight, fc1_bias, fc2_weight, fc2_bias


def cost(workload: Workload) -> Cost:
    width, inner = workload.width, workload.inner
    tokens = workload.batch * workload.sequence
    return Cost(
        bytes_read=4 * (tokens * width + 2 * width * inner + inner + width),
        bytes_written=4 * tokens * width,
        flops={"fp32_matrix": 2 * 2 * tokens * width * inner},
    )
