"""A whole Qwen3-Next mixture layer: top-10 of 512 small experts and a shared expert behind a learned gate.

Inputs (full workload: 64 sequences of 613 tokens, width 2048, 512 experts of width 512, shared expert of 512):

    hidden_states       [64, 613, 2048]   bf16  standard normal; tokens whose selection is too close are drawn again
    router_weight       [512, 2048]       bf16  standard normal / sqrt(2048)
    gate_proj           [512, 512, 2048]  bf16  standard normal / sqrt(2048); expert, out, in
    up_proj             [512, 512, 2048]  bf16  likewise
    down_proj           [512, 2048, 512]  bf16  standard normal / sqrt(512)
    shared_gate_proj    [512, 2048]       bf16  standard normal / sqrt(2048); out, in
    shared_up_proj      [512, 2048]       bf16  likewise
    shared_down_proj    [2048, 512]       bf16  standard normal / sqrt(512)
    shared_expert_gate  [1, 2048]         bf16  standard normal / sqrt(2048)

Outputs:

    output         [64, 613, 2048]  bf16
    router_logits  [39232, 512]     bf16

The router multiplies in float32 and takes a softmax. The 10 largest probabilities, divided by their sum and rounded to
bf16, are the weights. An expert computes silu(x · gateᵀ) * (x · upᵀ), then · downᵀ; each product, the silu and the
elementwise product are rounded to bf16. Expert outputs times weights are added in bf16, in ascending order of the
experts. The shared expert's output is multiplied by sigmoid(x · shared_expert_gateᵀ), each step in bf16, and added.
The logits are returned rounded to bf16.
"""

from dataclasses import dataclass
from math import sqrt

import torch

from metakernelbench.problems.formats.routed_experts import routed_grouped, routed_loop, swiglu
from metakernelbench.problems.formats.stable_rows import draw_stable_rows, gap_below
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "Apply each token's softmax top-10 of 512 small SwiGLU experts plus a shared expert scaled by a learned sigmoid "
    "gate, and return the mixture and the router logits."
)

PROVENANCE = Provenance(
    upstream="own formulation; subject and sizes after SOL-ExecBench L2 row 60, workload 4, as used by MetaKernelBench",
    licence="upstream: NVIDIA Evaluation Dataset License; this formulation: Apache-2.0",
    source_model="Qwen3-Next-80B-A3B",
    inferred=(
        "the semantics beyond the router's precision and casts: of the public Qwen3-Next and Qwen2-MoE blocks",
        "bf16 for every tensor: the name of the problem; all share one dtype",
        "each triple of projections is gate, up, down: the SwiGLU convention and the shapes",
        "expert outputs are added in bf16 in ascending order: the public block's practice",
    ),
)

TOP_K = 10
MARGIN = 1e-5
"""Two probabilities that decide something are at least this far apart; rounding moves them by about 1e-7."""


@dataclass(frozen=True)
class Workload:
    batch: int
    sequence: int
    width: int
    experts: int
    expert_width: int
    shared_width: int


FULL = Workload(batch=64, sequence=613, width=2048, experts=512, expert_width=512, shared_width=512)
SMOKE = Workload(batch=2, sequence=7, width=32, experts=24, expert_width=16, shared_width=16)

OUTPUTS = ("output", "router_logits")


def _logits_and_probs(x: torch.Tensor, router_weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    compute = wide(x)
    logits = x.to(compute) @ router_weight.to(compute).t()
    return logits, logits.softmax(dim=-1)


def _route(x: torch.Tensor, router_weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Router logits [tokens, experts], selected experts and their weights [tokens, 10]."""
    logits, probs = _logits_and_probs(x, router_weight)
    chosen, selected = probs.topk(TOP_K, dim=-1)
    return logits.to(x.dtype), selected, (chosen / chosen.sum(dim=-1, keepdim=True)).to(x.dtype)


def _shared(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, expert_gate: torch.Tensor
) -> torch.Tensor:
    return torch.sigmoid(x @ expert_gate.t()) * swiglu(x, gate, up, down)


def reference(
    hidden_states: torch.Tensor,
    router_weight: torch.Tensor,
    gate_proj: torch.Tensor,
    up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    shared_gate_proj: torch.Tensor,
    shared_up_proj: torch.Tensor,
    shared_down_proj: torch.Tensor,
    shared_expert_gate: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    x = hidden_states.flatten(0, 1)
    logits, selected, weights = _route(x, router_weight)
    routed = routed_loop(x, selected, weights, gate_proj, up_proj, down_proj)
    shared = _shared(x, shared_gate_proj, shared_up_proj, shared_down_proj, shared_expert_gate)
    return (routed + shared).view_as(hidden_states), logits


def vectorized(
    hidden_states: torch.Tensor,
    router_weight: torch.Tensor,
    gate_proj: torch.Tensor,
    up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    shared_gate_proj: torch.Tensor,
    shared_up_proj: torch.Tensor,
    shared_down_proj: torch.Tensor,
    shared_expert_gate: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All routed experts in three grouped products."""
    x = hidden_states.flatten(0, 1)
    logits, selected, weights = _route(x, router_weight)
    routed = routed_grouped(x, selected, weights, gate_proj, up_proj, down_proj)
    shared = _shared(x, shared_gate_proj, shared_up_proj, shared_down_proj, shared_expert_gate)
    return (routed + shared).view_as(hidden_states), logits


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    width, experts = workload.width, workload.experts

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    def projection(*shape: int) -> torch.Tensor:
        return normal(*shape) / sqrt(shape[-1])

    router_weight = projection(experts, width)
    hidden_states = draw_stable_rows(
        workload.batch * workload.sequence,
        draw=lambda rows: normal(rows, width),
        unstable=lambda rows: gap_below(_logits_and_probs(rows, router_weight)[1], TOP_K) < MARGIN,
    )
    return (
        hidden_states.view(workload.batch, workload.sequence, width),
        router_weight,
        projection(experts, workload.expert_width, width),
        projection(experts, workload.expert_width, width),
        projection(experts, width, workload.expert_width),
        projection(workload.shared_width, width),
        projection(workload.shared_width, width),
        projection(width, workload.shared_width),
        projection(1, width),
    )


def cost(workload: Workload) -> Cost:
    tokens, width, experts = workload.batch * workload.sequence, workload.width, workload.experts
    routed, shared = 3 * width * workload.expert_width, 3 * width * workload.shared_width
    return Cost(
        bytes_read=2 * (tokens * width + experts * width + experts * routed + shared + width),
        bytes_written=2 * (tokens * width + tokens * experts),
        flops={"bf16": 2 * tokens * (TOP_K * routed + shared + width * experts)},
    )
