"""GroupNorm with a weight and a bias for each channel, at the deepest level of the Stable Diffusion 1.5 UNet.

Inputs (full workload):

    x       [32, 1280, 8, 8]  fp32  standard normal
    weight  [1280]            fp32  1 + 0.1 * standard normal
    bias    [1280]            fp32  0.1 * standard normal
    eps     1e-5

Output: [32, 1280, 8, 8] fp32. 32 groups of consecutive channels; mean and biased variance are taken over the channels,
rows and columns of a group of one image, which are contiguous.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = "Normalise an image batch by groups of channels, with a weight and a bias for each channel."

PROVENANCE = Provenance(
    upstream="SOL-ExecBench, subset L1, row 77, workload 10",
    licence="NVIDIA Evaluation Dataset License Agreement (nothing of the dataset is used)",
    source_model="Stable Diffusion 1.5",
    inferred=(
        "float32: from the name of the problem.",
        "32 groups: from the public configuration of the model's UNet.",
    ),
)

GROUPS = 32


@dataclass(frozen=True)
class Workload:
    images: int
    channels: int
    height: int
    breadth: int


FULL = Workload(images=32, channels=1280, height=8, breadth=8)
SMOKE = Workload(images=2, channels=64, height=4, breadth=5)

OUTPUTS = ("normalised",)


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    images, channels, height, breadth = x.shape
    groups = x.to(wide(x)).reshape(images, GROUPS, channels // GROUPS, height, breadth)
    mean = groups.mean(dim=(2, 3, 4), keepdim=True)
    variance = groups.var(dim=(2, 3, 4), correction=0, keepdim=True)
    normalised = ((groups - mean) / torch.sqrt(variance + eps)).reshape(x.shape)
    return (normalised * weight.reshape(-1, 1, 1) + bias.reshape(-1, 1, 1)).to(x.dtype)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    x = torch.randn(workload.images, workload.channels, workload.height, workload.breadth, device=device)
    weight = 1 + 0.1 * torch.randn(workload.channels, device=device)
    bias = 0.1 * torch.randn(workload.channels, device=device)
    return x, weight, bias, 1e-5


def cost(workload: Workload) -> Cost:
    image_batch = 4 * workload.images * workload.channels * workload.height * workload.breadth
    return Cost(bytes_read=image_batch + 2 * 4 * workload.channels, bytes_written=image_batch)
