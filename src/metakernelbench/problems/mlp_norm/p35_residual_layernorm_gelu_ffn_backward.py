"""Gradients of a post-norm block, LayerNorm of a tanh-GELU feed-forward plus its input, in float32.

The block (b1, b2 and beta are its biases; no gradient depends on their values):

    a = h W1ᵀ + b1,  g = gelu(a),  y = g W2ᵀ + b2 + h,  n = (y - mean y) / √(var y + eps),  z = ln_weight · n + beta

Inputs (full workload):

    grad_output    [64, 1087, 512]   fp32  standard normal: the gradient at z
    hidden_states  [64, 1087, 512]   fp32  standard normal: h
    fc1_weight     [2048, 512]       fp32  standard normal * sqrt(2 / 512); [out, in]
    fc1_output     [64, 1087, 2048]  fp32  a, computed from the above without biases, like all that follows
    gelu_output    [64, 1087, 2048]  fp32  g
    fc2_weight     [512, 2048]       fp32  standard normal * sqrt(2 / 2048)
    normalized     [64, 1087, 512]   fp32  n
    var            [64, 1087, 1]     fp32  the biased variance of y
    ln_weight      [512]             fp32  1 + 0.1 * standard normal
    eps            1e-12

Outputs, fp32: the gradients at hidden_states, fc1_weight, b1, fc2_weight, b2, ln_weight and beta.

The saved tensors are consistent in every draw, so gelu_output may be recomputed instead of read.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import gelu, linear

from metakernelbench.problems.formats.tanh_gelu import tanh_gelu_derivative
from metakernelbench.problems.problem import Cost, Inputs, Provenance

SUBJECT = (
    "Compute all gradients of a LayerNorm applied to the sum of a tanh-GELU feed-forward and its input, from saved "
    "activations."
)

PROVENANCE = Provenance(
    upstream="SOL-ExecBench, subset L2, row 41, workload 4",
    licence="NVIDIA Evaluation Dataset License Agreement (nothing of the dataset is used)",
    source_model="Kokoro TTS (its text encoder is an ALBERT)",
    inferred=(
        "hidden_states has standard deviation 1: a constant factor is hidden upstream, its value is our choice.",
        "Weights have standard deviation sqrt(2 / fan-in): only that a scale is applied is visible; our choice.",
        "The saved activations are computed without biases: none is drawn.",
        "var keeps its last axis, ln_weight varies by 0.1, eps = 1e-12: by convention and from ALBERT's default.",
        "The order of the gradients is that of the block's parameters.",
    ),
)


@dataclass(frozen=True)
class Workload:
    batch: int
    sequence: int
    width: int
    inner: int


FULL = Workload(batch=64, sequence=1087, width=512, inner=2048)
SMOKE = Workload(batch=2, sequence=7, width=32, inner=64)

OUTPUTS = (
    "grad_hidden_states",
    "grad_fc1_weight",
    "grad_fc1_bias",
    "grad_fc2_weight",
    "grad_fc2_bias",
    "grad_ln_weight",
    "grad_ln_bias",
)


def reference(
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_output: torch.Tensor,
    gelu_output: torch.Tensor,
    fc2_weight: torch.Tensor,
    normalized: torch.Tensor,
    var: torch.Tensor,
    ln_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    grad, h, a, g, n, variance = (
        t.reshape(-1, t.shape[-1]) for t in (grad_output, hidden_states, fc1_output, gelu_output, normalized, var)
    )
    grad_ln_weight, grad_ln_bias = (grad * n).sum(dim=0), grad.sum(dim=0)
    grad_n = grad * ln_weight
    mean, projection = grad_n.mean(dim=-1, keepdim=True), (grad_n * n).mean(dim=-1, keepdim=True)
    grad_y = torch.rsqrt(variance + eps) * (grad_n - mean - n * projection)

    grad_fc2_weight, grad_fc2_bias = grad_y.T @ g, grad_y.sum(dim=0)
    grad_a = grad_y @ fc2_weight * tanh_gelu_derivative(a)
    grad_fc1_weight, grad_fc1_bias = grad_a.T @ h, grad_a.sum(dim=0)
    grad_hidden = (grad_y + grad_a @ fc1_weight).reshape(hidden_states.shape)
    return (
        grad_hidden,
        grad_fc1_weight,
        grad_fc1_bias,
        grad_fc2_weight,
        grad_fc2_bias,
        grad_ln_weight,
        grad_ln_bias,
    )


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    width, inner, eps = workload.width, workload.inner, 1e-12
    tokens = (workload.batch, workload.sequence)
    grad_output = torch.randn(*tokens, width, device=device)
    hidden_states = torch.randn(*tokens, width, device=device)
    fc1_weight = torch.randn(inner, width, device=device) * (2 / width) ** 0.5
    fc2_weight = torch.randn(width, inner, device=device) * (2 / inner) ** 0.5
    ln_weight = 1 + 0.1 * torch.randn(width, device=device)

    fc1_output = linear(hidden_states, fc1_weight)
    gelu_output = gelu(fc1_output, approximate="tanh")
    y = linear(gelu_output, fc2_weight) + hidden_states
    var = y.var(dim=-1, correction=0, keepdim=True)
    normalized = (y - y.mean(dim=-1, keepdim=True)) / torch.sqrt(var + eps)
    return (
        grad_output,
        hidden_states,
        fc1_weight,
        fc1_output,
        gelu_output,
        fc2_weight,
        normalized,
        var,
        ln_weight,
        eps,
    )


def cost(workload: Workload) -> Cost:
    width, inner = workload.width, workload.inner
    tokens = workload.batch * workload.sequence
    weights = 2 * width * inner
    # gelu_output is not counted: it follows from fc1_output.
    saved = tokens * (3 * width + inner + 1)
    return Cost(
        bytes_read=4 * (saved + weights + width),
        bytes_written=4 * (tokens * width + weights + inner + 3 * width),
        flops={"fp32_matrix": 2 * 2 * tokens * weights},
    )
