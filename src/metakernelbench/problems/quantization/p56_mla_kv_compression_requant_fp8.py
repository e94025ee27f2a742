"""Key/value path of DeepSeek's latent attention: FP8 down-projection, RMSNorm of the latent, FP8 up-projection.

Inputs (full workload; each weight carries a gain in [0.5, 2) of each 128 × 128 block):

    hidden_states          [64, 256, 7168]  bf16  standard normal
    kv_a_proj_weight       [640, 7168]      bf16  gain * standard normal / sqrt(7168); [out, in]; rows 576 to 639 pad
    kv_a_layernorm_weight  [512]            bf16  1 + 0.1 * standard normal
    kv_b_proj_weight       [32768, 512]     bf16  gain * standard normal / sqrt(512)
    eps                    1e-6

Outputs, bf16: kv [64, 256, 128, 256], for each of 128 heads 128 key and then 128 value features; and k_rope
[64, 256, 64].

Activations are quantised in blocks of 1 × 128, weights in blocks of 128 × 128 (formats/block_scaled_fp8.py). The first
product, rounded to bf16, holds the latent (512 columns), k_rope (64, returned as they are), and padding, which is
dropped. The latent is normalised in fp32, rounded, multiplied by the norm's weight in bf16, quantised again, and
projected up. The padding rows are random and share a block, and so its scale, with the rows of k_rope.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats import block_scaled_fp8 as fp8
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "Project hidden states to a latent and a rotary part in block-scaled FP8, RMS-normalise the latent, and project it "
    "up to the keys and values of all heads in FP8."
)

PROVENANCE = Provenance(
    upstream="SOL-ExecBench, subset Quant, row 12, workload 2",
    licence="NVIDIA Evaluation Dataset License Agreement (nothing of the dataset is used)",
    source_model="DeepSeek-V3.1",
    inferred=(
        "All tensors are bfloat16: by convention.",
        "eps = 1e-6: an exponent-form constant is inferred, its value is that of the public configuration.",
        "Two outputs: from the shape of the public recipe; their order is that of assignment.",
        "Blocks of 1 × 128 and 128 × 128: from the public meaning of the visible scaling types.",
        "Scales are at least 1e-12 and the division by 448 is a true division: our choices.",
    ),
)

ROTARY = 64
"""Features of k_rope."""
HEAD_FEATURES = 256
"""Key and value features of a head."""


@dataclass(frozen=True)
class Workload:
    batch: int
    sequence: int
    hidden: int
    latent: int
    padded: int
    """Rows of the first weight: latent, rotary features and padding."""
    heads: int


FULL = Workload(batch=64, sequence=256, hidden=7168, latent=512, padded=640, heads=128)
SMOKE = Workload(batch=2, sequence=8, hidden=256, latent=256, padded=384, heads=2)

OUTPUTS = ("kv", "k_rope")


def project(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    quantized = fp8.quantize(tokens, fp8.ACTIVATION_BLOCK)
    return fp8.matmul(quantized, fp8.quantize(weight, fp8.WEIGHT_BLOCK), wide(tokens)).to(tokens.dtype)


def reference(
    hidden_states: torch.Tensor,
    kv_a_proj_weight: torch.Tensor,
    kv_a_layernorm_weight: torch.Tensor,
    kv_b_proj_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, sequence, hidden = hidden_states.shape
    latent_width = kv_a_layernorm_weight.shape[0]
    compressed = project(hidden_states.reshape(-1, hidden), kv_a_proj_weight)
    latent, k_rope = compressed[:, :latent_width], compressed[:, latent_width : latent_width + ROTARY]
    z = latent.to(wide(latent))
    z = z * torch.rsqrt(z.square().mean(dim=-1, keepdim=True) + eps)
    normalised = kv_a_layernorm_weight * z.to(latent.dtype)
    kv = project(normalised, kv_b_proj_weight)
    return kv.reshape(batch, sequence, -1, HEAD_FEATURES), k_rope.reshape(batch, sequence, ROTARY)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    hidden_states = normal(workload.batch, workload.sequence, workload.hidden)
    kv_a_proj_weight = fp8.random_weight(workload.padded, workload.hidden, torch.bfloat16, device)
    kv_a_layernorm_weight = 1 + 0.1 * normal(workload.latent)
    kv_b_proj_weight = fp8.random_weight(workload.heads * HEAD_FEATURES, workload.latent, torch.bfloat16, device)
    return hidden_states, kv_a_proj_weight, kv_a_layernorm_weight, kv_b_proj_weight, 1e-6


def cost(workload: Workload) -> Cost:
    tokens, hidden, latent = workload.batch * workload.sequence, workload.hidden, workload.latent
    kv = workload.heads * HEAD_FEATURES
    needed = latent + ROTARY  # columns of the first product; the padding must be read for the scales only
    return Cost(
        bytes_read=2 * (tokens * hidden + workload.padded * hidden + latent + kv * latent),
        bytes_written=2 * tokens * (kv + ROTARY),
        flops={"fp8": 2 * tokens * (hidden * needed + latent * kv)},
    )
