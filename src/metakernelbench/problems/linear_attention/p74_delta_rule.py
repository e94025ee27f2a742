"""DeltaNet's delta rule without decay: every token corrects the state by one rank-one term.

Inputs (full workload: batch 8, 16 heads, 1024 tokens, key and value size 128):

    q              [8, 16, 1024, 128]  bf16  standard normal; heads before time
    k              [8, 16, 1024, 128]  bf16  standard normal
    v              [8, 16, 1024, 128]  bf16  standard normal
    beta           [8, 16, 1024]       bf16  sigmoid of a standard normal, in bf16
    initial_state  [8, 16, 128, 128]   fp32  standard normal; key channel first, value channel last

Outputs:

    output       [8, 16, 1024, 128]  bf16
    final_state  [8, 16, 128, 128]   fp32

Queries and keys are divided by max(‖x‖₂, 1e-12) over their last axis; queries are multiplied by (key size)^-½. Per
head, from S = initial_state (key × value), each token does S ← S + k ⊗ β(v − Sᵀk) and gives Sᵀq. Everything is computed
in float32; the output is rounded once. `initial_state` is left as it was. Nothing decays: errors in the state stay.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import normalize

from metakernelbench.problems.formats.chunked import chunked_delta_rule
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "Delta rule without decay: every token corrects the state by one rank-one term, from a given state, and the final "
    "state is returned."
)

PROVENANCE = Provenance(
    upstream="flash-linear-attention: naive delta-rule recurrence; inputs in the manner of its delta-rule op test",
    licence="MIT",
    source_model="DeltaNet",
)

NORM_EPS = 1e-12
CHUNK = 64
"""Tokens that `vectorized` handles at once."""


@dataclass(frozen=True)
class Workload:
    batch: int
    heads: int
    length: int
    key_size: int
    value_size: int


FULL = Workload(batch=8, heads=16, length=1024, key_size=128, value_size=128)
SMOKE = Workload(batch=2, heads=2, length=150, key_size=16, value_size=16)

OUTPUTS = ("output", "final_state")


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, initial_state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    compute = wide(q)
    length, key_size = q.shape[2:]
    queries = normalize(q.to(compute), dim=-1, eps=NORM_EPS) * key_size**-0.5
    keys = normalize(k.to(compute), dim=-1, eps=NORM_EPS)
    values, strength = v.to(compute), beta.to(compute)
    state = initial_state.to(compute)
    output = torch.empty_like(values)
    for t in range(length):
        predicted = torch.einsum("bhk,bhkv->bhv", keys[:, :, t], state)
        update = strength[:, :, t].unsqueeze(-1) * (values[:, :, t] - predicted)
        state = state + torch.einsum("bhk,bhv->bhkv", keys[:, :, t], update)
        output[:, :, t] = torch.einsum("bhk,bhkv->bhv", queries[:, :, t], state)
    return output.to(q.dtype), state


def vectorized(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, initial_state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """In chunks of 64: matrix products within all chunks at once, and a loop over chunks for the state only."""
    compute = wide(q)
    strength = beta.to(compute)
    output, state = chunked_delta_rule(
        normalize(q.to(compute), dim=-1, eps=NORM_EPS) * q.shape[-1] ** -0.5,
        normalize(k.to(compute), dim=-1, eps=NORM_EPS),
        v.to(compute),
        torch.zeros_like(strength).unsqueeze(-1),
        strength,
        initial_state.to(compute),
        CHUNK,
    )
    return output.to(q.dtype), state


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    batch, heads, length = workload.batch, workload.heads, workload.length

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    return (
        normal(batch, heads, length, workload.key_size),
        normal(batch, heads, length, workload.key_size),
        normal(batch, heads, length, workload.value_size),
        normal(batch, heads, length).sigmoid(),
        torch.randn(batch, heads, workload.key_size, workload.value_size, dtype=torch.float32, device=device),
    )


def cost(workload: Workload) -> Cost:
    """FLOPs: per token, two contractions on the way to the float32 state, and one for the bf16 output."""
    heads = workload.batch * workload.heads
    steps, matrix = heads * workload.length, workload.key_size * workload.value_size
    return Cost(
        bytes_read=2 * steps * (2 * workload.key_size + workload.value_size + 1) + 4 * heads * matrix,
        bytes_written=2 * steps * workload.value_size + 4 * heads * matrix,
        flops={"fp32_matrix": 4 * steps * matrix, "bf16": 2 * steps * matrix},
    )
