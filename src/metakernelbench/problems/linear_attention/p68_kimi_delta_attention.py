"""Kimi Delta Attention: the delta rule with an individual log-decay for every key channel.

Inputs (full workload: batch 8, 1024 tokens, 16 heads, key and value size 128):

    q     [8, 1024, 16, 128]  bf16  standard normal
    k     [8, 1024, 16, 128]  bf16  standard normal
    v     [8, 1024, 16, 128]  bf16  standard normal
    g     [8, 1024, 16, 128]  bf16  ln(sigmoid(standard normal)) / 16, rounded once: log-decay per key channel
    beta  [8, 1024, 16]       bf16  sigmoid of a standard normal, in bf16

Output: [8, 1024, 16, 128] bf16.

Queries and keys are divided by max(‖x‖₂, 1e-12) over their last axis; queries are multiplied by (key size)^-½. Value
head h reads query and key head h·(key heads)/(value heads), rounded down. Per value head, from a state S (key × value)
of zeros, each token multiplies row i of S by e^g_i, then does S ← S + (β k) ⊗ (v − Sᵀk), and gives Sᵀq. Everything is
computed in float32 and rounded once.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid, normalize

from metakernelbench.problems.formats.chunked import chunked_delta_rule
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = "Kimi Delta Attention: delta-rule state correction with an individual log-decay for every key channel."

PROVENANCE = Provenance(
    upstream="flash-linear-attention: naive recurrent KDA; inputs in the manner of its KDA op test",
    licence="MIT",
    source_model="Kimi Linear",
)

NORM_EPS = 1e-12
CHUNK = 64
"""Tokens that `vectorized` handles at once."""


@dataclass(frozen=True)
class Workload:
    batch: int
    length: int
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int


FULL = Workload(batch=8, length=1024, key_heads=16, value_heads=16, key_size=128, value_size=128)
SMOKE = Workload(batch=2, length=150, key_heads=2, value_heads=4, key_size=16, value_size=16)

OUTPUTS = ("output",)


def _heads(x: torch.Tensor, value_heads: int, compute: torch.dtype) -> torch.Tensor:
    """Normalised queries or keys, one head per value head."""
    return normalize(x.to(compute), dim=-1, eps=NORM_EPS).repeat_interleave(value_heads // x.shape[2], dim=2)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    compute = wide(v)
    batch, length, value_heads, value_size = v.shape
    key_size = k.shape[-1]
    queries = _heads(q, value_heads, compute) * key_size**-0.5
    keys = _heads(k, value_heads, compute)
    values, decay, strength = v.to(compute), g.to(compute).exp(), beta.to(compute)

    state = torch.zeros(batch, value_heads, key_size, value_size, dtype=compute, device=v.device)
    output = torch.empty_like(values)
    for t in range(length):
        state = state * decay[:, t].unsqueeze(-1)
        predicted = torch.einsum("bhk,bhkv->bhv", keys[:, t], state)
        update = strength[:, t].unsqueeze(-1) * keys[:, t]
        state = state + torch.einsum("bhk,bhv->bhkv", update, values[:, t] - predicted)
        output[:, t] = torch.einsum("bhk,bhkv->bhv", queries[:, t], state)
    return output.to(v.dtype)


def vectorized(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """In chunks of 64: matrix products within all chunks at once, and a loop over chunks for the state only."""
    compute, value_heads = wide(v), v.shape[2]
    queries = _heads(q, value_heads, compute) * k.shape[-1] ** -0.5
    keys = _heads(k, value_heads, compute)
    state = torch.zeros(len(v), value_heads, k.shape[-1], v.shape[-1], dtype=compute, device=v.device)
    output, _ = chunked_delta_rule(
        queries.transpose(1, 2),
        keys.transpose(1, 2),
        v.to(compute).transpose(1, 2),
        g.to(compute).transpose(1, 2),
        beta.to(compute).transpose(1, 2),
        state,
        CHUNK,
    )
    return output.transpose(1, 2).to(v.dtype)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    batch, length, value_heads = workload.batch, workload.length, workload.value_heads

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    return (
        normal(batch, length, workload.key_heads, workload.key_size),
        normal(batch, length, workload.key_heads, workload.key_size),
        normal(batch, length, value_heads, workload.value_size),
        (logsigmoid(torch.randn(batch, length, value_heads, workload.key_size, device=device)) / 16).to(torch.bfloat16),
        normal(batch, length, value_heads).sigmoid(),
    )


def cost(workload: Workload) -> Cost:
    """FLOPs: three contractions of every token with its state, which no algorithm that keeps a state can avoid."""
    steps = workload.batch * workload.length
    keys, values = workload.key_heads * workload.key_size, workload.value_heads * workload.value_size
    gates = workload.value_heads * (workload.key_size + 1)
    return Cost(
        bytes_read=2 * steps * (2 * keys + values + gates),
        bytes_written=2 * steps * values,
        flops={"bf16": 6 * steps * values * workload.key_size},
    )
