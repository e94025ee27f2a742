"""The tail of FLUX.1 Kontext: LayerNorm modulated by a conditioning vector, then a projection to 64 channels.

Inputs (full workload):

    hidden_states  [32, 256, 3072]  fp32  standard normal
    conditioning   [32, 3072]       fp32  standard normal
    mod_weight     [6144, 3072]     fp32  standard normal / sqrt(3072); [out, in]
    mod_bias       [6144]           fp32  standard normal
    proj_weight    [64, 3072]       fp32  standard normal / sqrt(3072)
    proj_bias      [64]             fp32  standard normal
    eps            1e-6

Output: [32, 256, 64] fp32. A linear layer of silu(conditioning) gives scale (the first half) and shift (the second) of
each batch item; LayerNorm without parameters, times 1 + scale, plus shift, is projected.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import linear, silu

from metakernelbench.problems.problem import Cost, Inputs, Provenance

SUBJECT = (
    "LayerNorm the hidden states without parameters, scale and shift them by a projection of the conditioning vector, "
    "and project them to 64 channels."
)

PROVENANCE = Provenance(
    upstream="SOL-ExecBench, subset L1, row 35, workload 1",
    licence="NVIDIA Evaluation Dataset License Agreement (nothing of the dataset is used)",
    source_model="FLUX.1 Kontext",
    inferred=(
        "The scale comes before the shift: as in the public continuous adaptive LayerNorm of diffusers.",
        "The names of the inputs; their roles follow from the shapes.",
    ),
)


@dataclass(frozen=True)
class Workload:
    batch: int
    sequence: int
    width: int
    out: int


FULL = Workload(batch=32, sequence=256, width=3072, out=64)
SMOKE = Workload(batch=3, sequence=5, width=48, out=16)

OUTPUTS = ("output",)


def reference(
    hidden_states: torch.Tensor,
    conditioning: torch.Tensor,
    mod_weight: torch.Tensor,
    mod_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    mean = hidden_states.mean(dim=-1, keepdim=True)
    variance = hidden_states.var(dim=-1, correction=0, keepdim=True)
    normalised = (hidden_states - mean) / torch.sqrt(variance + eps)
    scale, shift = linear(silu(conditioning), mod_weight, mod_bias).unsqueeze(1).chunk(2, dim=-1)
    return linear(normalised * (1 + scale) + shift, proj_weight, proj_bias)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    width, out = workload.width, workload.out
    hidden_states = torch.randn(workload.batch, workload.sequence, width, device=device)
    conditioning = torch.randn(workload.batch, width, device=device)
    mod_weight = torch.randn(2 * width, width, device=device) / width**0.5
    mod_bias = torch.randn(2 * width, device=device)
    proj_weight = torch.randn(out, width, device=device) / width**0.5
    proj_bias = torch.randn(out, device=device)
    return hidden_states, conditioning, mod_weight, mod_bias, proj_weight, proj_bias, 1e-6


def cost(workload: Workload) -> Cost:
    batch, width, out = workload.batch, workload.width, workload.out
    tokens = batch * workload.sequence
    modulation, projection = 2 * width * width, width * out
    return Cost(
        bytes_read=4 * (tokens * width + batch * width + modulation + 2 * width + projection + out),
        bytes_written=4 * tokens * out,
        flops={"fp32_matrix": 2 * batch * modulation + 2 * tokens * projection},
    )
