"""The experts of gpt-oss in float32: biased projections, a clamped and shifted gated unit, weighted sum over 4 experts.

Inputs (full workload: 16384 tokens, width 2880, 128 experts of width 2880, 4 per token):

    hidden_states            [16384, 2880]      fp32   standard normal
    router_indices           [16384, 4]         int64  the 4 largest of standard normal logits
    routing_weights          [16384, 128]       fp32   softmax of all 128 logits; only the selected entries are read
    gate_up_projection       [128, 2880, 5760]  fp32   0.03 * standard normal; expert, in, out
    gate_up_projection_bias  [128, 5760]        fp32   0.5 * standard normal
    down_projection          [128, 2880, 2880]  fp32   0.02 * standard normal; expert, in, out
    down_projection_bias     [128, 2880]        fp32   0.02 * standard normal

Output: [16384, 2880] fp32.

An expert computes z = x · gate_up + bias; even columns of z are the gate, odd ones the up half (they alternate). The
gate is clamped from above at 7, the up half to [-7, 7]; h = (up + 1) * gate * σ(1.702 gate); y = h · down + bias. A
token's result is the sum of y times routing weight over its experts, in ascending order. The 4 weights are not
renormalised: they sum to less than 1.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats.expert_slots import slots_of
from metakernelbench.problems.problem import Cost, Inputs, Provenance

SUBJECT = (
    "Dispatch tokens to their 4 of 128 experts, apply biased projections with a clamped, shifted gated unit, and sum "
    "the weighted expert outputs in float32."
)

PROVENANCE = Provenance(
    upstream="own formulation; subject, sizes after SOL-ExecBench L2 row 64, workload 11, as used by MetaKernelBench",
    licence="upstream: NVIDIA Evaluation Dataset License; this formulation: Apache-2.0",
    source_model="gpt-oss-120b",
    inferred=(
        "1.702 and the limit 7, the formula of the unit and the alternating columns: of the public gpt-oss layer",
        "routing weights are the softmax over all 128 logits: only the indices of the top-k are visibly kept",
        "float32 for every floating tensor: the name of the problem",
        "down projection and its bias times 0.02: the public initialiser range",
    ),
)

ALPHA = 1.702
LIMIT = 7.0


@dataclass(frozen=True)
class Workload:
    tokens: int
    width: int
    experts: int
    expert_width: int
    top_k: int
    gate_up_scale: float
    """Scale of the first projection: large enough that the clamps act."""


FULL = Workload(tokens=16384, width=2880, experts=128, expert_width=2880, top_k=4, gate_up_scale=0.03)
SMOKE = Workload(tokens=12, width=24, experts=8, expert_width=24, top_k=2, gate_up_scale=1.0)

OUTPUTS = ("output",)


def _gated_unit(z: torch.Tensor) -> torch.Tensor:
    gate, up = z[..., ::2].clamp(max=LIMIT), z[..., 1::2].clamp(min=-LIMIT, max=LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * ALPHA))


def reference(
    hidden_states: torch.Tensor,
    router_indices: torch.Tensor,
    routing_weights: torch.Tensor,
    gate_up_projection: torch.Tensor,
    gate_up_projection_bias: torch.Tensor,
    down_projection: torch.Tensor,
    down_projection_bias: torch.Tensor,
) -> torch.Tensor:
    output = torch.zeros_like(hidden_states)
    for expert in range(len(gate_up_projection)):
        token, _ = torch.where(router_indices == expert)
        if len(token) == 0:
            continue
        z = hidden_states[token] @ gate_up_projection[expert] + gate_up_projection_bias[expert]
        y = _gated_unit(z) @ down_projection[expert] + down_projection_bias[expert]
        output.index_add_(0, token, y * routing_weights[token, expert, None])
    return output


def vectorized(
    hidden_states: torch.Tensor,
    router_indices: torch.Tensor,
    routing_weights: torch.Tensor,
    gate_up_projection: torch.Tensor,
    gate_up_projection_bias: torch.Tensor,
    down_projection: torch.Tensor,
    down_projection_bias: torch.Tensor,
) -> torch.Tensor:
    """All experts in two batched products, each padded to the busiest expert."""
    tokens, top_k = router_indices.shape
    slots = slots_of(router_indices.flatten(), len(gate_up_projection))
    token = torch.arange(tokens, device=router_indices.device).repeat_interleave(top_k)
    rows = slots.fill(hidden_states[token])
    z = torch.baddbmm(gate_up_projection_bias.unsqueeze(1), rows, gate_up_projection)
    y = torch.baddbmm(down_projection_bias.unsqueeze(1), _gated_unit(z), down_projection)
    weights = routing_weights.gather(1, router_indices).unsqueeze(-1)
    return (slots.read(y).view(tokens, top_k, -1) * weights).sum(dim=1)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    tokens, width, experts, expert_width = workload.tokens, workload.width, workload.experts, workload.expert_width

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float32, device=device).mul_(scale)

    hidden_states = normal(tokens, width)
    logits = normal(tokens, experts)
    return (
        hidden_states,
        logits.topk(workload.top_k, dim=-1).indices,
        logits.softmax(dim=-1),
        normal(experts, width, 2 * expert_width, scale=workload.gate_up_scale),
        normal(experts, 2 * expert_width, scale=0.5),
        normal(experts, expert_width, width, scale=0.02),
        normal(experts, width, scale=0.02),
    )


def cost(workload: Workload) -> Cost:
    """Of the routing weights, only the selected entries are needed."""
    tokens, width, expert_width = workload.tokens, workload.width, workload.expert_width
    pairs, matrices = tokens * workload.top_k, 3 * width * expert_width
    parameters = workload.experts * (matrices + 2 * expert_width + width)
    return Cost(
        bytes_read=4 * parameters + 4 * tokens * width + (8 + 4) * pairs,
        bytes_written=4 * tokens * width,
        flops={"fp32_matrix": 2 * pairs * matrices},
    )
