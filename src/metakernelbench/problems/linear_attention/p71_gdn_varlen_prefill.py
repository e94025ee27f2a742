"""Gated delta rule prefill over four packed sequences (Qwen3-Next's gated DeltaNet at tensor parallelism 2).

Inputs (full workload: 959 tokens in 4 sequences, 8 query and 8 key heads, 16 value heads, head size 128):

    q           [959, 8, 128]       bf16   standard normal, divided by its norm in fp32, rounded once
    k           [959, 8, 128]       bf16   likewise
    v           [959, 16, 128]      bf16   0.041 * standard normal
    state       [4, 16, 128, 128]   fp32   128^-½ * standard normal; value channel first, key channel last
    A_log       [16]                fp32   the same in every draw
    a           [959, 16]           bf16   -0.12 + 1.26 * standard normal, rounded once
    dt_bias     [16]                fp32   the same in every draw
    b           [959, 16]           bf16   1.47 + 2.01 * standard normal, rounded once
    cu_seqlens  [5]                 int64  0, 19, 50, 940, 959: where each sequence begins, and the end; always
    scale       0.08838834764831843 float  the same in every draw

Outputs:

    output     [959, 16, 128]      bf16
    new_state  [4, 16, 128, 128]   fp32  in the layout of `state`, which is left as it was

Value head h reads query head h·(query heads)/(value heads), rounded down, and its key head likewise. Each sequence
starts from its own state. Per value head and token, with S the state as (key × value): first S decays by
exp(-exp(A_log)·softplus(a + dt_bias)); what the decayed S predicts for the key, p = Sᵀk, is moved towards v by
β = sigmoid(b); the prediction is replaced in S by the moved value; the output is scale · Sᵀq, read from the updated
state. Everything is computed in float32; the output is rounded once.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn.functional import normalize, softplus

from metakernelbench.problems.formats.chunked import chunked_delta_rule
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "Gated delta rule prefill over four packed sequences of very different length, each with its own incoming and "
    "outgoing state."
)

PROVENANCE = Provenance(
    upstream="FlashInfer-Trace",
    definition="gdn_prefill_qk8_v16_d128_k_last",
    record="1a9da4c9-224e-4bfa-b221-fe1939ca5527",
    licence="Apache-2.0",
    source_model="Qwen3-Next-80B-A3B",
    inferred=("the non-zero incoming state, as MetaKernelBench adds it; the record's is zero",),
)

# fmt: off
A_LOG = (
    1.3984375, 1.203125, 2.203125, 0.1474609375, 1.46875, -0.6171875, 1.8125, -1.359375,
    0.50390625, 1.03125, 2.953125, 1.2890625, 1.3203125, 2.109375, 3.34375, 1.78125,
)
DT_BIAS = (
    -2.34375, -3.421875, -4.03125, -1.65625, -3.25, 2.046875, -5.625, -2.65625,
    -2.375, -2.984375, -2.328125, -4.09375, -4.25, -3.71875, -4.96875, -3.578125,
)
# fmt: on
NORM_EPS = 1e-12
CHUNK = 64
"""Tokens that `vectorized` handles at once."""


@dataclass(frozen=True)
class Workload:
    query_heads: int
    key_heads: int
    value_heads: int
    size: int
    boundaries: tuple[int, ...]
    scale: float


FULL = Workload(
    query_heads=8,
    key_heads=8,
    value_heads=16,
    size=128,
    boundaries=(0, 19, 50, 940, 959),
    scale=0.08838834764831843,
)
SMOKE = Workload(query_heads=2, key_heads=2, value_heads=4, size=16, boundaries=(0, 3, 8, 147, 150), scale=0.25)

OUTPUTS = ("output", "new_state")

FIXED = ("A_log", "dt_bias", "cu_seqlens")


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    compute, value_heads = wide(q), v.shape[1]
    queries = q.to(compute).repeat_interleave(value_heads // q.shape[1], dim=1)
    keys = k.to(compute).repeat_interleave(value_heads // k.shape[1], dim=1)
    values = v.to(compute)
    decay = torch.exp(-torch.exp(A_log.to(compute)) * softplus(a.to(compute) + dt_bias.to(compute)))
    beta = torch.sigmoid(b.to(compute))

    output = torch.empty_like(values)
    new_state = torch.empty_like(state, dtype=compute)
    boundaries = cu_seqlens.tolist()
    for sequence, (begin, end) in enumerate(pairwise(boundaries)):
        S = state[sequence].to(compute).transpose(-1, -2)
        for t in range(begin, end):
            key, strength = keys[t].unsqueeze(-1), beta[t].view(-1, 1, 1)
            S = decay[t].view(-1, 1, 1) * S
            predicted = key.transpose(-1, -2) @ S
            corrected = strength * values[t].unsqueeze(-2) + (1 - strength) * predicted
            S = S - key @ predicted + key @ corrected
            output[t] = scale * (queries[t].unsqueeze(-2) @ S).squeeze(-2)
        new_state[sequence] = S.transpose(-1, -2)
    return output.to(q.dtype), new_state


def vectorized(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All sequences side by side, padded to the longest, in chunks of 64; padding neither decays nor writes."""
    compute, value_heads = wide(q), v.shape[1]
    lengths = cu_seqlens.diff()
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=q.device), lengths)
    place = torch.arange(len(q), device=q.device) - cu_seqlens[sequence]
    longest = int(lengths.max())

    def side_by_side(x: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, ...] → [sequences, value heads, longest, ...]"""
        x = x.to(compute).repeat_interleave(value_heads // x.shape[1], dim=1)
        padded = x.new_zeros(len(lengths), longest, *x.shape[1:])
        padded[sequence, place] = x
        return padded.transpose(1, 2)

    log_decay = -torch.exp(A_log.to(compute)) * softplus(a.to(compute) + dt_bias.to(compute))
    output, new_state = chunked_delta_rule(
        side_by_side(q) * scale,
        side_by_side(k),
        side_by_side(v),
        side_by_side(log_decay.unsqueeze(-1)),
        side_by_side(torch.sigmoid(b.to(compute))),
        state.to(compute).transpose(-1, -2),
        CHUNK,
    )
    return output.transpose(1, 2)[sequence, place].to(q.dtype), new_state.transpose(-1, -2)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    tokens, value_heads, size = workload.boundaries[-1], workload.value_heads, workload.size

    def single(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float32, device=device)

    def unit(heads: int) -> torch.Tensor:
        return normalize(single(tokens, heads, size), dim=-1, eps=NORM_EPS).to(torch.bfloat16)

    return (
        unit(workload.query_heads),
        unit(workload.key_heads),
        0.041 * torch.randn(tokens, value_heads, size, dtype=torch.bfloat16, device=device),
        size**-0.5 * single(len(workload.boundaries) - 1, value_heads, size, size),
        torch.tensor(A_LOG[:value_heads], dtype=torch.float32, device=device),
        (-0.12 + 1.26 * single(tokens, value_heads)).to(torch.bfloat16),
        torch.tensor(DT_BIAS[:value_heads], dtype=torch.float32, device=device),
        (1.47 + 2.01 * single(tokens, value_heads)).to(torch.bfloat16),
        torch.tensor(workload.boundaries, dtype=torch.int64, device=device),
        workload.scale,
    )


def cost(workload: Workload) -> Cost:
    """FLOPs: per token, two contractions on the way to the float32 state, and one for the bf16 output."""
    tokens, value_heads, size = workload.boundaries[-1], workload.value_heads, workload.size
    state = 4 * (len(workload.boundaries) - 1) * value_heads * size * size
    values = 2 * tokens * value_heads * size
    queries_and_keys = 2 * tokens * (workload.query_heads + workload.key_heads) * size
    gates = 2 * 2 * tokens * value_heads + 2 * 4 * value_heads + 8 * len(workload.boundaries)
    contraction = 2 * tokens * value_heads * size * size
    return Cost(
        bytes_read=state + values + queries_and_keys + gates,
        bytes_written=state + values,
        flops={"fp32_matrix": 2 * contraction, "bf16": contraction},
    )
