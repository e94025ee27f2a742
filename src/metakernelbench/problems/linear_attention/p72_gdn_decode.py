"""One decode step of the gated delta rule (Qwen3-Next's gated DeltaNet at tensor parallelism 2) for 64 requests.

Inputs (full workload: 64 requests, 8 query and 8 key heads, 16 value heads, head size 128):

    q        [64, 1, 8, 128]     bf16   0.18 * standard normal; not normalised
    k        [64, 1, 8, 128]     bf16   0.13 * standard normal; not normalised
    v        [64, 1, 16, 128]    bf16   0.073 * standard normal
    state    [64, 16, 128, 128]  fp32   0.009 * standard normal; value channel first, key channel last
    A_log    [16]                fp32   the same in every draw
    a        [64, 1, 16]         bf16   1.33 + 1.56 * standard normal, rounded once
    dt_bias  [16]                fp32   the same in every draw
    b        [64, 1, 16]         bf16   0.4 + 1.38 * standard normal, rounded once
    scale    0.08838834764831843 float  the same in every draw

Outputs:

    output     [64, 1, 16, 128]    bf16
    new_state  [64, 16, 128, 128]  fp32  in the layout of `state`, which is left as it was

Value head h reads query head h·(query heads)/(value heads), rounded down, and its key head likewise. Per request and
value head, with S the state as (key × value): first S decays by exp(-exp(A_log)·softplus(a + dt_bias)); what the
decayed S predicts for the key, p = Sᵀk, is moved towards v by β = sigmoid(b); the prediction is replaced in S by the
moved value; the output is scale · Sᵀq, read from the updated state.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import softplus

from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = "Advance the gated delta rule state of 64 requests by one decode step and read one output per value head."

PROVENANCE = Provenance(
    upstream="FlashInfer-Trace",
    definition="gdn_decode_qk8_v16_d128_k_last",
    record="35b0abd8-5892-44f2-a152-52cba6b59493",
    licence="Apache-2.0",
    source_model="Qwen3-Next-80B-A3B",
)

# fmt: off
A_LOG = (
    -0.169921875, 2.34375, 1.3359375, 2.1875, -0.9375, -1.09375, 1.765625, -0.443359375,
    0.91015625, -0.8125, 2.328125, 0.205078125, 1.375, 2.796875, -0.88671875, -1.3046875,
)
DT_BIAS = (
    -2.078125, -5.625, -4.3125, -3.421875, -3.796875, -3.296875, -4.375, -6.25,
    -3.703125, -0.2890625, -5.21875, -6.1875, -3.046875, -5.0625, -4.875, -5.34375,
)
# fmt: on


@dataclass(frozen=True)
class Workload:
    batch: int
    query_heads: int
    key_heads: int
    value_heads: int
    size: int
    scale: float


FULL = Workload(batch=64, query_heads=8, key_heads=8, value_heads=16, size=128, scale=0.08838834764831843)
SMOKE = Workload(batch=3, query_heads=2, key_heads=2, value_heads=4, size=16, scale=0.25)

OUTPUTS = ("output", "new_state")

FIXED = ("A_log", "dt_bias")


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    compute = wide(q)
    requests, value_heads = state.shape[:2]
    queries = q[:, 0].to(compute).repeat_interleave(value_heads // q.shape[2], dim=1)
    keys = k[:, 0].to(compute).repeat_interleave(value_heads // k.shape[2], dim=1)
    values = v[:, 0].to(compute)
    step_size = softplus(a[:, 0].to(compute) + dt_bias.to(compute))
    decay = torch.exp(-torch.exp(A_log.to(compute)) * step_size)
    beta = torch.sigmoid(b[:, 0].to(compute))

    output = torch.empty_like(values)
    new_state = torch.empty_like(state, dtype=compute)
    for request in range(requests):
        for head in range(value_heads):
            key = keys[request, head]
            strength = beta[request, head]
            S = decay[request, head] * state[request, head].to(compute).t()
            predicted = key @ S
            corrected = strength * values[request, head] + (1 - strength) * predicted
            S = S - torch.outer(key, predicted) + torch.outer(key, corrected)
            output[request, head] = scale * (queries[request, head] @ S)
            new_state[request, head] = S.t()
    return output.unsqueeze(1).to(q.dtype), new_state


def vectorized(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All requests and heads at once, in the state's own layout, with one outer product instead of two."""
    compute = wide(q)
    value_heads = state.shape[1]
    queries = q[:, 0].to(compute).repeat_interleave(value_heads // q.shape[2], dim=1)
    keys = k[:, 0].to(compute).repeat_interleave(value_heads // k.shape[2], dim=1)
    decay = torch.exp(-torch.exp(A_log.to(compute)) * softplus(a[:, 0].to(compute) + dt_bias.to(compute)))
    beta = torch.sigmoid(b[:, 0].to(compute))

    new_state = state.to(compute) * decay[:, :, None, None]
    predicted = (new_state @ keys.unsqueeze(-1)).squeeze(-1)
    correction = beta.unsqueeze(-1) * (v[:, 0].to(compute) - predicted)
    new_state = new_state + correction.unsqueeze(-1) * keys.unsqueeze(-2)
    output = scale * (new_state @ queries.unsqueeze(-1)).squeeze(-1)
    return output.unsqueeze(1).to(q.dtype), new_state


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    batch, value_heads, size = workload.batch, workload.value_heads, workload.size

    def half(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    def single(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float32, device=device)

    q = 0.18 * half(batch, 1, workload.query_heads, size)
    k = 0.13 * half(batch, 1, workload.key_heads, size)
    v = 0.073 * half(batch, 1, value_heads, size)
    state = 0.009 * single(batch, value_heads, size, size)
    A_log = torch.tensor(A_LOG[:value_heads], dtype=torch.float32, device=device)
    a = (1.33 + 1.56 * single(batch, 1, value_heads)).to(torch.bfloat16)
    dt_bias = torch.tensor(DT_BIAS[:value_heads], dtype=torch.float32, device=device)
    b = (0.4 + 1.38 * single(batch, 1, value_heads)).to(torch.bfloat16)
    return q, k, v, state, A_log, a, dt_bias, b, workload.scale


def cost(workload: Workload) -> Cost:
    batch, value_heads, size = workload.batch, workload.value_heads, workload.size
    state = 4 * batch * value_heads * size * size
    values = 2 * batch * value_heads * size
    queries_and_keys = 2 * batch * (workload.query_heads + workload.key_heads) * size
    gates = 2 * 2 * batch * value_heads + 2 * 4 * value_heads
    return Cost(
        bytes_read=state + values + queries_and_keys + gates,
        bytes_written=state + values,
        flops={"fp32": 6 * batch * value_heads * size * size},
    )
