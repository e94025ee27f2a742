"""Vision attention over packed image sequences, from fused QKV projection to output projection.

Inputs (full workload):

    hidden_states  [7168, 1152]     bf16   standard normal: the tokens of 28 sequences, one below the other
    cu_seqlens     [28]             int64  fixed: running sum of the sequence lengths, without a leading 0
    cos, sin       [7168, 16, 72]   bf16   fixed: of p · 10000 ** (-j / 36), p the position in the sequence; columns j
                                           and j + 36 alike, all heads alike
    qkv_weight     [3456, 1152]     bf16   standard normal / sqrt(1152); (out, in)
    qkv_bias       [3456]           bf16   0.1 * standard normal
    proj_weight    [1152, 1152]     bf16   standard normal / sqrt(1152)
    proj_bias      [1152]           bf16   0.1 * standard normal

Output: [7168, 1152] bf16.

The projection with bias gives (q, k, v) of 16 heads of 72, in that order. q and k are rotated in fp32,
(a, b) → (a·cos - b·sin, b·cos + a·sin) on the two halves of the head. A token attends to all tokens of its sequence,
with logits q·k · 72 ** -0.5; then the output projection with bias. The reference rounds to bf16 after the projection,
the rotation, q·k, the scaling, the softmax (itself in fp32), the values, and at the end.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from metakernelbench.problems.formats.paged import offsets_of
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "Bidirectional self-attention inside packed image sequences, with fused QKV projection, rotary embedding and "
    "output projection."
)

PROVENANCE = Provenance(
    upstream="SOL-ExecBench, subset L2, row 17, workload 4",
    licence="NVIDIA Evaluation Dataset License Agreement (nothing of the dataset is used)",
    source_model="Qwen Image Edit 2509, as upstream names it",
    inferred=(
        "The formulas and their roundings follow the public Qwen2.5-VL vision attention in Hugging Face transformers, "
        "eager path.",
        "hidden_states is standard normal: no visible source gives its law.",
        "The rotary tables are bf16, the dtype of the problem.",
        "The scale is head size ** -0.5.",
        "The names and the order of the third to the eighth input.",
        "One bare tensor is returned.",
    ),
)

ROTARY_BASE = 10000.0


@dataclass(frozen=True)
class Workload:
    lengths: tuple[int, ...]
    heads: int
    head_size: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def width(self) -> int:
        return self.heads * self.head_size


# fmt: off
FULL = Workload(
    lengths=(
        255, 85, 425, 170, 680, 85, 170, 340, 85, 510, 170, 255, 85, 340, 170, 425, 85, 255, 170, 85, 170, 510, 340,
        170, 255, 170, 85, 623,
    ),
    heads=16, head_size=72,
)
# fmt: on
SMOKE = Workload(lengths=(7, 3, 9, 5), heads=4, head_size=8)

OUTPUTS = ("output",)
FIXED = ("cu_seqlens", "cos", "sin")


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    compute = wide(x)
    a, b = x.to(compute).chunk(2, dim=-1)
    turned = torch.cat([-b, a], dim=-1)
    return (x.to(compute) * cos.to(compute) + turned * sin.to(compute)).to(x.dtype)


def projected_heads(
    hidden_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and k, rotated, and v, each [heads, tokens, head_size]."""
    tokens, heads, head_size = cos.shape
    q, k, v = linear(hidden_states, weight, bias).view(tokens, 3, heads, head_size).unbind(dim=1)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)


def reference(
    hidden_states: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
) -> torch.Tensor:
    q, k, v = projected_heads(hidden_states, cos, sin, qkv_weight, qkv_bias)
    attended, start = [], 0
    for stop in cu_seqlens.tolist():
        rows = slice(start, stop)
        logits = (q[:, rows] @ k[:, rows].mT) * q.shape[-1] ** -0.5
        probabilities = torch.softmax(logits, dim=-1, dtype=wide(logits)).to(q.dtype)
        attended.append(probabilities @ v[:, rows])
        start = stop
    return linear(torch.cat(attended, dim=1).transpose(0, 1).flatten(1), proj_weight, proj_bias)


def vectorized(
    hidden_states: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
) -> torch.Tensor:
    """One call of torch's own attention per sequence, instead of five operations."""
    q, k, v = (x[None] for x in projected_heads(hidden_states, cos, sin, qkv_weight, qkv_bias))
    lengths = cu_seqlens.diff(prepend=cu_seqlens.new_zeros(1)).tolist()
    parts = zip(*(torch.split(x, lengths, dim=2) for x in (q, k, v)), strict=True)
    attended = torch.cat([scaled_dot_product_attention(*part) for part in parts], dim=2)
    return linear(attended[0].transpose(0, 1).flatten(1), proj_weight, proj_bias)


def rotary_tables(workload: Workload, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [tokens, heads, head_size] in fp32; positions restart in every sequence, all heads are alike."""
    half = workload.head_size // 2
    positions = torch.cat([torch.arange(n, dtype=torch.float32, device=device) for n in workload.lengths])
    frequencies = ROTARY_BASE ** (-torch.arange(half, dtype=torch.float32, device=device) / half)
    angles = positions[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)[:, None].expand(-1, workload.heads, -1)
    return angles.cos(), angles.sin()


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    width = workload.width
    hidden_states = torch.randn(workload.tokens, width, dtype=torch.bfloat16, device=device)
    cu_seqlens = torch.tensor(offsets_of(workload.lengths)[1:], dtype=torch.int64, device=device)
    cos, sin = (table.to(torch.bfloat16).contiguous() for table in rotary_tables(workload, device))
    qkv_weight = (torch.randn(3 * width, width, device=device) / width**0.5).to(torch.bfloat16)
    qkv_bias = (0.1 * torch.randn(3 * width, device=device)).to(torch.bfloat16)
    proj_weight = (torch.randn(width, width, device=device) / width**0.5).to(torch.bfloat16)
    proj_bias = (0.1 * torch.randn(width, device=device)).to(torch.bfloat16)
    return hidden_states, cu_seqlens, cos, sin, qkv_weight, qkv_bias, proj_weight, proj_bias


def cost(workload: Workload) -> Cost:
    activation = 2 * workload.tokens * workload.width
    weights = 4 * workload.width * workload.width + 4 * workload.width
    attention = 4 * workload.width * sum(n * n for n in workload.lengths)
    return Cost(
        bytes_read=3 * activation + 2 * weights + 8 * len(workload.lengths),
        bytes_written=activation,
        flops={"bf16": 2 * 4 * workload.tokens * workload.width**2 + attention},
    )
