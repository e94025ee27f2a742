"""One whole Mamba-2 layer of Nemotron-H: projection, short convolution, chunked scan, gated grouped norm, projection.

Inputs (full workload: batch 8, 512 tokens, width 8192, 256 heads of 64, state 256, 8 groups, 4 taps):

    hidden_states    [8, 512, 8192]  bf16   standard normal
    in_proj_weight   [37120, 8192]   bf16   standard normal / sqrt(8192)
    conv_weight      [20480, 1, 4]   bf16   standard normal / sqrt(4)
    conv_bias        [20480]         bf16   standard normal
    dt_bias          [256]           bf16   standard normal
    A_log            [256]           bf16   uniform in [-5, -1)
    D                [256]           bf16   standard normal
    norm_weight      [16384]         bf16   1 + 0.1 * standard normal, rounded once
    out_proj_weight  [8192, 16384]   bf16   standard normal / sqrt(16384)
    time_step_min    0.0             float  the same in every draw
    time_step_max    1000000.0       float  the same in every draw
    eps              1e-5            float  the same in every draw

Output: [8, 512, 8192] bf16.

1. hidden · in_projᵀ, in bf16, splits into gate (16384), xBC (20480) and dt (256).
2. Each channel of xBC is convolved causally over time with its 4 taps (the last tap meets the current token), its bias
   is added (rounded to bf16), and SiLU is applied (rounded). It splits into x (16384: heads of 64), B and C (2048 each:
   8 groups of 256). Head h reads group h·groups/heads, rounded down.
3. Δ = softplus(dt + dt_bias), each step rounded to bf16, clamped to the time step limits. The decay per step and head
   is e^a with a = -e^A_log · Δ.
4. Per head, from a state h of zeros: h ← e^a h + (Δ x) ⊗ B, y = h · C + D x. Computed in float32, in chunks of 128.
5. y * silu(gate), divided by the root of (mean square + eps) over each of 8 groups of neighbouring channels, times
   norm_weight, rounded to bf16. The gate comes before the norm.
6. That · out_projᵀ, in bf16.
"""

from dataclasses import dataclass
from math import sqrt

import torch
from torch.nn.functional import conv1d, silu, softplus

from metakernelbench.problems.formats.state_space import chunked_scan
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "One whole Mamba-2 layer: input projection, depthwise causal convolution, chunked selective state-space scan, "
    "gated grouped RMS norm and output projection."
)

PROVENANCE = Provenance(
    upstream="own formulation; subject and sizes after SOL-ExecBench L2 row 57, workload 7, as used by MetaKernelBench",
    licence="upstream: NVIDIA Evaluation Dataset License; this formulation: Apache-2.0",
    source_model="Nemotron-H",
    inferred=(
        "the semantics: of the public Nemotron-H layer and Zamba2's gated norm, without mask and cache",
        "names and roles of the inputs: the order of the public layer's parameters",
        "upper end -1 of the range of A_log: chosen, so that state survives from chunk to chunk",
        "head h reads group h·groups/heads: as the current public layer and the Mamba kernels do",
    ),
)

CHUNK = 128
GROUPS = 8


@dataclass(frozen=True)
class Workload:
    batch: int
    length: int
    width: int
    heads: int
    head_size: int
    state_size: int
    taps: int

    @property
    def inner(self) -> int:
        return self.heads * self.head_size

    @property
    def conv_channels(self) -> int:
        return self.inner + 2 * GROUPS * self.state_size


FULL = Workload(batch=8, length=512, width=8192, heads=256, head_size=64, state_size=256, taps=4)
SMOKE = Workload(batch=2, length=300, width=32, heads=16, head_size=8, state_size=8, taps=4)

OUTPUTS = ("output",)


def _gated_norm(y: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """In the dtype of `y`; the mean square is taken over each group of neighbouring channels."""
    z = (y * silu(gate.to(y.dtype))).view(*y.shape[:-1], GROUPS, -1)
    z = z * torch.rsqrt(z.square().mean(dim=-1, keepdim=True) + eps)
    return z.flatten(-2) * weight.to(y.dtype)


def reference(
    hidden_states: torch.Tensor,
    in_proj_weight: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor,
    norm_weight: torch.Tensor,
    out_proj_weight: torch.Tensor,
    time_step_min: float,
    time_step_max: float,
    eps: float,
) -> torch.Tensor:
    compute = wide(hidden_states)
    batch, length = hidden_states.shape[:2]
    channels, _, taps = conv_weight.shape
    heads, inner = len(A_log), len(norm_weight)
    state_size = (channels - inner) // (2 * GROUPS)

    projected = hidden_states @ in_proj_weight.t()
    gate, xbc, dt = torch.split(projected, [inner, channels, heads], dim=-1)
    convolved = conv1d(xbc.transpose(1, 2), conv_weight, conv_bias, padding=taps - 1, groups=channels)
    xbc = silu(convolved[..., :length].transpose(1, 2))
    x, B, C = torch.split(xbc, [inner, GROUPS * state_size, GROUPS * state_size], dim=-1)
    x = x.reshape(batch, length, heads, inner // heads).to(compute)
    B = B.reshape(batch, length, GROUPS, state_size).to(compute)
    C = C.reshape(batch, length, GROUPS, state_size).to(compute)

    step = softplus(dt + dt_bias).clamp(time_step_min, time_step_max).to(compute)
    log_decay = -A_log.to(compute).exp() * step
    state = torch.zeros(batch, heads, inner // heads, state_size, dtype=compute, device=hidden_states.device)
    y, _ = chunked_scan(x * step.unsqueeze(-1), log_decay, B, C, state, CHUNK)
    y = (y + D.to(compute).unsqueeze(-1) * x).flatten(2)

    normed = _gated_norm(y, gate, norm_weight, eps).to(hidden_states.dtype)
    return normed @ out_proj_weight.t()


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    width, heads, inner, channels = workload.width, workload.heads, workload.inner, workload.conv_channels

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    return (
        normal(workload.batch, workload.length, width),
        normal(inner + channels + heads, width) / sqrt(width),
        normal(channels, 1, workload.taps) / sqrt(workload.taps),
        normal(channels),
        normal(heads),
        torch.empty(heads, dtype=torch.bfloat16, device=device).uniform_(-5.0, -1.0),
        normal(heads),
        (1 + 0.1 * torch.randn(inner, device=device)).to(torch.bfloat16),
        normal(width, inner) / sqrt(inner),
        0.0,
        1000000.0,
        1e-5,
    )


def cost(workload: Workload) -> Cost:
    """FLOPs: both projections, and two contractions of every token with its state."""
    tokens, width = workload.batch * workload.length, workload.width
    inner, channels = workload.inner, workload.conv_channels
    projections = width * (inner + channels + workload.heads) + inner * width
    parameters = projections + channels * (workload.taps + 1) + 3 * workload.heads + inner
    return Cost(
        bytes_read=2 * (tokens * width + parameters),
        bytes_written=2 * tokens * width,
        flops={"bf16": 2 * tokens * projections + 4 * tokens * inner * workload.state_size},
    )
