"""One expert-parallel rank of a DeepSeek-V3 mixture layer: routing over all experts, FP8 experts of this rank only.

Inputs (full workload: 14107 tokens, 256 experts of which 32 are local, width 7168, expert width 2048, scale block 128):

    routing_logits         [14107, 256]      fp32   0.656 * standard normal - 1.6706, as bf16 values; close rows redrawn
    routing_bias           [256]             bf16   4.96875 at 101 experts, 4.9375 elsewhere; the same in every draw
    hidden_states          [14107, 7168]     e4m3   standard normal, rounded
    hidden_states_scale    [56, 14107]       fp32   uniform in [0, 1); block first, token second
    gemm1_weights          [32, 4096, 7168]  e4m3   standard normal, rounded; rows: 2048 up, then 2048 gate
    gemm1_weights_scale    [32, 32, 56]      fp32   uniform in [0, 1); expert, row block, column block
    gemm2_weights          [32, 7168, 2048]  e4m3   standard normal, rounded
    gemm2_weights_scale    [32, 56, 16]      fp32   uniform in [0, 1); expert, row block, column block
    local_expert_offset    32                int    the first local expert; the same in every draw
    routed_scaling_factor  2.5               float  the same in every draw

Output: [14107, 7168] bf16; a row of zeros for a token without a local expert.

Scores are sigmoid(logits). For the selection the bias is added; each of 8 groups of consecutive experts is ranked by
the sum of its two best biased scores, the 4 best groups stay, and the 8 best biased scores within them are selected.
Weights are the unbiased scores of the selected experts, divided by their sum (plus 1e-20), times the factor, whether
the experts are local or not. A local expert multiplies the dequantised token with its dequantised first matrix, takes
silu(gate) * up, and multiplies with its second matrix; outputs times weights are summed per token. Everything is
computed in the wide dtype of the logits and rounded once, at the end.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import silu

from metakernelbench.problems.formats.expert_slots import slots_of
from metakernelbench.problems.formats.stable_rows import draw_stable_rows, gap_below
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "Route tokens by bias-corrected, group-limited top-8 of 256 experts and apply this rank's 32 SwiGLU experts, all "
    "in FP8 with 128-wide block scales."
)

PROVENANCE = Provenance(
    upstream="FlashInfer-Trace",
    definition="moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048",
    record="5e8dc11c-f2a9-42d5-8dce-9419cbf34d5d",
    licence="Apache-2.0",
    source_model="DeepSeek-V3 / R1",
    inferred=("the law of the logits: normal with the moments of the record's, on the bf16 grid",),
)

GROUPS = 8
KEPT_GROUPS = 4
TOP_K = 8
BLOCK = 128
SUM_EPS = 1e-20
MARGIN = 1e-4
"""Two biased scores that decide something are at least this far apart; fp32 resolves 4.8e-7 there."""
LOW_BIAS, HIGH_BIAS = 4.9375, 4.96875
# fmt: off
HIGH_BIAS_EXPERTS = (
    3, 6, 7, 9, 10, 11, 16, 17, 18, 23, 30, 31, 36, 37, 41, 42, 43, 44, 46, 47, 48, 49, 54, 55, 56, 58, 61, 62, 63, 66,
    67, 68, 69, 72, 74, 75, 79, 80, 81, 82, 83, 84, 87, 90, 92, 96, 100, 101, 102, 104, 105, 108, 109, 110, 112, 114,
    119, 120, 123, 125, 126, 127, 131, 136, 147, 151, 152, 153, 154, 157, 159, 167, 170, 171, 174, 183, 185, 195, 196,
    197, 200, 203, 214, 216, 217, 219, 222, 223, 226, 230, 231, 234, 235, 236, 237, 238, 240, 241, 242, 243, 253,
)
# fmt: on


@dataclass(frozen=True)
class Workload:
    tokens: int
    experts: int
    local_experts: int
    local_offset: int
    width: int
    expert_width: int
    expected_local_tokens: int
    """Tokens with a local expert in a typical draw (simulated)."""
    expected_local_pairs: int
    """Pairs of a token and a local expert in a typical draw (simulated)."""


FULL = Workload(
    tokens=14107,
    experts=256,
    local_experts=32,
    local_offset=32,
    width=7168,
    expert_width=2048,
    expected_local_tokens=7490,
    expected_local_pairs=15430,
)
SMOKE = Workload(
    tokens=10,
    experts=32,
    local_experts=4,
    local_offset=4,
    width=256,
    expert_width=128,
    expected_local_tokens=5,
    expected_local_pairs=11,
)

OUTPUTS = ("output",)

FIXED = ("routing_bias",)


def _group_scores(biased: torch.Tensor) -> torch.Tensor:
    """[tokens, groups]: the sum of the two best biased scores of every group."""
    return biased.view(len(biased), GROUPS, -1).topk(2, dim=-1).values.sum(dim=-1)


def _within_best_groups(biased: torch.Tensor) -> torch.Tensor:
    """The biased scores, with minus infinity outside the groups that are kept."""
    best = _group_scores(biased).topk(KEPT_GROUPS, dim=-1).indices
    kept = torch.zeros(len(biased), GROUPS, dtype=torch.bool, device=biased.device).scatter(-1, best, True)
    return biased.masked_fill(~kept.repeat_interleave(biased.shape[-1] // GROUPS, dim=-1), float("-inf"))


def _route(logits: torch.Tensor, bias: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens, 8] each: the selected experts (in no particular order) and their weights."""
    scores = torch.sigmoid(logits.to(wide(logits)))
    selected = _within_best_groups(scores + bias.to(scores.dtype)).topk(TOP_K, dim=-1).indices
    chosen = scores.gather(-1, selected)
    return selected, chosen / (chosen.sum(dim=-1, keepdim=True) + SUM_EPS) * factor


