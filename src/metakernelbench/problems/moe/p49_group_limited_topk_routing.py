"""The router of Ring-flash-2.0: sigmoid scores, a selection bias, group-limited top-8 of 256 experts.

Inputs (full workload: 16384 tokens, width 4096, 256 experts in 8 groups of 32):

    hidden_states          [16384, 4096]  bf16   standard normal; rows whose selection is too close are drawn again
    weight                 [256, 4096]    bf16   standard normal / 64
    expert_bias            [256]          bf16   standard normal: as large as the scores, or larger
    routed_scaling_factor  2.5            float  the same in every draw

Outputs:

    topk_indices  [16384, 8]  int64  the selected experts, in descending order of their biased scores
    topk_weights  [16384, 8]  fp32   their weights, in the same order

The bias only steers the selection: a group of consecutive experts is ranked by the sum of its two best biased scores,
the four best groups stay, and the eight best biased scores within them are selected. The weights are the unbiased
scores of the selected experts, divided by their sum and multiplied by the scaling factor.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats.stable_rows import draw_stable_rows, gap_below
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "Route tokens to experts by sigmoid scores: bias-corrected selection limited to 4 of 8 expert groups, ordered "
    "top-8, normalised and scaled weights."
)

PROVENANCE = Provenance(
    upstream="own formulation; subject and sizes after SOL-ExecBench L2 row 48, workload 7, as used by MetaKernelBench",
    licence="upstream: NVIDIA Evaluation Dataset License; this formulation: Apache-2.0",
    source_model="Ring-flash-2.0",
    inferred=(
        "sigmoid as the score function: after the public BailingMoeV2 gate",
        "masking of the other groups with minus infinity: after the public BailingMoeV2 gate",
        "1e-20 added to the sum of the selected scores: after the public BailingMoeV2 gate",
    ),
)

GROUPS = 8
KEPT_GROUPS = 4
TOP_K = 8
SUM_EPS = 1e-20
MARGIN = 1e-4
"""Two scores that decide something are at least this far apart; rounding moves them by about 1e-6."""


@dataclass(frozen=True)
class Workload:
    tokens: int
    width: int
    experts: int


FULL = Workload(tokens=16384, width=4096, experts=256)
SMOKE = Workload(tokens=12, width=32, experts=32)

OUTPUTS = ("topk_indices", "topk_weights")

ROUTED_SCALING_FACTOR = 2.5


def _group_scores(biased: torch.Tensor) -> torch.Tensor:
    """[tokens, groups]: the sum of the two best biased scores of every group."""
    return biased.view(len(biased), GROUPS, -1).topk(2, dim=-1).values.sum(dim=-1)


def _within_best_groups(biased: torch.Tensor) -> torch.Tensor:
    """The biased scores, with minus infinity outside the groups that are kept."""
    best = _group_scores(biased).topk(KEPT_GROUPS, dim=-1).indices
    kept = torch.zeros(*biased.shape[:-1], GROUPS, dtype=torch.bool, device=biased.device).scatter(-1, best, True)
    return biased.masked_fill(~kept.repeat_interleave(biased.shape[-1] // GROUPS, dim=-1), float("-inf"))


def _scores(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    compute = wide(hidden_states)
    return (hidden_states.to(compute) @ weight.to(compute).t()).sigmoid()


def reference(
    hidden_states: torch.Tensor, weight: torch.Tensor, expert_bias: torch.Tensor, routed_scaling_factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _scores(hidden_states, weight)
    biased = scores + expert_bias.to(scores.dtype)
    topk_indices = _within_best_groups(biased).topk(TOP_K, dim=-1, sorted=True).indices
    selected = scores.gather(-1, topk_indices)
    topk_weights = selected / (selected.sum(dim=-1, keepdim=True) + SUM_EPS) * routed_scaling_factor
    return topk_indices, topk_weights


def _unstable(hidden_states: torch.Tensor, weight: torch.Tensor, expert_bias: torch.Tensor) -> torch.Tensor:
    """Rows where the last kept group, or the place of any selected expert, is decided by less than the margin."""
    scores = _scores(hidden_states, weight)
    biased = scores + expert_bias.to(scores.dtype)
    ranked = _within_best_groups(biased).topk(TOP_K + 1, dim=-1).values
    close_experts = (ranked[..., :-1] - ranked[..., 1:] < MARGIN).any(dim=-1)
    return close_experts | (gap_below(_group_scores(biased), KEPT_GROUPS) < MARGIN)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    weight = normal(workload.experts, workload.width) / workload.width**0.5
    expert_bias = normal(workload.experts)
    hidden_states = draw_stable_rows(
        workload.tokens,
        draw=lambda rows: normal(rows, workload.width),
        unstable=lambda rows: _unstable(rows, weight, expert_bias),
    )
    return hidden_states, weight, expert_bias, ROUTED_SCALING_FACTOR


def cost(workload: Workload) -> Cost:
    tokens, width, experts = workload.tokens, workload.width, workload.experts
    return Cost(
        bytes_read=2 * (tokens * width + experts * width + experts),
        bytes_written=(8 + 4) * tokens * TOP_K,
        flops={"bf16": 2 * tokens * width * experts},
    )
