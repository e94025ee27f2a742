"""The output projection after attention, with both operands quantised to block-scaled FP8 inside the call.

Inputs (full workload):

    attn_output    [16384, 7680]  bf16  standard normal; 32 × 512 tokens
    o_proj_weight  [7680, 7680]   bf16  standard normal / sqrt(7680), times a gain in [0.5, 2) of each 128 × 128 block;
                                        [out, in]
    o_proj_bias    [7680]         bf16  standard normal

Output: [16384, 7680] bf16. Activations are quantised in blocks of 1 × 128, the weight in blocks of 128 × 128
(formats/block_scaled_fp8.py). Product and bias are summed in fp32 and rounded once. The weight is drawn for every call,
so its quantisation is part of the work.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats import block_scaled_fp8 as fp8
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = "Quantise activations and weight of a linear layer with bias to block-scaled FP8, and multiply them."

PROVENANCE = Provenance(
    upstream="SOL-ExecBench, subset Quant, row 0, workload 13",
    licence="NVIDIA Evaluation Dataset License Agreement (nothing of the dataset is used)",
    source_model="Qwen3-VL, as upstream names it (no released one has this width)",
    inferred=(
        "All inputs are bfloat16: from a visible cast back and a related problem.",
        "Blocks of 1 × 128 and 128 × 128: from the public meaning of the visible scaling types.",
        "Scales are at least 1e-12: that they are clamped is inferred, the value is our choice and never acts here.",
        "The division by 448 is a true division: our choice.",
    ),
)


@dataclass(frozen=True)
class Workload:
    tokens: int
    in_features: int
    out_features: int


FULL = Workload(tokens=16384, in_features=7680, out_features=7680)
SMOKE = Workload(tokens=16, in_features=256, out_features=384)

OUTPUTS = ("projected",)


def reference(attn_output: torch.Tensor, o_proj_weight: torch.Tensor, o_proj_bias: torch.Tensor) -> torch.Tensor:
    compute = wide(attn_output)
    tokens = fp8.quantize(attn_output, fp8.ACTIVATION_BLOCK)
    weight = fp8.quantize(o_proj_weight, fp8.WEIGHT_BLOCK)
    return (fp8.matmul(tokens, weight, compute) + o_proj_bias.to(compute)).to(attn_output.dtype)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    attn_output = torch.randn(workload.tokens, workload.in_features, dtype=torch.bfloat16, device=device)
    o_proj_weight = fp8.random_weight(workload.out_features, workload.in_features, torch.bfloat16, device)
    o_proj_bias = torch.randn(workload.out_features, dtype=torch.bfloat16, device=device)
    return attn_output, o_proj_weight, o_proj_bias


def cost(workload: Workload) -> Cost:
    tokens, out_features = workload.tokens, workload.out_features
    weight = out_features * workload.in_features
    return Cost(
        bytes_read=2 * (tokens * workload.in_features + weight + out_features),
        bytes_written=2 * tokens * out_features,
        flops={"fp8": 2 * tokens * weight},
    )
