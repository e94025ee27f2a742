"""Backward pass of embedding lookup and RMSNorm in Jamba: a dense gradient of the table, and that of the norm's weight.

Inputs (full workload):

    grad_output         [64, 256, 4096]  bf16   standard normal
    input_ids           [64, 256]        int64  uniform in [0, 65536)
    hidden_states_fp32  [64, 256, 4096]  fp32   standard normal: the looked-up rows, drawn independently of any table
    rstd                [64, 256, 1]     fp32   1 / √(uniform[0, 1) + 0.5 + 1e-6), independent of the rows
    norm_weight         [4096]           bf16   0.1 * standard normal + 1

Outputs: grad_embedding [65536, 4096] bf16, whose rows sum the gradients of all tokens with that id, and
grad_norm_weight [4096] bf16. Everything is summed in fp32 and rounded once. About 78% of the table's rows belong to no
token: they are zero and must be written. No id is treated specially.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "Compute the dense gradient of an embedding table and that of the weight of an RMSNorm that follows the lookup."
)

PROVENANCE = Provenance(
    upstream="SOL-ExecBench, subset L1, row 86, workload 0",
    licence="NVIDIA Evaluation Dataset License Agreement (nothing of the dataset is used)",
    source_model="Jamba",
    inferred=(
        "bfloat16 for grad_output and norm_weight, float32 for rstd, int64 ids: from the name and by convention.",
        "rstd = 1 / sqrt(a · uniform + b + 1e-6) with a = 1.0, b = 0.5: only its outline is visible; our choice.",
        "norm_weight varies by 0.1: as in related problems.",
        "No padding id, though the public model has one: none is among the inputs.",
        "Two outputs in this order: from the shape of the public recipe.",
    ),
)

VOCABULARY = 65536


@dataclass(frozen=True)
class Workload:
    batch: int
    sequence: int
    width: int
    ids: int
    """Ids are drawn below this; the table has VOCABULARY rows in every workload."""


FULL = Workload(batch=64, sequence=256, width=4096, ids=VOCABULARY)
# 24 tokens with 20 ids: some repeat. Narrow, because the table has all its rows.
SMOKE = Workload(batch=3, sequence=8, width=8, ids=20)

OUTPUTS = ("grad_embedding", "grad_norm_weight")


def reference(
    grad_output: torch.Tensor,
    input_ids: torch.Tensor,
    hidden_states_fp32: torch.Tensor,
    rstd: torch.Tensor,
    norm_weight: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    compute, width = wide(grad_output), grad_output.shape[-1]
    grad = grad_output.to(compute)
    normalised = hidden_states_fp32 * rstd
    grad_norm_weight = (grad * normalised).sum(dim=(0, 1)).to(grad_output.dtype)
    grad_normalised = grad * norm_weight.to(compute)
    projection = (grad_normalised * normalised).mean(dim=-1, keepdim=True)
    grad_rows = rstd * (grad_normalised - normalised * projection)

    grad_embedding = torch.zeros(VOCABULARY, width, dtype=compute, device=grad_output.device)
    grad_embedding.index_add_(0, input_ids.reshape(-1), grad_rows.reshape(-1, width))
    return grad_embedding.to(grad_output.dtype), grad_norm_weight


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    width, tokens = workload.width, (workload.batch, workload.sequence)
    grad_output = torch.randn(*tokens, width, dtype=torch.bfloat16, device=device)
    input_ids = torch.randint(workload.ids, tokens, device=device)
    hidden_states_fp32 = torch.randn(*tokens, width, device=device)
    rstd = torch.rsqrt(torch.rand(*tokens, 1, device=device) + 0.5 + 1e-6)
    norm_weight = 0.1 * torch.randn(width, dtype=torch.bfloat16, device=device) + 1
    return grad_output, input_ids, hidden_states_fp32, rstd, norm_weight


def cost(workload: Workload) -> Cost:
    width = workload.width
    tokens = workload.batch * workload.sequence
    return Cost(
        bytes_read=tokens * (2 * width + 8 + 4 * width + 4) + 2 * width,
        bytes_written=2 * VOCABULARY * width + 2 * width,
    )
