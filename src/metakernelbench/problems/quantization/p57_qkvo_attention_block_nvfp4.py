"""Causal grouped-query attention block whose four projections run in NVFP4, and whose core stays in bf16.

Inputs (full workload; each weight is NVFP4 of fp32 values standard normal / sqrt(8192): codes [out, in / 2], two in a
byte; block scales [out, in / 16]; global scale, a Python float):

    hidden_states                [64, 128, 8192]    bf16                              standard normal
    cos, sin                     [64, 128, 128]     bf16                              standard normal, independent
    q_weight, q_scale, q_global  [8192, 4096], ...  float4_e2m1fn_x2, float8_e4m3fn, float
    k_weight, k_scale, k_global  [1024, 4096], ...
    v_weight, v_scale, v_global  [1024, 4096], ...
    o_weight, o_scale, o_global  [8192, 4096], ...

Output: [64, 128, 8192] bf16. Every projection quantises its input to NVFP4 (formats/nvfp4.py) with one global scale
over all tokens, multiplies in fp32 and rounds to bf16. Queries (64 heads of 128) and keys (8 heads) become
x · cos + (-second half, first half) · sin with products and sum rounded to bf16; cos and sin are plain random numbers,
shared by all heads. Eight consecutive query heads use one key/value head. Scores are rounded before and after the
factor 128 ** -0.5 and masked causally; the softmax is computed in fp32 and rounded, and so is its product with the
values.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats import nvfp4
from metakernelbench.problems.formats.nvfp4 import Nvfp4
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "Run a causal grouped-query attention block with rotary embedding whose query, key, value and output projections "
    "quantise their inputs to NVFP4."
)

PROVENANCE = Provenance(
    upstream="SOL-ExecBench, subset Quant, row 18, workload 15",
    licence="NVIDIA Evaluation Dataset License Agreement (nothing of the dataset is used)",
    source_model="called Nova upstream; not identified (the geometry of a Llama 3 70B)",
    inferred=(
        "Unquantised tensors are bfloat16: by convention.",
        "Weights arrive as codes, block scales, global scale; cos and sin are standard normal: from the shape of the "
        "public recipe.",
        "The quantiser follows NVIDIA TransformerEngine's NVFP4 reference; its divisions by 6 are true divisions: "
        "our choice.",
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


FULL = Workload(batch=64, sequence=128, hidden=8192, query_heads=64, kv_heads=8, head_size=128)
# Wide enough that an unquantised input stands out against the requantisation before the last projection.
SMOKE = Workload(batch=2, sequence=16, hidden=512, query_heads=8, kv_heads=2, head_size=64)

OUTPUTS = ("output",)


def project(x: torch.Tensor, weight: Nvfp4) -> torch.Tensor:
    tokens = nvfp4.quantize(x.reshape(-1, x.shape[-1]))
    return nvfp4.matmul(tokens, weight, wide(x)).to(x.dtype).reshape(*x.shape[:-1], -1)


def split_heads(x: torch.Tensor, head_size: int) -> torch.Tensor:
    """[batch, position, width] → [batch, head, position, head_size]."""
    return x.reshape(*x.shape[:2], -1, head_size).transpose(1, 2)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """All of [batch, head, position, head_size]."""
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
    scores = scores.masked_fill(later, float("-inf"))
    return torch.softmax(scores, dim=-1, dtype=wide(query)).to(query.dtype) @ value


def reference(
    hidden_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor,
    q_scale: torch.Tensor,
    q_global: float,
    k_weight: torch.Tensor,
    k_scale: torch.Tensor,
    k_global: float,
    v_weight: torch.Tensor,
    v_scale: torch.Tensor,
    v_global: float,
    o_weight: torch.Tensor,
    o_scale: torch.Tensor,
    o_global: float,
) -> torch.Tensor:
    head_size = cos.shape[-1]
    query = split_heads(project(hidden_states, Nvfp4(q_weight, q_scale, q_global)), head_size)
    key = split_heads(project(hidden_states, Nvfp4(k_weight, k_scale, k_global)), head_size)
    value = split_heads(project(hidden_states, Nvfp4(v_weight, v_scale, v_global)), head_size)
    query, key = rotate(query, cos, sin), rotate(key, cos, sin)
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    attended = causal_attention(query, key, value).transpose(1, 2).flatten(2)
    return project(attended, Nvfp4(o_weight, o_scale, o_global))


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    def weight(out_features: int, in_features: int) -> tuple[torch.Tensor, torch.Tensor, float]:
        codes, scales, number = nvfp4.random_weight(out_features, in_features, in_features**-0.5, device)
        return codes.squeeze(0), scales.squeeze(0), number

    batch, sequence, hidden = workload.batch, workload.sequence, workload.hidden
    hidden_states = normal(batch, sequence, hidden)
    cos, sin = normal(batch, sequence, workload.head_size), normal(batch, sequence, workload.head_size)
    query_width, kv_width = workload.query_heads * workload.head_size, workload.kv_heads * workload.head_size
    q, k, v = weight(query_width, hidden), weight(kv_width, hidden), weight(kv_width, hidden)
    return hidden_states, cos, sin, *q, *k, *v, *weight(hidden, query_width)


def cost(workload: Workload) -> Cost:
    batch, sequence, hidden, head_size = workload.batch, workload.sequence, workload.hidden, workload.head_size
    tokens = batch * sequence
    elements = 2 * (workload.query_heads + workload.kv_heads) * head_size * hidden
    pairs = batch * workload.query_heads * sequence * (sequence + 1) // 2  # query and key, on or below the diagonal
    return Cost(
        bytes_read=2 * tokens * (hidden + 2 * head_size) + elements // 2 + elements // 16,
        bytes_written=2 * tokens * hidden,
        flops={"nvfp4": 2 * tokens * elements, "bf16": 2 * 2 * pairs * head_size},
    )
