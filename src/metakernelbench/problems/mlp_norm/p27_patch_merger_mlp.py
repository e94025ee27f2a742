"""Vision patch merger of Qwen3-Omni: LayerNorm, 2 × 2 neighbourhoods joined into one long row, two-layer GELU MLP.

Inputs (full workload):

    hidden      [32768, 1536]  bf16   standard normal + 0.5 * standard normal of the patch (a mean offset)
    grid_thw    [8, 3]         int64  eight images of 1 frame, 64 rows, 64 columns; the same in every draw
    ln_weight   [1536]         bf16   0.1 * standard normal + 1
    ln_bias     [1536]         bf16   0.1 * standard normal
    fc1_weight  [6144, 6144]   bf16   standard normal / sqrt(6144); [out, in], as all weights
    fc1_bias    [6144]         bf16   standard normal
    fc2_weight  [3584, 6144]   bf16   standard normal / sqrt(6144)
    fc2_bias    [3584]         bf16   standard normal
    eps         1e-6

Output: [8192, 3584] bf16.

The patches of an image lie in raster order over (frame, row, column). Every patch is normalised on its own (computed in
fp32, rounded once). Merged row (frame, row // 2, column // 2), again in raster order and image after image, holds the
patches of its neighbourhood in the order (row % 2, column % 2). Then linear, exact GELU, linear, each rounded to bf16.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import gelu, linear

from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "LayerNorm every vision patch, join each 2 × 2 neighbourhood of patches into one row, and send the rows through a "
    "two-layer GELU MLP."
)

PROVENANCE = Provenance(
    upstream="SOL-ExecBench, subset L1, row 19, workload 7",
    licence="NVIDIA Evaluation Dataset License Agreement (nothing of the dataset is used)",
    source_model="Qwen3-Omni",
    inferred=(
        "bfloat16 throughout: from the name of the problem.",
        "The mean offset is one number a patch: from a visible remark about a mean offset per token.",
        "Patches in raster order, merged grid by grid: from the inputs; the public model's patches arrive merged.",
        "64 × 64 grids: from the visible parts of the formula and the number of patches.",
        "Exact GELU and eps = 1e-6: from the public merger in Hugging Face transformers.",
        "grid_thw is int64: as Hugging Face processors make it.",
    ),
)

MERGE = 2


@dataclass(frozen=True)
class Workload:
    grids: tuple[tuple[int, int, int], ...]
    """Frames, rows and columns of each image."""
    width: int
    out: int

    @property
    def patches(self) -> int:
        return sum(frames * rows * columns for frames, rows, columns in self.grids)

    @property
    def merged_width(self) -> int:
        return MERGE * MERGE * self.width


FULL = Workload(grids=((1, 64, 64),) * 8, width=1536, out=3584)
# Not square, and not all alike: at full size a swap of rows and columns of the grid has no effect.
SMOKE = Workload(grids=((1, 4, 8), (2, 4, 6), (1, 6, 4)), width=32, out=40)

OUTPUTS = ("merged",)
FIXED = ("grid_thw",)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    compute = wide(x)
    centred = x.to(compute) - x.to(compute).mean(dim=-1, keepdim=True)
    variance = centred.square().mean(dim=-1, keepdim=True)
    normalised = centred / torch.sqrt(variance + eps) * weight.to(compute) + bias.to(compute)
    return normalised.to(x.dtype)


def reference(
    hidden: torch.Tensor,
    grid_thw: torch.Tensor,
    ln_weight: torch.Tensor,
    ln_bias: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor,
    fc2_weight: torch.Tensor,
    fc2_bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    normalised = layer_norm(hidden, ln_weight, ln_bias, eps)
    width = hidden.shape[-1]
    start, images = 0, []
    for frames, rows, columns in grid_thw.tolist():
        patches = normalised[start : start + frames * rows * columns]
        start += frames * rows * columns
        grid = patches.reshape(frames, rows // MERGE, MERGE, columns // MERGE, MERGE, width)
        images.append(grid.permute(0, 1, 3, 2, 4, 5).reshape(-1, MERGE * MERGE * width))
    merged = torch.cat(images)
    return linear(gelu(linear(merged, fc1_weight, fc1_bias)), fc2_weight, fc2_bias)


def vectorized(
    hidden: torch.Tensor,
    grid_thw: torch.Tensor,
    ln_weight: torch.Tensor,
    ln_bias: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor,
    fc2_weight: torch.Tensor,
    fc2_bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """All images at once: every patch computes its place, and nothing waits for the grid to reach the host."""
    normalised = layer_norm(hidden, ln_weight, ln_bias, eps)
    patches, width = hidden.shape
    sizes = grid_thw.prod(dim=-1)
    first = sizes.cumsum(0) - sizes
    image = torch.arange(len(sizes), device=hidden.device).repeat_interleave(sizes, output_size=patches)
    _, rows, columns = grid_thw[image].unbind(-1)
    place = torch.arange(patches, device=hidden.device) - first[image]
    frame, row, column = place // (rows * columns), place // columns % rows, place % columns
    neighbourhood = (frame * (rows // MERGE) + row // MERGE) * (columns // MERGE) + column // MERGE
    slot = row % MERGE * MERGE + column % MERGE
    merged = torch.empty_like(normalised)
    merged[first[image] + neighbourhood * MERGE * MERGE + slot] = normalised
    merged = merged.reshape(-1, MERGE * MERGE * width)
    return linear(gelu(linear(merged, fc1_weight, fc1_bias)), fc2_weight, fc2_bias)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    patches, width, merged, out = workload.patches, workload.width, workload.merged_width, workload.out
    hidden = normal(patches, width) + 0.5 * normal(patches, 1)
    grid_thw = torch.tensor(workload.grids, device=device)
    ln_weight, ln_bias = 0.1 * normal(width) + 1, 0.1 * normal(width)
    fc1_weight, fc1_bias = normal(merged, merged) / merged**0.5, normal(merged)
    fc2_weight, fc2_bias = normal(out, merged) / merged**0.5, normal(out)
    return hidden, grid_thw, ln_weight, ln_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, 1e-6


def cost(workload: Workload) -> Cost:
    width, merged, out = workload.width, workload.merged_width, workload.out
    rows = workload.patches // (MERGE * MERGE)
    weights = merged * merged + out * merged
    vectors = 2 * width + merged + out
    return Cost(
        bytes_read=2 * (workload.patches * width + weights + vectors) + 8 * 3 * len(workload.grids),
        bytes_written=2 * rows * out,
        flops={"bf16": 2 * rows * weights},
    )
