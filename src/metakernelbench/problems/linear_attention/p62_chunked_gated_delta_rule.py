"""The gated delta rule over whole prompts, in chunks of 64 tokens (Qwen3-Next's gated DeltaNet).

Inputs (full workload: batch 16, 256 tokens, 4 key heads, 16 value heads, head size 128):

    query  [16, 4, 256, 128]     bf16   standard normal
    key    [16, 4, 256, 128]     bf16   standard normal
    value  [16, 16, 256, 128]    bf16   standard normal
    g      [16, 16, 256]         bf16   uniform in [-0.05, 0): log-decay per step
    beta   [16, 16, 256]         bf16   sigmoid of a standard normal, in bf16
    scale  0.08838834764831845   float  the same in every draw

Output: [16, 256, 16, 128] bf16, time before heads.

Queries and keys are divided by sqrt(Σ x² + 1e-6) over their last axis; queries are scaled. Value head h reads query and
key head h·(key heads)/(value heads), rounded down. Per value head, from a state S (key × value) of zeros, each token
does S ← e^g · S, then S ← S + k ⊗ β(v − Sᵀk), and gives Sᵀq. The reference advances chunk by chunk: with G the running
sum of g in the chunk, A_ij = β_i (k_i·k_j) e^(G_i−G_j) below the diagonal and T = (I + A)⁻¹, the corrections of the
chunk are U = T diag(β) (V − (K e^G) S).
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats.chunked import chunked_delta_rule, into_chunks, segment_sum
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "Gated delta rule over a full prompt with scalar decay per value head and L2-normalised queries and keys, computed "
    "in chunks of 64 with the state carried from chunk to chunk."
)

PROVENANCE = Provenance(
    upstream="own formulation; subject and sizes after SOL-ExecBench L2 row 59, workload 9, as used by MetaKernelBench",
    licence="upstream: NVIDIA Evaluation Dataset License; this formulation: Apache-2.0",
    source_model="Qwen3-Next",
    inferred=(
        "the semantics: of the public Qwen3-Next layer with query and key normalisation switched on",
        "normalisation in the compute dtype, where the public layer rounds to bf16: chosen; either is accepted",
        "names of the inputs, one output, and its order of time before heads: after the public function",
    ),
)

CHUNK = 64
NORM_EPS = 1e-6


@dataclass(frozen=True)
class Workload:
    batch: int
    length: int
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    scale: float


FULL = Workload(
    batch=16, length=256, key_heads=4, value_heads=16, key_size=128, value_size=128, scale=0.08838834764831845
)
SMOKE = Workload(batch=2, length=150, key_heads=2, value_heads=4, key_size=16, value_size=16, scale=0.25)

OUTPUTS = ("output",)


def _heads(x: torch.Tensor, value_heads: int, compute: torch.dtype) -> torch.Tensor:
    """Normalised queries or keys, one head per value head."""
    x = x.to(compute)
    x = x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + NORM_EPS)
    return x.repeat_interleave(value_heads // x.shape[1], dim=1)


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    compute, (value_heads, length) = wide(query), value.shape[1:3]
    q = into_chunks(_heads(query, value_heads, compute) * scale, CHUNK, -2)
    k = into_chunks(_heads(key, value_heads, compute), CHUNK, -2)
    v = into_chunks(value.to(compute), CHUNK, -2)
    log_decay = into_chunks(g.to(compute), CHUNK, -1)
    strength = into_chunks(beta.to(compute), CHUNK, -1).unsqueeze(-1)

    running = log_decay.cumsum(dim=-1).unsqueeze(-1)
    decay = segment_sum(log_decay).exp()
    A = (strength * (k @ k.transpose(-1, -2)) * decay).tril(-1)
    inverse = torch.eye(CHUNK, dtype=compute, device=query.device).expand_as(A).clone()
    for row in range(1, CHUNK):
        inverse[..., row, :row] = -(A[..., row, None, :row] @ inverse[..., :row, :row]).squeeze(-2)
    from_values = inverse @ (strength * v)
    from_state = inverse @ (strength * k * running.exp())
    scores = (q @ k.transpose(-1, -2)) * decay

    state = torch.zeros(*v.shape[:2], k.shape[-1], v.shape[-1], dtype=compute, device=query.device)
    outputs = torch.zeros_like(v)
    for chunk in range(v.shape[2]):
        update = from_values[:, :, chunk] - from_state[:, :, chunk] @ state
        total = running[:, :, chunk, -1:]
        reading = q[:, :, chunk] * running[:, :, chunk].exp()
        outputs[:, :, chunk] = reading @ state + scores[:, :, chunk] @ update
        kept_keys = k[:, :, chunk] * (total - running[:, :, chunk]).exp()
        state = total.exp() * state + kept_keys.transpose(-1, -2) @ update
    return outputs.flatten(2, 3)[:, :, :length].transpose(1, 2).contiguous().to(query.dtype)


def vectorized(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The triangular systems of all chunks solved by one call instead of row by row."""
    compute, value_heads = wide(query), value.shape[1]
    k, v = _heads(key, value_heads, compute), value.to(compute)
    state = torch.zeros(*v.shape[:2], k.shape[-1], v.shape[-1], dtype=compute, device=query.device)
    outputs, _ = chunked_delta_rule(
        _heads(query, value_heads, compute) * scale,
        k,
        v,
        g.to(compute).unsqueeze(-1),
        beta.to(compute),
        state,
        CHUNK,
    )
    return outputs.transpose(1, 2).contiguous().to(query.dtype)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    batch, length, key_heads, value_heads = workload.batch, workload.length, workload.key_heads, workload.value_heads

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    return (
        normal(batch, key_heads, length, workload.key_size),
        normal(batch, key_heads, length, workload.key_size),
        normal(batch, value_heads, length, workload.value_size),
        torch.empty(batch, value_heads, length, dtype=torch.bfloat16, device=device).uniform_(-0.05, 0),
        normal(batch, value_heads, length).sigmoid(),
        workload.scale,
    )


def cost(workload: Workload) -> Cost:
    """FLOPs: three contractions of every token with its state, which no algorithm that keeps a state can avoid."""
    steps = workload.batch * workload.length
    keys = 2 * workload.key_heads * workload.key_size
    values = workload.value_heads * workload.value_size
    return Cost(
        bytes_read=2 * steps * (keys + values + 2 * workload.value_heads),
        bytes_written=2 * steps * values,
        flops={"bf16": 6 * steps * values * workload.key_size},
    )
