"""Backward pass of Qwen3-Coder's softmax top-8 router.

Inputs (full workload: 65536 tokens, width 2048, 128 experts, 8 per token):

    hidden_states         [65536, 2048]    bf16   standard normal
    gate_weight           [128, 2048]      bf16   0.02 * standard normal
    routing_probs         [65536, 128]     fp32   softmax of standard normal logits
    selected_experts      [65536, 8]       int64  the 8 largest probabilities of each row, descending
    routing_weights_sum   [65536, 1]       fp32   the sum of those 8 probabilities
    grad_routing_weights  [65536, 8]       bf16   0.02 * standard normal
    grad_expert_mask      [128, 8, 65536]  bf16   0.08 * standard normal; expert, slot, token
    grad_router_logits    [65536, 128]     bf16   0.0005 * standard normal

Outputs:

    grad_hidden_states  [65536, 2048]  bf16
    grad_gate_weight    [128, 2048]    bf16

The forward pass was: logits = hidden · gate_weightᵀ, p = softmax(logits), the 8 largest p, divided by their sum S.
Backward, in the dtype of `routing_probs`: the gradient of a selected probability v_k is g_k / S - (Σ g_j v_j) / S²,
plus the gradient of the one-hot dispatch mask at (expert, slot, token), which is passed straight through to it. The
softmax turns gradients P of all probabilities (zero where not selected) into p · (P - Σ P p); the direct gradient of
the logits is added. The sum is rounded to bf16 and multiplied with `gate_weight` and, transposed, with `hidden_states`.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.problem import Cost, Inputs, Provenance

SUBJECT = (
    "Backward pass of a softmax top-8 router: from gradients of routing weights, dispatch mask and logits to gradients "
    "of the hidden states and of the router weight."
)

PROVENANCE = Provenance(
    upstream="own formulation; subject and sizes after SOL-ExecBench L2 row 10, workload 2, as used by MetaKernelBench",
    licence="upstream: NVIDIA Evaluation Dataset License; this formulation: Apache-2.0",
    source_model="Qwen3-Coder-30B-A3B",
    inferred=(
        "the whole derivative: of the public Qwen3-MoE router (softmax in float32, top-k, division by the sum)",
        "the mask gradient passes straight through to the selected probability: the only reading in which it matters",
        "two outputs: the subject ends at the router projection",
        "router weight times 0.02: the public initialiser range",
        "factors 0.02, 0.08 and 0.0005 of the three gradients: chosen so that each of them, and the softmax between, "
        "moves the outputs by far more than the allowance; with 0.02 for all three, the direct gradient hides the rest",
    ),
)


@dataclass(frozen=True)
class Workload:
    tokens: int
    width: int
    experts: int
    top_k: int


FULL = Workload(tokens=65536, width=2048, experts=128, top_k=8)
SMOKE = Workload(tokens=24, width=16, experts=8, top_k=2)

OUTPUTS = ("grad_hidden_states", "grad_gate_weight")


def reference(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    routing_probs: torch.Tensor,
    selected_experts: torch.Tensor,
    routing_weights_sum: torch.Tensor,
    grad_routing_weights: torch.Tensor,
    grad_expert_mask: torch.Tensor,
    grad_router_logits: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    compute = routing_probs.dtype
    tokens, top_k = selected_experts.shape
    token = torch.arange(tokens, device=selected_experts.device).unsqueeze(1)
    slot = torch.arange(top_k, device=selected_experts.device).unsqueeze(0)

    selected_probs = routing_probs.gather(1, selected_experts)
    grad_weights = grad_routing_weights.to(compute)
    weighted = (grad_weights * selected_probs).sum(dim=-1, keepdim=True)
    grad_selected = grad_weights / routing_weights_sum - weighted / routing_weights_sum.square()
    grad_selected = grad_selected + grad_expert_mask[selected_experts, slot, token].to(compute)

    grad_probs = torch.zeros_like(routing_probs).scatter(1, selected_experts, grad_selected)
    inner = (grad_probs * routing_probs).sum(dim=-1, keepdim=True)
    grad_logits = routing_probs * (grad_probs - inner) + grad_router_logits.to(compute)
    grad_logits = grad_logits.to(hidden_states.dtype)
    return grad_logits @ gate_weight, grad_logits.t() @ hidden_states


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    tokens, experts, top_k = workload.tokens, workload.experts, workload.top_k

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device) * scale

    hidden_states = normal(tokens, workload.width)
    gate_weight = normal(experts, workload.width, scale=0.02)
    routing_probs = torch.randn(tokens, experts, device=device).softmax(dim=-1)
    selected_probs, selected_experts = routing_probs.topk(top_k, dim=-1)
    return (
        hidden_states,
        gate_weight,
        routing_probs,
        selected_experts,
        selected_probs.sum(dim=-1, keepdim=True),
        normal(tokens, top_k, scale=0.02),
        normal(experts, top_k, tokens, scale=0.08),
        normal(tokens, experts, scale=0.0005),
    )


def cost(workload: Workload) -> Cost:
    """Of the mask gradients, only the selected entries are needed."""
    tokens, width, experts = workload.tokens, workload.width, workload.experts
    pairs = tokens * workload.top_k
    activations, weight = 2 * tokens * width, 2 * experts * width
    return Cost(
        bytes_read=activations + weight + (4 + 2) * tokens * experts + 4 * tokens + (8 + 2 + 2) * pairs,
        bytes_written=activations + weight,
        flops={"bf16": 2 * 2 * tokens * experts * width},
    )
