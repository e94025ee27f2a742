"""Backward pass of residual add and RMSNorm over half a million rows of Qwen3-4B's width.

Inputs (full workload), with x = standard normal · (1.5 · uniform[0, 1) of the row + 0.5), which is not passed:

    grad_output  [64, 8192, 2560]  bf16  standard normal + 0.5 · normalized · weight, rounded once
    normalized   [64, 8192, 2560]  fp32  x · rstd
    rstd         [64, 8192, 1]     fp32  1 / √(mean of x² over the row + 1e-6)
    weight       [2560]            fp32  0.1 * standard normal + 1

Outputs: grad_hidden and grad_residual, equal, [64, 8192, 2560] bf16; grad_weight [2560] fp32.

The gradient leans towards normalized · weight, so that the projection on the normalised row (about 0.5) cannot be left
out. grad_weight sums 524288 rows and is returned in fp32, with the allowance of that dtype. The same tensor may be
returned for both gradients, and the cost counts it once; the reference makes a real copy.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "Compute the gradients at the input, the residual and the weight of a residual add followed by RMSNorm from the "
    "saved normalised rows."
)

PROVENANCE = Provenance(
    upstream="SOL-ExecBench, subset L2, row 12, workload 1",
    licence="NVIDIA Evaluation Dataset License Agreement (nothing of the dataset is used)",
    source_model="Qwen3-4B",
    inferred=(
        "bfloat16 for grad_output and float32 for the rest: from the single visible cast and the problem's name.",
        "grad_weight stays in the dtype it is computed in: only one cast back is visible.",
        "The number and order of the outputs: from the shape of the public recipe and the order of the parameters.",
    ),
)


@dataclass(frozen=True)
class Workload:
    batch: int
    sequence: int
    width: int


FULL = Workload(batch=64, sequence=8192, width=2560)
SMOKE = Workload(batch=2, sequence=9, width=64)

OUTPUTS = ("grad_hidden", "grad_residual", "grad_weight")


def reference(
    grad_output: torch.Tensor, normalized: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    grad = grad_output.to(wide(grad_output))
    grad_weight = (grad * normalized).sum(dim=(0, 1))
    grad_normalized = grad * weight
    projection = (grad_normalized * normalized).mean(dim=-1, keepdim=True)
    grad_hidden = (rstd * (grad_normalized - normalized * projection)).to(grad_output.dtype)
    return grad_hidden, grad_hidden.clone(), grad_weight


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    rows, width = (workload.batch, workload.sequence), workload.width
    x = torch.randn(*rows, width, device=device) * (1.5 * torch.rand(*rows, 1, device=device) + 0.5)
    weight = 0.1 * torch.randn(width, device=device) + 1
    rstd = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6)
    normalized = x * rstd
    grad_output = (torch.randn(*rows, width, device=device) + 0.5 * normalized * weight).to(torch.bfloat16)
    return grad_output, normalized, rstd, weight


def cost(workload: Workload) -> Cost:
    width = workload.width
    rows = workload.batch * workload.sequence
    return Cost(bytes_read=rows * (2 * width + 4 * width + 4) + 4 * width, bytes_written=2 * rows * width + 4 * width)
