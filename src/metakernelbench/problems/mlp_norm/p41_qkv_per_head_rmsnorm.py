"""Query, key and value projections in float32, with an RMSNorm of every query and key head.

Inputs (full workload):

    hidden_states  [64, 128, 1024]  fp32  standard normal
    q_weight       [1024, 1024]     fp32  standard normal / sqrt(1024); [out, in]
    k_weight       [1024, 1024]     fp32  likewise
    v_weight       [1024, 1024]     fp32  likewise
    q_norm_weight  [128]            fp32  0.1 * standard normal + 1
    k_norm_weight  [128]            fp32  likewise
    eps            1e-6

Outputs: query, key, value, each [64, 128, 8, 128] fp32: batch, position, head, channel. A head is 128 consecutive
columns of a projection. Values are not normalised.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from metakernelbench.problems.problem import Cost, Inputs, Provenance

SUBJECT = (
    "Project hidden states to query, key and value heads, and RMS-normalise each query and key head with a weight."
)

PROVENANCE = Provenance(
    upstream="SOL-ExecBench, subset L1, row 53, workload 5",
    licence="NVIDIA Evaluation Dataset License Agreement (nothing of the dataset is used)",
    source_model="Gemma 3n E4B audio tower, as upstream names it (the public one normalises no queries and keys)",
    inferred=(
        "The order query, key, value, and the names of the inputs.",
        "Heads are not moved before the positions, and the norm's weight is applied as it is: as in the public text "
        "attention of the model.",
        "Weights are [out, in]: by the convention of linear layers; they are square.",
    ),
)


@dataclass(frozen=True)
class Workload:
    batch: int
    sequence: int
    width: int
    heads: int
    head_size: int


FULL = Workload(batch=64, sequence=128, width=1024, heads=8, head_size=128)
# The projections are not square here, so that a transposed weight shows.
SMOKE = Workload(batch=2, sequence=5, width=48, heads=4, head_size=16)

OUTPUTS = ("query", "key", "value")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def reference(
    hidden_states: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    v_weight: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    heads = (*hidden_states.shape[:2], -1, q_norm_weight.shape[0])
    query = linear(hidden_states, q_weight).reshape(heads)
    key = linear(hidden_states, k_weight).reshape(heads)
    value = linear(hidden_states, v_weight).reshape(heads)
    return rms_norm(query, q_norm_weight, eps), rms_norm(key, k_norm_weight, eps), value


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    width, projection = workload.width, workload.heads * workload.head_size
    hidden_states = torch.randn(workload.batch, workload.sequence, width, device=device)
    q_weight, k_weight, v_weight = (torch.randn(projection, width, device=device) / width**0.5 for _ in range(3))
    q_norm_weight, k_norm_weight = (0.1 * torch.randn(workload.head_size, device=device) + 1 for _ in range(2))
    return hidden_states, q_weight, k_weight, v_weight, q_norm_weight, k_norm_weight, 1e-6


def cost(workload: Workload) -> Cost:
    width, projection = workload.width, workload.heads * workload.head_size
    tokens = workload.batch * workload.sequence
    weights = 3 * width * projection
    return Cost(
        bytes_read=4 * (tokens * width + weights + 2 * workload.head_size),
        bytes_written=3 * 4 * tokens * projection,
        flops={"fp32_matrix": 2 * tokens * weights},
    )
