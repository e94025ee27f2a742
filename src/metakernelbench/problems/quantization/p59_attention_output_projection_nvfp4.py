"""Attention output projection of a Nemotron model in NVFP4, with a float32 result.

Inputs (full workload):

    hidden_states  [32768, 4096]  bf16              standard normal; 64 × 512 tokens
    weight         [2816, 2048]   float4_e2m1fn_x2  NVFP4 codes of 0.02 * standard normal, two a byte; [out, in / 2]
    weight_scale   [2816, 256]    float8_e4m3fn     its block scales
    weight_global  Python float                     its global scale

Output: [32768, 2816] fp32, all columns, of which the last 128 are padding with random weights. The hidden states are
quantised to NVFP4 (formats/nvfp4.py) with one global scale.

The allowance is that of fp32. A single code that differs from the prescribed one moves its outputs by a thousand times
as much, so the quantiser must be followed bit for bit.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats import nvfp4
from metakernelbench.problems.formats.nvfp4 import Nvfp4
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = "Quantise activations to NVFP4 and multiply them by an NVFP4 weight, with a float32 result."

PROVENANCE = Provenance(
    upstream="SOL-ExecBench, subset Quant, row 23, workload 15",
    licence="NVIDIA Evaluation Dataset License Agreement (nothing of the dataset is used)",
    source_model="a Nemotron model of width 2688 (padded to 2816) with 32 heads of 128",
    inferred=(
        "hidden_states are bfloat16: by convention.",
        "The result is not cast back: from the shape of the public recipe.",
        "The weight is 0.02 * standard normal: that a decimal factor is applied is visible, its value is our choice.",
        "The quantiser follows NVIDIA TransformerEngine's NVFP4 reference; its divisions by 6 are true divisions: "
        "our choice.",
    ),
)

WEIGHT_STD = 0.02


@dataclass(frozen=True)
class Workload:
    tokens: int
    in_features: int
    out_features: int


FULL = Workload(tokens=32768, in_features=4096, out_features=2816)
SMOKE = Workload(tokens=16, in_features=64, out_features=48)

OUTPUTS = ("projected",)


def reference(
    hidden_states: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, weight_global: float
) -> torch.Tensor:
    tokens = nvfp4.quantize(hidden_states)
    return nvfp4.matmul(tokens, Nvfp4(weight, weight_scale, weight_global), wide(hidden_states))


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    shape = (workload.tokens, workload.in_features)
    hidden_states = torch.randn(shape, dtype=torch.bfloat16, device=device)
    codes, scales, number = nvfp4.random_weight(workload.out_features, workload.in_features, WEIGHT_STD, device)
    return hidden_states, codes.squeeze(0), scales.squeeze(0), number


def cost(workload: Workload) -> Cost:
    tokens, in_features, out_features = workload.tokens, workload.in_features, workload.out_features
    weight = in_features * out_features
    return Cost(
        bytes_read=2 * tokens * in_features + weight // 2 + weight // 16,
        bytes_written=4 * tokens * out_features,
        flops={"nvfp4": 2 * tokens * weight},
    )
