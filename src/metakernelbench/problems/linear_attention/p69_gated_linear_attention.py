"""Gated linear attention: key-value outer products accumulate under a decay per key channel, without correction.

Inputs (full workload: batch 8, 1024 tokens, 4 heads, key size 256, value size 512):

    q   [8, 1024, 4, 256]  bf16  standard normal
    k   [8, 1024, 4, 256]  bf16  standard normal
    v   [8, 1024, 4, 512]  bf16  standard normal
    gk  [8, 1024, 4, 256]  bf16  ln(sigmoid(standard normal)) / 16, rounded once: log-decay per key channel

Output: [8, 1024, 4, 512] bf16.

Queries are multiplied by (key size)^-½; neither queries nor keys are normalised. Per head, from a state S (key × value)
of zeros, each token multiplies row i of S by e^gk_i, adds k ⊗ v, and gives Sᵀq. Everything is computed in float32 and
rounded once.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from metakernelbench.problems.formats.chunked import chunked_accumulation
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "Gated linear attention: accumulation of key-value outer products under a per-key-channel decay, with no delta "
    "correction."
)

PROVENANCE = Provenance(
    upstream="flash-linear-attention: naive recurrent GLA; inputs in the manner of its GLA op test",
    licence="MIT",
    source_model="GLA",
)

CHUNK = 64
"""Tokens that `vectorized` handles at once."""


@dataclass(frozen=True)
class Workload:
    batch: int
    length: int
    heads: int
    key_size: int
    value_size: int


FULL = Workload(batch=8, length=1024, heads=4, key_size=256, value_size=512)
SMOKE = Workload(batch=2, length=150, heads=2, key_size=16, value_size=32)

OUTPUTS = ("output",)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gk: torch.Tensor) -> torch.Tensor:
    compute = wide(q)
    batch, length, heads, key_size = q.shape
    queries, keys, values = q.to(compute) * key_size**-0.5, k.to(compute), v.to(compute)
    decay = gk.to(compute).exp()
    state = torch.zeros(batch, heads, key_size, v.shape[-1], dtype=compute, device=q.device)
    output = torch.empty_like(values)
    for t in range(length):
        added = torch.einsum("bhk,bhv->bhkv", keys[:, t], values[:, t])
        state = state * decay[:, t].unsqueeze(-1) + added
        output[:, t] = torch.einsum("bhk,bhkv->bhv", queries[:, t], state)
    return output.to(q.dtype)


def vectorized(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gk: torch.Tensor) -> torch.Tensor:
    """In chunks of 64: matrix products within all chunks at once, and a loop over chunks for the state only."""
    compute = wide(q)
    queries, keys, values, log_decay = (x.to(compute).transpose(1, 2) for x in (q, k, v, gk))
    output = chunked_accumulation(queries * q.shape[-1] ** -0.5, keys, values, log_decay, CHUNK)
    return output.transpose(1, 2).to(q.dtype)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    batch, length, heads, key_size = workload.batch, workload.length, workload.heads, workload.key_size

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    return (
        normal(batch, length, heads, key_size),
        normal(batch, length, heads, key_size),
        normal(batch, length, heads, workload.value_size),
        (logsigmoid(torch.randn(batch, length, heads, key_size, device=device)) / 16).to(torch.bfloat16),
    )


def cost(workload: Workload) -> Cost:
    """FLOPs: two contractions of every token with its state, which no algorithm that keeps a state can avoid."""
    steps = workload.batch * workload.length * workload.heads
    return Cost(
        bytes_read=2 * steps * (3 * workload.key_size + workload.value_size),
        bytes_written=2 * steps * workload.value_size,
        flops={"bf16": 4 * steps * workload.key_size * workload.value_size},
    )
