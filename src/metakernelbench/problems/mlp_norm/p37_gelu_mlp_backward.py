"""Gradients of a two-layer tanh-GELU MLP with biases, in float32, from saved activations.

Inputs (full workload):

    grad_output  [64, 128, 2048]  fp32  standard normal: the gradient at the MLP's output
    x            [64, 128, 2048]  fp32  standard normal
    fc1_weight   [8192, 2048]     fp32  standard normal / sqrt(2048); [out, in]
    fc2_weight   [2048, 8192]     fp32  standard normal / sqrt(8192)
    fc1_output   [64, 128, 8192]  fp32  standard normal: what enters the GELU
    gelu_output  [64, 128, 8192]  fp32  standard normal: stands for what leaves it

Outputs, fp32: the gradients at x, fc1_weight, the first bias, fc2_weight and the second bias.

The saved activations are drawn independently of each other and of x, so both must be read.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats.tanh_gelu import tanh_gelu_derivative
from metakernelbench.problems.problem import Cost, Inputs, Provenance

SUBJECT = "Compute the gradients at the input, both weights and both biases of a two-layer tanh-GELU MLP in float32."

PROVENANCE = Provenance(
    upstream="SOL-ExecBench, subset L2, row 72, workload 7",
    licence="NVIDIA Evaluation Dataset License Agreement (nothing of the dataset is used)",
    source_model="Step1X (image editing)",
    inferred=(
        "The order of inputs of equal shape: the gradient first, then that of the forward pass.",
        "The number and order of the gradients: from the shape of the public recipe, and that of the parameters.",
    ),
)


@dataclass(frozen=True)
class Workload:
    batch: int
    sequence: int
    width: int
    inner: int


FULL = Workload(batch=64, sequence=128, width=2048, inner=8192)
SMOKE = Workload(batch=2, sequence=6, width=32, inner=64)

OUTPUTS = ("grad_x", "grad_fc1_weight", "grad_fc1_bias", "grad_fc2_weight", "grad_fc2_bias")


def reference(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc2_weight: torch.Tensor,
    fc1_output: torch.Tensor,
    gelu_output: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    grad, tokens, a, g = (t.reshape(-1, t.shape[-1]) for t in (grad_output, x, fc1_output, gelu_output))
    grad_fc2_weight, grad_fc2_bias = grad.T @ g, grad.sum(dim=0)
    grad_a = grad @ fc2_weight * tanh_gelu_derivative(a)
    grad_fc1_weight, grad_fc1_bias = grad_a.T @ tokens, grad_a.sum(dim=0)
    grad_x = (grad_a @ fc1_weight).reshape(x.shape)
    return grad_x, grad_fc1_weight, grad_fc1_bias, grad_fc2_weight, grad_fc2_bias


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    width, inner = workload.width, workload.inner
    tokens = (workload.batch, workload.sequence)
    grad_output = torch.randn(*tokens, width, device=device)
    x = torch.randn(*tokens, width, device=device)
    fc1_weight = torch.randn(inner, width, device=device) / width**0.5
    fc2_weight = torch.randn(width, inner, device=device) / inner**0.5
    fc1_output = torch.randn(*tokens, inner, device=device)
    gelu_output = torch.randn(*tokens, inner, device=device)
    return grad_output, x, fc1_weight, fc2_weight, fc1_output, gelu_output


def cost(workload: Workload) -> Cost:
    width, inner = workload.width, workload.inner
    tokens = workload.batch * workload.sequence
    weights = 2 * width * inner
    return Cost(
        bytes_read=4 * (2 * tokens * width + 2 * tokens * inner + weights),
        bytes_written=4 * (tokens * width + weights + inner + width),
        flops={"fp32_matrix": 2 * 2 * tokens * weights},
    )
