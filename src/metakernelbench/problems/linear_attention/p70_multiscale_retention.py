"""RetNet's multi-scale retention: causal query-key scores with a fixed exponential decay per head, times values.

Inputs (full workload: batch 8, 8 heads, 1024 tokens, key size 256, value size 512):

    q  [8, 8, 1024, 256]  bf16  standard normal; heads before time
    k  [8, 8, 1024, 256]  bf16  standard normal
    v  [8, 8, 1024, 512]  bf16  standard normal

Output: [8, 8, 1024, 512] bf16.

Head h decays by γ = 1 - 2^(-5-h) per token: o_i = Σ_{j≤i} (key size)^-½ (q_i · k_j) γ^(i-j) v_j. There is no softmax
and no norm. Everything is computed in float32 and rounded once. The decays of the eight heads run from 0.96875 to
0.999755859375.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "Multi-scale retention: causal query-key scores weighted with a fixed exponential decay per head, applied to "
    "values, without softmax or norm."
)

PROVENANCE = Provenance(
    upstream="flash-linear-attention: naive retention; inputs in the manner of its retention op test",
    licence="MIT",
    source_model="RetNet",
)


@dataclass(frozen=True)
class Workload:
    batch: int
    heads: int
    length: int
    key_size: int
    value_size: int


FULL = Workload(batch=8, heads=8, length=1024, key_size=256, value_size=512)
SMOKE = Workload(batch=2, heads=3, length=24, key_size=16, value_size=32)

OUTPUTS = ("output",)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    compute = wide(q)
    heads, length, key_size = q.shape[1:]
    head = torch.arange(heads, dtype=compute, device=q.device)
    log2_decay = torch.log2(1 - torch.exp2(-5 - head))
    position = torch.arange(length, dtype=compute, device=q.device)
    distance = position.unsqueeze(1) - position
    decay = torch.exp2(distance * log2_decay.view(heads, 1, 1)) * (distance >= 0)
    queries = q.to(compute) * key_size**-0.5
    output: torch.Tensor = (queries @ k.to(compute).transpose(-1, -2) * decay) @ v.to(compute)
    return output.to(q.dtype)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    batch, heads, length = workload.batch, workload.heads, workload.length

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    return (
        normal(batch, heads, length, workload.key_size),
        normal(batch, heads, length, workload.key_size),
        normal(batch, heads, length, workload.value_size),
    )


def cost(workload: Workload) -> Cost:
    """FLOPs: two contractions of every token with its state, which is less work than all pairs of tokens."""
    steps = workload.batch * workload.heads * workload.length
    return Cost(
        bytes_read=2 * steps * (2 * workload.key_size + workload.value_size),
        bytes_written=2 * steps * workload.value_size,
        flops={"bf16": 4 * steps * workload.key_size * workload.value_size},
    )