def _blocks(scale: torch.Tensor) -> torch.Tensor:
    """A scale per block of rows and columns, spread over the elements of the last two axes."""
    return scale.repeat_interleave(BLOCK, dim=-2).repeat_interleave(BLOCK, dim=-1)


def reference(
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    local_expert_offset: int,
    routed_scaling_factor: float,
) -> torch.Tensor:
    compute = wide(routing_logits)
    selected, weights = _route(routing_logits, routing_bias, routed_scaling_factor)
    x = hidden_states.to(compute) * hidden_states_scale.to(compute).t().repeat_interleave(BLOCK, dim=1)
    output = torch.zeros_like(x)
    for local in range(len(gemm1_weights)):
        token, slot = torch.where(selected == local_expert_offset + local)
        if len(token) == 0:
            continue
        first = gemm1_weights[local].to(compute) * _blocks(gemm1_weights_scale[local].to(compute))
        second = gemm2_weights[local].to(compute) * _blocks(gemm2_weights_scale[local].to(compute))
        up, gate = (x[token] @ first.t()).chunk(2, dim=-1)
        output.index_add_(0, token, ((silu(gate) * up) @ second.t()) * weights[token, slot, None])
    return output.to(routing_bias.dtype)


def vectorized(
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    local_expert_offset: int,
    routed_scaling_factor: float,
) -> torch.Tensor:
    """All local experts in two batched products, each padded to the busiest expert; only tokens with local work."""
    compute, local_experts = wide(routing_logits), len(gemm1_weights)
    selected, weights = _route(routing_logits, routing_bias, routed_scaling_factor)
    local = selected - local_expert_offset
    token, slot = torch.where((local >= 0) & (local < local_experts))
    slots = slots_of(local[token, slot], local_experts)
    scale = hidden_states_scale.t()[token].to(compute).repeat_interleave(BLOCK, dim=1)
    rows = slots.fill(hidden_states[token].to(compute) * scale)
    first = gemm1_weights.to(compute) * _blocks(gemm1_weights_scale.to(compute))
    up, gate = torch.bmm(rows, first.transpose(1, 2)).chunk(2, dim=-1)
    second = gemm2_weights.to(compute) * _blocks(gemm2_weights_scale.to(compute))
    expert_out = slots.read(torch.bmm(silu(gate) * up, second.transpose(1, 2)))
    output = expert_out.new_zeros(hidden_states.shape)
    output.index_add_(0, token, expert_out * weights[token, slot, None])
    return output.to(routing_bias.dtype)


def _unstable(logits: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Rows where the last kept group or the last selected expert is decided by less than the margin."""
    biased = torch.sigmoid(logits) + bias.to(logits.dtype)
    close_groups = gap_below(_group_scores(biased), KEPT_GROUPS) < MARGIN
    return close_groups | (gap_below(_within_best_groups(biased), TOP_K) < MARGIN)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    tokens, width, expert_width = workload.tokens, workload.width, workload.expert_width
    local = workload.local_experts

    def e4m3(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(torch.float8_e4m3fn)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device=device)

    bias = torch.full((workload.experts,), LOW_BIAS, dtype=torch.bfloat16, device=device)
    bias[[expert for expert in HIGH_BIAS_EXPERTS if expert < workload.experts]] = HIGH_BIAS
    logits = draw_stable_rows(
        tokens,
        draw=lambda rows: (
            (torch.randn(rows, workload.experts, device=device) * 0.6560 - 1.6706).to(torch.bfloat16).to(torch.float32)
        ),
        unstable=lambda rows: _unstable(rows, bias),
    )
    return (
        logits,
        bias,
        e4m3(tokens, width),
        uniform(width // BLOCK, tokens),
        e4m3(local, 2 * expert_width, width),
        uniform(local, 2 * expert_width // BLOCK, width // BLOCK),
        e4m3(local, width, expert_width),
        uniform(local, width // BLOCK, expert_width // BLOCK),
        workload.local_offset,
        2.5,
    )


def cost(workload: Workload) -> Cost:
    """Activations are counted for the tokens with local work only, in a typical draw."""
    width, expert_width = workload.width, workload.expert_width
    matrices = workload.local_experts * 3 * expert_width * width
    scales = 4 * matrices // BLOCK**2
    activations = workload.expected_local_tokens * (width + 4 * width // BLOCK)
    routing = 4 * workload.tokens * workload.experts + 2 * workload.experts
    return Cost(
        bytes_read=matrices + scales + activations + routing,
        bytes_written=2 * workload.tokens * width,
        flops={"fp8": 2 * workload.expected_local_pairs * 3 * expert_width * width},
    )
