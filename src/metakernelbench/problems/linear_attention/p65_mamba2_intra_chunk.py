"""The diagonal blocks of Mamba-2's scan (Nemotron Nano): inside each chunk, decay-weighted C·Bᵀ scores times inputs.

Inputs (full workload: batch 16, 1 chunk of 128, 128 heads of 128, state 128, 8 groups):

    hidden_states  [16, 1, 128, 128, 128]  bf16  standard normal; batch, chunk, time, head, channel
    a_cumsum       [16, 128, 1, 128]       bf16  uniform in [-0.02, 0); batch, head, chunk, time
    B              [16, 1, 128, 8, 128]    bf16  standard normal; batch, chunk, time, group, state
    C              [16, 1, 128, 8, 128]    bf16  standard normal

Output: [16, 1, 128, 128, 128] bf16, shaped as hidden_states.

In spite of its name, `a_cumsum` holds log-decays per step, which the problem sums up itself. Per batch, chunk and head,
y_i = Σ_{j≤i} e^(a_{j+1} + … + a_i) (C_i · B_j) x_j. Head h reads group h·groups/heads, rounded down. There is no skip
and no state. Everything is computed in float32 and rounded once.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats.chunked import segment_sum
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "The diagonal-block part of Mamba-2's scan: inside each chunk, causal decay-weighted C·Bᵀ scores applied to the "
    "inputs."
)

PROVENANCE = Provenance(
    upstream="own formulation; subject and sizes after SOL-ExecBench L1 row 69, workload 7, as used by MetaKernelBench",
    licence="upstream: NVIDIA Evaluation Dataset License; this formulation: Apache-2.0",
    source_model="Nemotron Nano",
    inferred=(
        "chunk length 128, 128 heads and 8 groups: of the public Nemotron Nano v2 configuration",
        "the semantics: of the public Nemotron-H layer",
        "the second input is summed up, not taken as a cumulative sum: only then do its values give a long decay",
    ),
)


@dataclass(frozen=True)
class Workload:
    batch: int
    chunks: int
    length: int
    heads: int
    head_size: int
    groups: int
    state_size: int


FULL = Workload(batch=16, chunks=1, length=128, heads=128, head_size=128, groups=8, state_size=128)
SMOKE = Workload(batch=2, chunks=2, length=16, heads=4, head_size=8, groups=2, state_size=8)

OUTPUTS = ("output",)


def reference(hidden_states: torch.Tensor, a_cumsum: torch.Tensor, B: torch.Tensor, C: torch.Tensor) -> torch.Tensor:
    compute = wide(hidden_states)
    heads = hidden_states.shape[-2]
    B, C = (x.to(compute).repeat_interleave(heads // x.shape[-2], dim=-2) for x in (B, C))
    decay = segment_sum(a_cumsum.to(compute)).exp().transpose(1, 2)
    scores = torch.einsum("bnihs,bnjhs->bnhij", C, B) * decay
    return torch.einsum("bnhij,bnjhp->bnihp", scores, hidden_states.to(compute)).to(hidden_states.dtype)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    batch, chunks, length, heads = workload.batch, workload.chunks, workload.length, workload.heads

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    return (
        normal(batch, chunks, length, heads, workload.head_size),
        torch.empty(batch, heads, chunks, length, dtype=torch.bfloat16, device=device).uniform_(-0.02, 0.0),
        normal(batch, chunks, length, workload.groups, workload.state_size),
        normal(batch, chunks, length, workload.groups, workload.state_size),
    )


def cost(workload: Workload) -> Cost:
    """FLOPs: the causal half of C·Bᵀ, once per group, and of scores times inputs, once per head."""
    steps = workload.batch * workload.chunks * workload.length
    values, scores = workload.heads * workload.head_size, workload.groups * workload.state_size
    return Cost(
        bytes_read=2 * steps * (values + workload.heads + 2 * scores),
        bytes_written=2 * steps * values,
        flops={"bf16": steps * (workload.length + 1) * (values + scores)},
    )
