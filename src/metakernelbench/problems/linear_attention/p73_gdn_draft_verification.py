"""Gated delta rule over four draft tokens of 32 requests, from states in a pool (Qwen3-Next, speculative decoding).

Inputs (full workload: 32 requests, 4 tokens, a pool of 49 states, 8 query and 8 key heads, 16 value heads, size 128):

    q                      [32, 4, 8, 128]      bf16   0.63 * standard normal; not normalised
    k                      [32, 4, 8, 128]      bf16   0.26 * standard normal; not normalised
    v                      [32, 4, 16, 128]     bf16   0.13 * standard normal
    initial_state          [49, 16, 128, 128]   fp32   0.0215 * standard normal; value channel first, key channel last
    initial_state_indices  [32]                 int32  distinct rows of the pool, at random
    A_log                  [16]                 fp32   the same in every draw
    a                      [32, 4, 16]          bf16   0.82 + 2.24 * standard normal, rounded once
    dt_bias                [16]                 fp32   the same in every draw
    b                      [32, 4, 16]          bf16   0.45 + 2.02 * standard normal, rounded once
    scale                  0.08838834764831843  float  the same in every draw

Outputs:

    output       [32, 4, 16, 128]    bf16
    final_state  [49, 16, 128, 128]  fp32  the pool, without any update; it may be the input tensor itself

Value head h reads query head h·(query heads)/(value heads), rounded down, and its key head likewise. A request starts
from its row of the pool and advances over its four tokens; the advanced states are thrown away. Per value head and
token, with S the state as (key × value): first S decays by exp(-exp(A_log)·softplus(a + dt_bias)); what the decayed S
predicts for the key, p = Sᵀk, is moved towards v by β = sigmoid(b); the prediction is replaced in S by the moved value;
the output is scale · Sᵀq, read from the updated state. Everything is computed in float32; the output is rounded once.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import softplus

from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "Gated delta rule over four draft tokens of 32 requests whose initial states lie in a pool addressed by index; the "
    "pool is handed back unchanged."
)

PROVENANCE = Provenance(
    upstream="FlashInfer-Trace",
    definition="gdn_mtp_qk8_v16_d128_k_last",
    record="4c266399-6168-447d-b374-cfb1234e296c",
    licence="Apache-2.0",
    source_model="Qwen3-Next-80B-A3B",
)

# fmt: off
A_LOG = (
    -1.046875, -0.5234375, -1.828125, -1.15625, -0.0244140625, 0.28515625, -1.9921875, -2.0,
    0.11962890625, 0.3671875, -1.59375, -1.34375, 0.333984375, -1.640625, -0.5234375, -0.2890625,
)
DT_BIAS = (
    -5.25, -5.75, -2.015625, -3.3125, -6.25, -6.65625, -0.88671875, -0.6328125,
    -4.8125, -5.28125, -1.7578125, -3.484375, 2.3125, -6.40625, -6.34375, -6.75,
)
# fmt: on


@dataclass(frozen=True)
class Workload:
    batch: int
    tokens: int
    pool: int
    query_heads: int
    key_heads: int
    value_heads: int
    size: int
    scale: float


FULL = Workload(
    batch=32, tokens=4, pool=49, query_heads=8, key_heads=8, value_heads=16, size=128, scale=0.08838834764831843
)
SMOKE = Workload(batch=3, tokens=4, pool=5, query_heads=2, key_heads=2, value_heads=4, size=16, scale=0.25)

OUTPUTS = ("output", "final_state")

FIXED = ("A_log", "dt_bias")


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    compute = wide(q)
    batch, tokens, value_heads = v.shape[:3]
    queries = q.to(compute).repeat_interleave(value_heads // q.shape[2], dim=2)
    keys = k.to(compute).repeat_interleave(value_heads // k.shape[2], dim=2)
    values = v.to(compute)
    decay = torch.exp(-torch.exp(A_log.to(compute)) * softplus(a.to(compute) + dt_bias.to(compute)))
    beta = torch.sigmoid(b.to(compute))

    output = torch.empty_like(values)
    for request in range(batch):
        states = initial_state[int(initial_state_indices[request])].to(compute)
        for head in range(value_heads):
            S = states[head].t()
            for t in range(tokens):
                key, strength = keys[request, t, head], beta[request, t, head]
                S = decay[request, t, head] * S
                predicted = key @ S
                corrected = strength * values[request, t, head] + (1 - strength) * predicted
                S = S - torch.outer(key, predicted) + torch.outer(key, corrected)
                output[request, t, head] = scale * (queries[request, t, head] @ S)
    return output.to(q.dtype), initial_state.clone()


def vectorized(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All requests and heads at once, in the state's own layout; the pool is returned as it is."""
    compute, value_heads = wide(q), v.shape[2]
    queries = q.to(compute).repeat_interleave(value_heads // q.shape[2], dim=2)
    keys = k.to(compute).repeat_interleave(value_heads // k.shape[2], dim=2)
    values = v.to(compute)
    decay = torch.exp(-torch.exp(A_log.to(compute)) * softplus(a.to(compute) + dt_bias.to(compute)))
    beta = torch.sigmoid(b.to(compute))

    state = initial_state[initial_state_indices].to(compute)
    outputs = []
    for t in range(v.shape[1]):
        state = state * decay[:, t, :, None, None]
        predicted = (state @ keys[:, t].unsqueeze(-1)).squeeze(-1)
        correction = beta[:, t].unsqueeze(-1) * (values[:, t] - predicted)
        state = state + correction.unsqueeze(-1) * keys[:, t].unsqueeze(-2)
        outputs.append(scale * (state @ queries[:, t].unsqueeze(-1)).squeeze(-1))
    return torch.stack(outputs, dim=1).to(q.dtype), initial_state


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    batch, tokens, value_heads, size = workload.batch, workload.tokens, workload.value_heads, workload.size

    def half(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    def single(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float32, device=device)

    return (
        0.63 * half(batch, tokens, workload.query_heads, size),
        0.26 * half(batch, tokens, workload.key_heads, size),
        0.13 * half(batch, tokens, value_heads, size),
        0.0215 * single(workload.pool, value_heads, size, size),
        torch.randperm(workload.pool, device=device)[:batch].to(torch.int32),
        torch.tensor(A_LOG[:value_heads], dtype=torch.float32, device=device),
        (0.82 + 2.24 * single(batch, tokens, value_heads)).to(torch.bfloat16),
        torch.tensor(DT_BIAS[:value_heads], dtype=torch.float32, device=device),
        (0.45 + 2.02 * single(batch, tokens, value_heads)).to(torch.bfloat16),
        workload.scale,
    )


def cost(workload: Workload) -> Cost:
    """The pool that is handed back costs nothing, as it may be the input itself; the rows in use are read once."""
    steps, value_heads, size = workload.batch * workload.tokens, workload.value_heads, workload.size
    states = 4 * workload.batch * value_heads * size * size
    values = 2 * steps * value_heads * size
    queries_and_keys = 2 * steps * (workload.query_heads + workload.key_heads) * size
    gates = 2 * 2 * steps * value_heads + 2 * 4 * value_heads
    return Cost(
        bytes_read=states + values + queries_and_keys + gates + 4 * workload.batch,
        bytes_written=values,
        flops={"fp32": 6 * steps * value_heads * size * size},
    )
