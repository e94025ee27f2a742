"""A Qwen3-Coder mixture layer with fixed expert capacity: what overflows an expert's buffer is dropped.

Inputs (full workload: 8192 tokens, width 6144, 160 experts of width 2560, 8 per token):

    hidden_states        [8192, 6144]       bf16   standard normal
    selected_experts     [8192, 8]          int64  the 8 largest of (popularity + Gumbel noise), in descending order
    routing_weights      [8192, 8]          bf16   uniform in [0, 1), each row divided by its sum
    expert_gate_weights  [160, 6144, 2560]  bf16   standard normal / sqrt(6144); expert, in, out
    expert_up_weights    [160, 6144, 2560]  bf16   likewise
    expert_down_weights  [160, 2560, 6144]  bf16   standard normal / sqrt(2560); expert, in, out

Output: [8192, 6144] bf16; a row of zeros for a token whose pairs are all dropped.

Every expert takes at most C = ceil(5/4 · tokens · 8 / experts) pairs of a token and one of its experts (512 at full
size): the first C in the order of the tokens. An expert computes silu(x · gate) * (x · up), then · down; each product,
the silu and the elementwise product are rounded to bf16. A token's result is the sum of its surviving pairs' outputs
times their routing weights, in float32, rounded once; weights are not renormalised after a drop.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import one_hot, silu

from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "Place tokens into fixed-capacity buffers of their experts, dropping what overflows, run all experts as batched "
    "SwiGLU, and combine what survived."
)

PROVENANCE = Provenance(
    upstream="own formulation; subject and sizes after SOL-ExecBench L2 row 11, workload 8, as used by MetaKernelBench",
    licence="upstream: NVIDIA Evaluation Dataset License; this formulation: Apache-2.0",
    source_model="Qwen3-Coder-480B-A35B",
    inferred=(
        "capacity factor 5/4: the default of the Switch Transformer, which gives exactly 512 at these sizes",
        "pairs survive in the order of the tokens: the usual policy of dropping by position",
        "weights are not renormalised after drops, and are combined in float32 with one rounding: chosen",
        "hidden states are standard normal: after the pattern of the other problems",
        "routing weights are uniform and normalised per row: norm_topk_prob of Qwen3-Coder",
        "weights are divided by the square root of their input width: after the visible scaling argument",
    ),
)

CAPACITY_NUMERATOR, CAPACITY_DENOMINATOR = 5, 4


@dataclass(frozen=True)
class Workload:
    tokens: int
    width: int
    experts: int
    expert_width: int
    top_k: int
    popularity_std: float
    """Spread of the experts' popularity: the larger it is, the more pairs overflow."""
    expected_survivors: int
    """Pairs that survive in a typical draw (simulated)."""


FULL = Workload(
    tokens=8192,
    width=6144,
    experts=160,
    expert_width=2560,
    top_k=8,
    popularity_std=0.5,
    expected_survivors=58_200,
)
SMOKE = Workload(tokens=16, width=32, experts=4, expert_width=16, top_k=2, popularity_std=1.5, expected_survivors=28)

OUTPUTS = ("output",)


def _capacity(pairs: int, experts: int) -> int:
    """5/4 of the average load, rounded up in integers."""
    return -(-CAPACITY_NUMERATOR * pairs // (CAPACITY_DENOMINATOR * experts))


def reference(
    hidden_states: torch.Tensor,
    selected_experts: torch.Tensor,
    routing_weights: torch.Tensor,
    expert_gate_weights: torch.Tensor,
    expert_up_weights: torch.Tensor,
    expert_down_weights: torch.Tensor,
) -> torch.Tensor:
    compute = wide(hidden_states)
    tokens, width = hidden_states.shape
    experts, top_k = len(expert_gate_weights), selected_experts.shape[1]
    capacity = _capacity(tokens * top_k, experts)

    pair_expert = selected_experts.flatten()
    taken = one_hot(pair_expert, experts).cumsum(dim=0)
    rank = taken.gather(1, pair_expert.unsqueeze(1)).squeeze(1) - 1
    survives = rank < capacity
    token = torch.arange(tokens, device=hidden_states.device).repeat_interleave(top_k)

    buffer = hidden_states.new_zeros(experts, capacity, width)
    buffer[pair_expert[survives], rank[survives]] = hidden_states[token[survives]]
    hidden = silu(torch.bmm(buffer, expert_gate_weights)) * torch.bmm(buffer, expert_up_weights)
    expert_out = torch.bmm(hidden, expert_down_weights)

    combined = torch.zeros(tokens, width, dtype=compute, device=hidden_states.device)
    for slot in range(top_k):
        expert, place = pair_expert.view(tokens, top_k)[:, slot], rank.view(tokens, top_k)[:, slot]
        kept = survives.view(tokens, top_k)[:, slot]
        weight = torch.where(kept, routing_weights[:, slot], 0).to(compute)
        combined += weight.unsqueeze(1) * expert_out[expert, place.clamp(max=capacity - 1)].to(compute)
    return combined.to(hidden_states.dtype)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    tokens, experts, top_k = workload.tokens, workload.experts, workload.top_k
    width, expert_width = workload.width, workload.expert_width

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device) * scale

    hidden_states = normal(tokens, width)
    popularity = workload.popularity_std * torch.randn(experts, device=device)
    gumbel = -torch.log(-torch.log(torch.rand(tokens, experts, device=device)))
    selected_experts = (popularity + gumbel).topk(top_k, dim=-1).indices
    routing_weights = torch.rand(tokens, top_k, dtype=torch.bfloat16, device=device)
    routing_weights = routing_weights / routing_weights.sum(dim=-1, keepdim=True)
    return (
        hidden_states,
        selected_experts,
        routing_weights,
        normal(experts, width, expert_width, scale=width**-0.5),
        normal(experts, width, expert_width, scale=width**-0.5),
        normal(experts, expert_width, width, scale=expert_width**-0.5),
    )


def cost(workload: Workload) -> Cost:
    """FLOPs are counted for the pairs that survive in a typical draw."""
    tokens, width = workload.tokens, workload.width
    matrices = 3 * width * workload.expert_width
    pairs = tokens * workload.top_k
    return Cost(
        bytes_read=2 * workload.experts * matrices + 2 * tokens * width + (8 + 2) * pairs,
        bytes_written=2 * tokens * width,
        flops={"bf16": 2 * workload.expected_survivors * matrices},
    )
