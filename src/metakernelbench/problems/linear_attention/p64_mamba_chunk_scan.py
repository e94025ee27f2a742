"""Mamba-2's chunked scan from a given state (Granite 4.0 hybrid): segment-sum decays, chunks of 256, D skip.

Inputs (full workload: batch 8, 1024 tokens, 16 heads of 64, state 256, 1 group):

    hidden_states  [8, 1024, 16, 64]  bf16  standard normal
    A              [8, 16, 1024]      bf16  uniform in [-0.02, -0.0005): log-decay per step, heads before time
    B              [8, 1024, 1, 256]  bf16  standard normal; batch, time, group, state
    C              [8, 1024, 1, 256]  bf16  standard normal
    D              [16]               bf16  16 * standard normal
    ssm_state      [8, 16, 64, 256]   bf16  standard normal

Outputs:

    output       [8, 1024, 1024]   bf16  heads and head size joined, heads first
    final_state  [8, 16, 64, 256]  bf16

Per head, from h = ssm_state: h ← e^A h + x ⊗ B, y = h · C + D x. Time steps are already folded into the inputs. Head h
reads group h·groups/heads, rounded down. Everything is computed in float32 and rounded once. The reference works in
chunks of 256 and combines the chunks' states with one matrix of segment-sum decays.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats.state_space import chunked_scan
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "Mamba-2 chunked scan with segment-sum decay, a state recurrence across chunks that starts from a given state, and "
    "the D skip."
)

PROVENANCE = Provenance(
    upstream="own formulation; subject and sizes after SOL-ExecBench L2 row 42, workload 8, as used by MetaKernelBench",
    licence="upstream: NVIDIA Evaluation Dataset License; this formulation: Apache-2.0",
    source_model="Granite 4.0 hybrid",
    inferred=(
        "the semantics: of the public Granite-MoE-Hybrid layer; with no time step among the inputs, discretisation is "
        "taken as done",
        "which of inputs 3 and 4 is B: Mamba's order",
        "two outputs, and the joining of heads and head size: after the public layer",
        "D is 16 times a standard normal, where the upstream draws a standard normal: chosen, because the whole skip "
        "would otherwise lie at a third of the allowance",
    ),
)

CHUNK = 256
D_SCALE = 16.0


@dataclass(frozen=True)
class Workload:
    batch: int
    length: int
    heads: int
    head_size: int
    state_size: int
    groups: int


FULL = Workload(batch=8, length=1024, heads=16, head_size=64, state_size=256, groups=1)
SMOKE = Workload(batch=2, length=600, heads=4, head_size=8, state_size=16, groups=2)

OUTPUTS = ("output", "final_state")


def reference(
    hidden_states: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    ssm_state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    compute = wide(hidden_states)
    x = hidden_states.to(compute)
    y, final_state = chunked_scan(
        x, A.to(compute).transpose(1, 2), B.to(compute), C.to(compute), ssm_state.to(compute), CHUNK
    )
    y = y + D.to(compute).unsqueeze(-1) * x
    return y.flatten(2).to(hidden_states.dtype), final_state.to(hidden_states.dtype)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    batch, length, heads = workload.batch, workload.length, workload.heads

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    return (
        normal(batch, length, heads, workload.head_size),
        torch.empty(batch, heads, length, dtype=torch.bfloat16, device=device).uniform_(-0.02, -0.0005),
        normal(batch, length, workload.groups, workload.state_size),
        normal(batch, length, workload.groups, workload.state_size),
        D_SCALE * normal(heads),
        normal(batch, heads, workload.head_size, workload.state_size),
    )


def cost(workload: Workload) -> Cost:
    """FLOPs: two contractions of every token with its state."""
    steps, inner = workload.batch * workload.length, workload.heads * workload.head_size
    state = workload.batch * inner * workload.state_size
    scores = 2 * steps * workload.groups * workload.state_size
    return Cost(
        bytes_read=2 * (steps * inner + steps * workload.heads + scores + workload.heads + state),
        bytes_written=2 * (steps * inner + state),
        flops={"bf16": 4 * steps * inner * workload.state_size},
    )
