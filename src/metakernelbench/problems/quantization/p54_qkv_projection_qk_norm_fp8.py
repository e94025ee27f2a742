"""Query, key and value projections in block-scaled FP8 with biases, then RMSNorm of every query and key head.

Inputs (full workload; each weight is standard normal / sqrt(7680), times a gain in [0.5, 2) of each 128 × 128 block):

    hidden_states  [64, 256, 7680]  bf16  standard normal
    q_weight       [7680, 7680]     bf16  [out, in]; 60 heads of 128
    k_weight       [1024, 7680]     bf16  8 heads of 128
    v_weight       [1024, 7680]     bf16
    q_bias         [7680]           bf16  standard normal
    k_bias         [1024]           bf16  standard normal
    v_bias         [1024]           bf16  standard normal
    q_norm_weight  [128]            bf16  1 + 0.1 * standard normal
    k_norm_weight  [128]            bf16  1 + 0.1 * standard normal
    eps            1e-5

Outputs, bf16: query [64, 60, 256, 128], key and value [64, 8, 256, 128]: batch, head, position, channel.

Hidden states are quantised in blocks of 1 × 128, the weights in blocks of 128 × 128 (formats/block_scaled_fp8.py).
Product and bias are summed in fp32 and rounded; the norm is computed in fp32, rounded, and multiplied by its weight in
bf16.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats import block_scaled_fp8 as fp8
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "Project hidden states to query, key and value heads in block-scaled FP8 with biases, and RMS-normalise each query "
    "and key head."
)

PROVENANCE = Provenance(
    upstream="SOL-ExecBench, subset Quant, row 1, workload 12",
    licence="NVIDIA Evaluation Dataset License Agreement (nothing of the dataset is used)",
    source_model="Qwen3-VL, as upstream names it (no released one has this width)",
    inferred=(
        "All tensors are bfloat16: by convention.",
        "Heads come before positions in the outputs: from the shape of the public recipe.",
        "The normalised value is rounded before the weight: as in the public Qwen3 norm of Hugging Face transformers.",
        "Blocks of 1 × 128 and 128 × 128: from the public meaning of the visible scaling types.",
        "Scales are at least 1e-12 and the division by 448 is a true division: our choices.",
    ),
)


@dataclass(frozen=True)
class Workload:
    batch: int
    sequence: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_size: int


FULL = Workload(batch=64, sequence=256, hidden=7680, query_heads=60, kv_heads=8, head_size=128)
SMOKE = Workload(batch=2, sequence=8, hidden=256, query_heads=3, kv_heads=1, head_size=128)

OUTPUTS = ("query", "key", "value")


def project(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, head_size: int) -> torch.Tensor:
    """[batch, position, hidden] → [batch, position, head, channel]."""
    compute = wide(x)
    tokens = fp8.quantize(x.reshape(-1, x.shape[-1]), fp8.ACTIVATION_BLOCK)
    product = fp8.matmul(tokens, fp8.quantize(weight, fp8.WEIGHT_BLOCK), compute)
    return (product + bias.to(compute)).to(x.dtype).reshape(*x.shape[:2], -1, head_size)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    z = x.to(wide(x))
    return weight * (z * torch.rsqrt(z.square().mean(dim=-1, keepdim=True) + eps)).to(x.dtype)


def reference(
    hidden_states: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    v_weight: torch.Tensor,
    q_bias: torch.Tensor,
    k_bias: torch.Tensor,
    v_bias: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    head_size = q_norm_weight.shape[0]
    query = rms_norm(project(hidden_states, q_weight, q_bias, head_size), q_norm_weight, eps)
    key = rms_norm(project(hidden_states, k_weight, k_bias, head_size), k_norm_weight, eps)
    value = project(hidden_states, v_weight, v_bias, head_size)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    hidden, head_size = workload.hidden, workload.head_size
    widths = [heads * head_size for heads in (workload.query_heads, workload.kv_heads, workload.kv_heads)]
    hidden_states = normal(workload.batch, workload.sequence, hidden)
    weights = [fp8.random_weight(width, hidden, torch.bfloat16, device) for width in widths]
    biases = [normal(width) for width in widths]
    norm_weights = [1 + 0.1 * normal(head_size) for _ in range(2)]
    return hidden_states, *weights, *biases, *norm_weights, 1e-5


def cost(workload: Workload) -> Cost:
    tokens = workload.batch * workload.sequence
    width = (workload.query_heads + 2 * workload.kv_heads) * workload.head_size
    vectors = width + 2 * workload.head_size
    return Cost(
        bytes_read=2 * (tokens * workload.hidden + width * workload.hidden + vectors),
        bytes_written=2 * tokens * width,
        flops={"fp8": 2 * tokens * width * workload.hidden},
    )
