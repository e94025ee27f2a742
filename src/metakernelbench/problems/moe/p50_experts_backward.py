"""Backward pass of MiMo's routed SwiGLU experts with weighted aggregation, in float32.

Inputs (full workload: 6144 tokens, width 4096, 256 experts of width 1024, 8 per token):

    grad_output    [6144, 4096]       fp32   standard normal
    hidden_states  [6144, 4096]       fp32   standard normal
    topk_indices   [6144, 8]          int64  8 distinct experts per token, uniform
    topk_weights   [6144, 8]          fp32   softmax over the 8 slots of standard normals
    gate_weights   [256, 1024, 4096]  fp32   0.02 * standard normal; expert, out, in
    up_weights     [256, 1024, 4096]  fp32   likewise
    down_weights   [256, 4096, 1024]  fp32   likewise

Outputs, all fp32: the gradients

    grad_hidden_states  [6144, 4096]
    grad_topk_weights   [6144, 8]
    grad_gate_weights   [256, 1024, 4096]
    grad_up_weights     [256, 1024, 4096]
    grad_down_weights   [256, 4096, 1024]

The forward pass was, for each token x and each of its experts with weight w: a = G x, u = U x, h = silu(a) * u,
y = D h, output = Σ w y. Backward, with g the token's row of `grad_output`: the gradient of w is ⟨g, y⟩; dh = Dᵀ w g;
du = dh * silu(a); da = dh * u * σ(a) (1 + a (1 - σ(a))); the gradients of D, G and U gather the outer products
(w g) hᵀ, da xᵀ and du xᵀ over the expert's tokens; the token's gradient gathers Gᵀ da + Uᵀ du over its experts, in
ascending order. An expert without tokens has zero gradients.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.problem import Cost, Inputs, Provenance

SUBJECT = (
    "Backward pass of routed SwiGLU experts with weighted aggregation: gradients of hidden states, routing weights and "
    "all three expert weight stacks."
)

PROVENANCE = Provenance(
    upstream="own formulation; subject and sizes after SOL-ExecBench L2 row 24, workload 8, as used by MetaKernelBench",
    licence="upstream: NVIDIA Evaluation Dataset License; this formulation: Apache-2.0",
    source_model="MiMo-V2-Flash",
    inferred=(
        "the derivative: calculus of the public MiMo and DeepSeek-V3 expert loop",
        "one gradient per floating input except grad_output, in the order of the inputs",
        "float32 for every floating tensor: the name of the problem",
        "expert weights times 0.02: the public initialiser range",
        "routing weights are a softmax of normals: chosen, positive rows that sum to 1",
    ),
)


@dataclass(frozen=True)
class Workload:
    tokens: int
    width: int
    experts: int
    expert_width: int
    top_k: int


FULL = Workload(tokens=6144, width=4096, experts=256, expert_width=1024, top_k=8)
SMOKE = Workload(tokens=12, width=32, experts=8, expert_width=16, top_k=2)

OUTPUTS = (
    "grad_hidden_states",
    "grad_topk_weights",
    "grad_gate_weights",
    "grad_up_weights",
    "grad_down_weights",
)


def reference(
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    topk_indices: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_weights: torch.Tensor,
    up_weights: torch.Tensor,
    down_weights: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    grad_hidden = torch.zeros_like(hidden_states)
    grad_weights = torch.zeros_like(topk_weights)
    grad_gate = torch.zeros_like(gate_weights)
    grad_up = torch.zeros_like(up_weights)
    grad_down = torch.zeros_like(down_weights)
    for expert in range(len(gate_weights)):
        token, slot = torch.where(topk_indices == expert)
        if len(token) == 0:
            continue
        gate, up, down = gate_weights[expert], up_weights[expert], down_weights[expert]
        x, grad_row = hidden_states[token], grad_output[token]
        a, u = x @ gate.t(), x @ up.t()
        sigmoid = torch.sigmoid(a)
        h = a * sigmoid * u
        grad_weights[token, slot] = (grad_row * (h @ down.t())).sum(dim=-1)
        grad_y = grad_row * topk_weights[token, slot, None]
        grad_h = grad_y @ down
        grad_u = grad_h * a * sigmoid
        grad_a = grad_h * u * sigmoid * (1 + a * (1 - sigmoid))
        grad_down[expert] = grad_y.t() @ h
        grad_gate[expert] = grad_a.t() @ x
        grad_up[expert] = grad_u.t() @ x
        grad_hidden.index_add_(0, token, grad_a @ gate + grad_u @ up)
    return grad_hidden, grad_weights, grad_gate, grad_up, grad_down


def vectorized(
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    topk_indices: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_weights: torch.Tensor,
    up_weights: torch.Tensor,
    down_weights: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Pairs sorted by expert once, so that each product runs on slices and everything else on all pairs together.

    Batched products over experts padded to the busiest one would need fewer launches, but on an H200 they accumulate
    less accurately than the contract allows.
    """
    tokens, top_k = topk_indices.shape
    order = topk_indices.flatten().argsort(stable=True)
    counts = topk_indices.flatten().bincount(minlength=len(gate_weights)).tolist()

    def product(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.cat([r @ w for r, w in zip(torch.split(rows, counts), weights, strict=True)])

    def outer(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.stack(
            [a.t() @ b for a, b in zip(torch.split(left, counts), torch.split(right, counts), strict=True)]
        )

    def unsorted(rows: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(rows).index_copy_(0, order, rows).view(tokens, top_k, -1)

    x, grad_row = hidden_states[order // top_k], grad_output[order // top_k]
    grad_y = grad_row * topk_weights.flatten()[order, None]
    a, u = product(x, gate_weights.transpose(1, 2)), product(x, up_weights.transpose(1, 2))
    sigmoid = torch.sigmoid(a)
    h = a * sigmoid * u
    grad_weights = (grad_row * product(h, down_weights.transpose(1, 2))).sum(dim=-1, keepdim=True)
    grad_h = product(grad_y, down_weights)
    grad_u = grad_h * a * sigmoid
    grad_a = grad_h * u * sigmoid * (1 + a * (1 - sigmoid))
    grad_x = product(grad_a, gate_weights) + product(grad_u, up_weights)
    return (
        unsorted(grad_x).sum(dim=1),
        unsorted(grad_weights).squeeze(-1),
        outer(grad_a, x),
        outer(grad_u, x),
        outer(grad_y, h),
    )


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    tokens, width, experts = workload.tokens, workload.width, workload.experts

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float32, device=device)

    return (
        normal(tokens, width),
        normal(tokens, width),
        torch.rand(tokens, experts, device=device).argsort(dim=-1)[:, : workload.top_k].contiguous(),
        normal(tokens, workload.top_k).softmax(dim=-1),
        normal(experts, workload.expert_width, width).mul_(0.02),
        normal(experts, workload.expert_width, width).mul_(0.02),
        normal(experts, width, workload.expert_width).mul_(0.02),
    )


def cost(workload: Workload) -> Cost:
    """Eight products per pair: ⟨g, y⟩ equals ⟨Dᵀ g, h⟩, which saves y."""
    tokens, width = workload.tokens, workload.width
    pairs, matrix = tokens * workload.top_k, workload.expert_width * width
    matrices = 4 * 3 * workload.experts * matrix
    return Cost(
        bytes_read=matrices + 2 * 4 * tokens * width + (8 + 4) * pairs,
        bytes_written=matrices + 4 * tokens * width + 4 * pairs,
        flops={"fp32_matrix": 8 * 2 * pairs * matrix},
    )
