"""Collapse of three parallel streams into one at the end of Gemma 3n's text model.

Inputs (full workload):

    hidden_states     [3, 64, 256, 3072]  bf16  standard normal; the first index is the stream
    unembed_weight_1  [3072, 3072]        bf16  standard normal, not scaled; [out, in]
    unembed_weight_2  [3072, 3072]        bf16  standard normal, not scaled
    epsilon           1e-5

Output: [64, 256, 3072] bf16. Streams 1 and 2 are projected by their weights and rescaled so that each token has the
root mean square of the same token in stream 0; the result is the mean of stream 0 and the two. Everything is computed
in fp32 and rounded once; epsilon is a floor under the mean square of a projected token, and not added to it.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "Project two of three activation streams, rescale each of their tokens to the magnitude that it has in the first "
    "stream, and average the three."
)

PROVENANCE = Provenance(
    upstream="SOL-ExecBench, subset L1, row 51, workload 7",
    licence="NVIDIA Evaluation Dataset License Agreement (nothing of the dataset is used)",
    source_model="Gemma 3n E2B (which has four streams of width 2048)",
    inferred=(
        "Weights are [out, in]: as the public module's linear layers; they are square.",
        "What is cast to float32, and that only the result is rounded: from the shape of the public recipe.",
        "The names of inputs 2 to 4.",
    ),
)


@dataclass(frozen=True)
class Workload:
    batch: int
    sequence: int
    width: int


FULL = Workload(batch=64, sequence=256, width=3072)
SMOKE = Workload(batch=2, sequence=5, width=64)

OUTPUTS = ("collapsed",)


def mean_square(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean(dim=-1, keepdim=True)


def reference(
    hidden_states: torch.Tensor, unembed_weight_1: torch.Tensor, unembed_weight_2: torch.Tensor, epsilon: float
) -> torch.Tensor:
    compute = wide(hidden_states)
    first = hidden_states[0].to(compute)
    magnitude = mean_square(first).sqrt()
    floor = torch.tensor(epsilon, dtype=compute, device=hidden_states.device)
    streams = [first]
    for stream, weight in zip(hidden_states[1:], (unembed_weight_1, unembed_weight_2), strict=True):
        projected = linear(stream.to(compute), weight.to(compute))
        streams.append(projected * magnitude / torch.maximum(mean_square(projected), floor).sqrt())
    return torch.stack(streams).mean(dim=0).to(hidden_states.dtype)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    width = workload.width
    hidden_states = normal(3, workload.batch, workload.sequence, width)
    return hidden_states, normal(width, width), normal(width, width), 1e-5


def cost(workload: Workload) -> Cost:
    width = workload.width
    tokens = workload.batch * workload.sequence
    return Cost(
        bytes_read=2 * (3 * tokens * width + 2 * width * width),
        bytes_written=2 * tokens * width,
        flops={"bf16": 2 * 2 * tokens * width * width},
    )
