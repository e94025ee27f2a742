"""Pointwise part of a ConvNeXt V2 block, channels last: expand, GELU, global response normalisation, project back.

Inputs (full workload):

    x               [64, 56, 56, 128]  fp32  standard normal
    pwconv1_weight  [512, 128]         fp32  standard normal / sqrt(128); [out, in]
    pwconv1_bias    [512]              fp32  standard normal
    grn_weight      [1, 1, 1, 512]     fp32  standard normal / sqrt(512)
    grn_bias        [1, 1, 1, 512]     fp32  standard normal
    pwconv2_weight  [128, 512]         fp32  standard normal / sqrt(512)
    pwconv2_bias    [128]              fp32  standard normal
    eps             1e-6

Output: [64, 56, 56, 128] fp32. With h the exact GELU of the first product, the response of a channel is the Euclidean
norm of h over an image's plane, divided by its mean over the channels plus eps. The second product takes
grn_weight · (h · response) + grn_bias + h. No depthwise convolution, LayerNorm or residual is part of the problem.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import gelu, linear

from metakernelbench.problems.problem import Cost, Inputs, Provenance

SUBJECT = (
    "Expand each pixel's channels, apply GELU and global response normalisation over the image plane, and project back."
)

PROVENANCE = Provenance(
    upstream="SOL-ExecBench, subset L1, row 44, workload 4",
    licence="NVIDIA Evaluation Dataset License Agreement (nothing of the dataset is used)",
    source_model="ConvNeXt V2",
    inferred=(
        "Exact GELU, the form of the normalisation, the place of eps and the leading ones of its parameters' shapes: "
        "from the public module in Hugging Face transformers.",
    ),
)


@dataclass(frozen=True)
class Workload:
    images: int
    height: int
    breadth: int
    channels: int
    inner: int


FULL = Workload(images=64, height=56, breadth=56, channels=128, inner=512)
SMOKE = Workload(images=2, height=5, breadth=7, channels=16, inner=64)

OUTPUTS = ("output",)


def reference(
    x: torch.Tensor,
    pwconv1_weight: torch.Tensor,
    pwconv1_bias: torch.Tensor,
    grn_weight: torch.Tensor,
    grn_bias: torch.Tensor,
    pwconv2_weight: torch.Tensor,
    pwconv2_bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    h = gelu(linear(x, pwconv1_weight, pwconv1_bias))
    norm = h.square().sum(dim=(1, 2), keepdim=True).sqrt()
    response = norm / (norm.mean(dim=-1, keepdim=True) + eps)
    h = grn_weight * (h * response) + grn_bias + h
    return linear(h, pwconv2_weight, pwconv2_bias)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    channels, inner = workload.channels, workload.inner
    x = torch.randn(workload.images, workload.height, workload.breadth, channels, device=device)
    pwconv1_weight = torch.randn(inner, channels, device=device) / channels**0.5
    pwconv1_bias = torch.randn(inner, device=device)
    grn_weight = torch.randn(1, 1, 1, inner, device=device) / inner**0.5
    grn_bias = torch.randn(1, 1, 1, inner, device=device)
    pwconv2_weight = torch.randn(channels, inner, device=device) / inner**0.5
    pwconv2_bias = torch.randn(channels, device=device)
    return x, pwconv1_weight, pwconv1_bias, grn_weight, grn_bias, pwconv2_weight, pwconv2_bias, 1e-6


def cost(workload: Workload) -> Cost:
    channels, inner = workload.channels, workload.inner
    pixels = workload.images * workload.height * workload.breadth
    parameters = 2 * channels * inner + 3 * inner + channels
    return Cost(
        bytes_read=4 * (pixels * channels + parameters),
        bytes_written=4 * pixels * channels,
        flops={"fp32_matrix": 2 * 2 * pixels * channels * inner},
    )
