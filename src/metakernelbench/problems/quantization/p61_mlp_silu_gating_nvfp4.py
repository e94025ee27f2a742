"""SiLU-gated feed-forward block of Qwen3-8B with three NVFP4 projections; the gated activation is quantised again.

Inputs (full workload; each weight is an NVFP4 tensor of float32 values 0.02 * standard normal):

    x                    [32, 512, 4096]   bf16              standard normal
    gate_weight          [1, 12288, 2048]  float4_e2m1fn_x2  codes, two a byte
    gate_block_scales    [1, 12288, 256]   float8_e4m3fn     one for 16 elements, row-major
    gate_global_scale    Python float                        of the whole weight
    up_weight, up_block_scales, up_global_scale              like gate
    down_weight          [1, 4096, 6144]   float4_e2m1fn_x2
    down_block_scales    [1, 4096, 768]    float8_e4m3fn
    down_global_scale    Python float

Output: [32, 512, 4096] bf16. Both activations, x and silu(gate) * up, are quantised to NVFP4 with one global scale over
all tokens (formats/nvfp4.py), so the second stage cannot start before the first has finished everywhere.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats import nvfp4
from metakernelbench.problems.formats.nvfp4 import Nvfp4
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "Run a SiLU-gated feed-forward block whose activations are quantised to NVFP4 before each of its three products "
    "with NVFP4 weights."
)

PROVENANCE = Provenance(
    upstream="SOL-ExecBench, subset Quant, row 28, workload 13",
    licence="NVIDIA Evaluation Dataset License Agreement (nothing of the dataset is used)",
    source_model="Qwen3-8B",
    inferred=(
        "x is bfloat16: by convention, its dtype is not visible",
        "each weight arrives as codes, block scales, global scale: from the shape of the public recipe",
        "weights are 0.02 * standard normal: that a decimal factor is applied is visible, its value is our choice",
        "the quantiser follows NVIDIA TransformerEngine's NVFP4 reference; its divisions by 6 are true divisions: "
        "our choice",
    ),
)

WEIGHT_STD = 0.02


@dataclass(frozen=True)
class Workload:
    batch: int
    sequence: int
    hidden: int
    intermediate: int


FULL = Workload(batch=32, sequence=512, hidden=4096, intermediate=12288)
# Wide enough that the products are as noisy as at full size: an unquantised x must stand out against requantisation.
SMOKE = Workload(batch=2, sequence=8, hidden=512, intermediate=768)

OUTPUTS = ("output",)


def reference(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    gate_block_scales: torch.Tensor,
    gate_global_scale: float,
    up_weight: torch.Tensor,
    up_block_scales: torch.Tensor,
    up_global_scale: float,
    down_weight: torch.Tensor,
    down_block_scales: torch.Tensor,
    down_global_scale: float,
) -> torch.Tensor:
    compute = wide(x)
    tokens = nvfp4.quantize(x.reshape(1, -1, x.shape[-1]))
    gate = nvfp4.matmul(tokens, Nvfp4(gate_weight, gate_block_scales, gate_global_scale), compute).to(x.dtype)
    up = nvfp4.matmul(tokens, Nvfp4(up_weight, up_block_scales, up_global_scale), compute).to(x.dtype)
    gated = torch.nn.functional.silu(gate) * up
    down = Nvfp4(down_weight, down_block_scales, down_global_scale)
    return nvfp4.matmul(nvfp4.quantize(gated), down, compute).to(x.dtype).reshape(x.shape)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    hidden, intermediate = workload.hidden, workload.intermediate
    x = torch.randn(workload.batch, workload.sequence, hidden, dtype=torch.bfloat16, device=device)
    gate = nvfp4.random_weight(intermediate, hidden, WEIGHT_STD, device)
    up = nvfp4.random_weight(intermediate, hidden, WEIGHT_STD, device)
    down = nvfp4.random_weight(hidden, intermediate, WEIGHT_STD, device)
    return x, *gate, *up, *down


def cost(workload: Workload) -> Cost:
    tokens = workload.batch * workload.sequence
    activation = 2 * tokens * workload.hidden
    elements = workload.hidden * workload.intermediate
    weight = elements // 2 + elements // 16
    return Cost(
        bytes_read=activation + 3 * weight,
        bytes_written=activation,
        flops={"nvfp4": 3 * 2 * tokens * elements},
    )
