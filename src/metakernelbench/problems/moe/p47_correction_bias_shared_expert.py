"""A whole ERNIE-4.5 mixture layer: routing with a correction bias, 64 routed experts and a shared one.

Inputs (full workload: 64 sequences of 128 tokens, width 8192, 64 experts of width 3584, shared expert of 7168):

    hidden_states            [64, 128, 8192]   bf16   standard normal; tokens whose selection is too close are redrawn
    gate_weight              [64, 8192]        fp32   standard normal / sqrt(8192)
    e_score_correction_bias  [1, 64]           fp32   0.02 * standard normal
    gate_proj                [64, 3584, 8192]  bf16   standard normal / sqrt(8192); expert, out, in
    up_proj                  [64, 3584, 8192]  bf16   likewise
    down_proj                [64, 8192, 3584]  bf16   standard normal / sqrt(3584)
    shared_gate_proj         [7168, 8192]      bf16   standard normal / sqrt(8192); out, in
    shared_up_proj           [7168, 8192]      bf16   likewise
    shared_down_proj         [8192, 7168]      bf16   standard normal / sqrt(7168)
    norm_min                 1e-10             float  the same in every draw

Outputs:

    output         [64, 128, 8192]  bf16
    router_logits  [8192, 64]       fp32

The router multiplies in float32 and takes a softmax p. It selects the 8 experts with the largest p + bias; their
weights are the unbiased p divided by max(Σ p, norm_min), rounded to bf16. An expert computes silu(x · gateᵀ) *
(x · upᵀ), then · downᵀ; each product, the silu and the elementwise product are rounded to bf16. Expert outputs times
weights are added in bf16, in ascending order of the experts, and the shared expert's output is added last.
"""

from dataclasses import dataclass
from math import sqrt

import torch

from metakernelbench.problems.formats.routed_experts import routed_grouped, routed_loop, swiglu
from metakernelbench.problems.formats.stable_rows import draw_stable_rows, gap_below
from metakernelbench.problems.problem import Cost, Inputs, Provenance

SUBJECT = (
    "Select 8 of 64 experts by softmax probability plus a correction bias, apply them and one shared expert as SwiGLU, "
    "and return the mixture and the router logits."
)

PROVENANCE = Provenance(
    upstream="own formulation; subject and sizes after SOL-ExecBench L2 row 28, workload 5, as used by MetaKernelBench",
    licence="upstream: NVIDIA Evaluation Dataset License; this formulation: Apache-2.0",
    source_model="ERNIE-4.5-300B-A47B",
    inferred=(
        "the semantics: of the public ERNIE-4.5 mixture block; selection score and margin test are visible",
        "router weight and bias in float32: the public block keeps its router in float32",
        "each triple of projections is gate, up, down: the SwiGLU convention and the shapes",
        "expert outputs are added in bf16 in ascending order: the public block's practice",
        "the second output is the router logits: what the public block returns",
    ),
)

TOP_K = 8
MARGIN = 1e-4
"""Two scores that decide something are at least this far apart; rounding moves them by less than 1e-6."""


@dataclass(frozen=True)
class Workload:
    batch: int
    sequence: int
    width: int
    experts: int
    expert_width: int
    shared_width: int


FULL = Workload(batch=64, sequence=128, width=8192, experts=64, expert_width=3584, shared_width=7168)
SMOKE = Workload(batch=2, sequence=6, width=32, experts=16, expert_width=16, shared_width=32)

OUTPUTS = ("output", "router_logits")


def _logits_and_probs(x: torch.Tensor, gate_weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = x.to(gate_weight.dtype) @ gate_weight.t()
    return logits, logits.softmax(dim=-1)


def _route(
    x: torch.Tensor, gate_weight: torch.Tensor, bias: torch.Tensor, norm_min: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Router logits [tokens, experts], selected experts and their weights [tokens, 8]."""
    logits, probs = _logits_and_probs(x, gate_weight)
    selected = (probs + bias.flatten()).topk(TOP_K, dim=-1).indices
    chosen = probs.gather(-1, selected)
    weights = chosen / chosen.sum(dim=-1, keepdim=True).clamp(min=norm_min)
    return logits, selected, weights.to(x.dtype)


def reference(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    e_score_correction_bias: torch.Tensor,
    gate_proj: torch.Tensor,
    up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    shared_gate_proj: torch.Tensor,
    shared_up_proj: torch.Tensor,
    shared_down_proj: torch.Tensor,
    norm_min: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    x = hidden_states.flatten(0, 1)
    shared = swiglu(x, shared_gate_proj, shared_up_proj, shared_down_proj)
    logits, selected, weights = _route(x, gate_weight, e_score_correction_bias, norm_min)
    routed = routed_loop(x, selected, weights, gate_proj, up_proj, down_proj)
    return (routed + shared).view_as(hidden_states), logits


def vectorized(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    e_score_correction_bias: torch.Tensor,
    gate_proj: torch.Tensor,
    up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    shared_gate_proj: torch.Tensor,
    shared_up_proj: torch.Tensor,
    shared_down_proj: torch.Tensor,
    norm_min: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All routed experts in three grouped products."""
    x = hidden_states.flatten(0, 1)
    shared = swiglu(x, shared_gate_proj, shared_up_proj, shared_down_proj)
    logits, selected, weights = _route(x, gate_weight, e_score_correction_bias, norm_min)
    routed = routed_grouped(x, selected, weights, gate_proj, up_proj, down_proj)
    return (routed + shared).view_as(hidden_states), logits


def _unstable(x: torch.Tensor, gate_weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Tokens whose last selected expert leads the next one by less than the margin."""
    _, probs = _logits_and_probs(x, gate_weight)
    return gap_below(probs + bias.flatten(), TOP_K) < MARGIN


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    width, experts = workload.width, workload.experts

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    def projection(*shape: int) -> torch.Tensor:
        return normal(*shape) / sqrt(shape[-1])

    gate_weight = torch.randn(experts, width, device=device) * width**-0.5
    bias = 0.02 * torch.randn(1, experts, device=device)
    hidden_states = draw_stable_rows(
        workload.batch * workload.sequence,
        draw=lambda rows: normal(rows, width),
        unstable=lambda rows: _unstable(rows, gate_weight, bias),
    )
    return (
        hidden_states.view(workload.batch, workload.sequence, width),
        gate_weight,
        bias,
        projection(experts, workload.expert_width, width),
        projection(experts, workload.expert_width, width),
        projection(experts, width, workload.expert_width),
        projection(workload.shared_width, width),
        projection(workload.shared_width, width),
        projection(width, workload.shared_width),
        1e-10,
    )


def cost(workload: Workload) -> Cost:
    tokens, width, experts = workload.batch * workload.sequence, workload.width, workload.experts
    routed, shared = 3 * width * workload.expert_width, 3 * width * workload.shared_width
    router = 4 * experts * width + 4 * experts
    return Cost(
        bytes_read=2 * tokens * width + router + 2 * experts * routed + 2 * shared,
        bytes_written=2 * tokens * width + 4 * tokens * experts,
        flops={
            "bf16": 2 * tokens * (TOP_K * routed + shared),
            "fp32_matrix": 2 * tokens * width * experts,
        },
    )
