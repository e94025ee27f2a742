"""Output projection of a Mamba-2 mixer from operands that both arrive in NVFP4, with a float32 result.

Inputs (full workload):

    hidden_states                [1, 8192, 960]  float4_e2m1fn_x2  codes of standard normal values, two a byte
    hidden_states_scale          [1, 8192, 120]  float8_e4m3fn     block scales
    global_decode_scale_input    no dimensions   fp32              global scale
    weight                       [1, 1920, 960]  float4_e2m1fn_x2  codes of standard normal / sqrt(1920); [.., out, in]
    weight_scale                 [1, 1920, 120]  float8_e4m3fn
    global_decode_scale_weight   no dimensions   fp32

Output: [1, 8192, 1920] fp32, the product of the operands dequantised from NVFP4 (formats/nvfp4.py), held to the
allowance of fp32.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats import nvfp4
from metakernelbench.problems.formats.nvfp4 import Nvfp4
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = "Multiply two NVFP4 operands, with a float32 result."

PROVENANCE = Provenance(
    upstream="SOL-ExecBench, subset Quant, row 25, workload 11",
    licence="NVIDIA Evaluation Dataset License Agreement (nothing of the dataset is used)",
    source_model="Nemotron with Mamba-2 mixers, as upstream names it (no known one projects 1920 to 1920)",
    inferred=("The order of the arguments, grouped by operand; their names are partly visible.",),
)


@dataclass(frozen=True)
class Workload:
    tokens: int
    in_features: int
    out_features: int


FULL = Workload(tokens=8192, in_features=1920, out_features=1920)
SMOKE = Workload(tokens=32, in_features=48, out_features=40)

OUTPUTS = ("projected",)


def reference(
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor,
    global_decode_scale_input: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    global_decode_scale_weight: torch.Tensor,
) -> torch.Tensor:
    tokens = Nvfp4(hidden_states, hidden_states_scale, global_decode_scale_input)
    return nvfp4.matmul(
        tokens, Nvfp4(weight, weight_scale, global_decode_scale_weight), wide(global_decode_scale_input)
    )


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    in_features = workload.in_features
    hidden_states = nvfp4.quantize(torch.randn(1, workload.tokens, in_features, device=device))
    weight = nvfp4.quantize(torch.randn(1, workload.out_features, in_features, device=device) / in_features**0.5)
    return *hidden_states, *weight


def cost(workload: Workload) -> Cost:
    tokens, in_features, out_features = workload.tokens, workload.in_features, workload.out_features
    elements = (tokens + out_features) * in_features
    return Cost(
        bytes_read=elements // 2 + elements // 16 + 2 * 4,
        bytes_written=4 * tokens * out_features,
        flops={"nvfp4": 2 * tokens * in_features * out_features},
    )
