"""Gate and up projections with SiLU gating, from operands that arrive in block-scaled FP8.

Inputs (full workload; the weights are quantised from fp32 values standard normal / sqrt(3584), times a gain in [0.5, 2)
of each 128 × 128 block):

    x                 [8704, 3584]   float8_e4m3fn  codes of standard normal values, blocks of 1 × 128
    scale_x           [8704, 28]     fp32           its scales: element = code · scale
    gate_proj_weight  [18944, 3584]  float8_e4m3fn  codes, blocks of 128 × 128; [out, in]
    scale_gate        [148, 28]      fp32
    up_proj_weight    [18944, 3584]  float8_e4m3fn  likewise
    scale_up          [148, 28]      fp32

Output: [8704, 18944] bf16, silu(gate) · up computed in fp32 and rounded once.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import silu

from metakernelbench.problems.formats import block_scaled_fp8 as fp8
from metakernelbench.problems.formats.block_scaled_fp8 import BlockScaledFp8
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "Multiply block-scaled FP8 activations by FP8 gate and up weights, and gate the one product by silu of the other."
)

PROVENANCE = Provenance(
    upstream="SOL-ExecBench, subset Quant, row 2, workload 2",
    licence="NVIDIA Evaluation Dataset License Agreement (nothing of the dataset is used)",
    source_model="Qwen3-VL, as upstream names it (widths of Qwen2.5-VL-7B)",
    inferred=(
        "The order of the arguments, codes before their scale: from the shape of the public recipe.",
        "Blocks of 1 × 128 and 128 × 128: from the public meaning of the visible scaling types.",
        "Scales are at least 1e-12 and the division by 448 is a true division: our choices.",
    ),
)


@dataclass(frozen=True)
class Workload:
    tokens: int
    hidden: int
    intermediate: int


FULL = Workload(tokens=8704, hidden=3584, intermediate=18944)
SMOKE = Workload(tokens=16, hidden=256, intermediate=384)

OUTPUTS = ("gated",)
CAST_OUTPUTS = ("gated",)


def reference(
    x: torch.Tensor,
    scale_x: torch.Tensor,
    gate_proj_weight: torch.Tensor,
    scale_gate: torch.Tensor,
    up_proj_weight: torch.Tensor,
    scale_up: torch.Tensor,
) -> torch.Tensor:
    compute = wide(scale_x)
    tokens = BlockScaledFp8(x, scale_x)
    gate = fp8.matmul(tokens, BlockScaledFp8(gate_proj_weight, scale_gate), compute)
    up = fp8.matmul(tokens, BlockScaledFp8(up_proj_weight, scale_up), compute)
    return (silu(gate) * up).to(torch.bfloat16)  # also in the anchor: no input tells the dtype of the result


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    hidden, intermediate = workload.hidden, workload.intermediate
    x = fp8.quantize(torch.randn(workload.tokens, hidden, device=device), fp8.ACTIVATION_BLOCK)
    gate = fp8.quantize(fp8.random_weight(intermediate, hidden, torch.float32, device), fp8.WEIGHT_BLOCK)
    up = fp8.quantize(fp8.random_weight(intermediate, hidden, torch.float32, device), fp8.WEIGHT_BLOCK)
    return *x, *gate, *up


def cost(workload: Workload) -> Cost:
    tokens, hidden, intermediate = workload.tokens, workload.hidden, workload.intermediate
    weights = 2 * intermediate * hidden
    return Cost(
        bytes_read=tokens * hidden + 4 * tokens * hidden // 128 + weights + 4 * weights // 128**2,
        bytes_written=2 * tokens * intermediate,
        flops={"fp8": 2 * tokens * weights},
    )
