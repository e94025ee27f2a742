"""Local attention of an audio encoder: each frame attends to itself and the 12 frames before it.

Inputs (full workload):

    hidden_states              [64, 1721, 512]  fp32  standard normal
    mask                       [64, 1721]       bool  True is padding: the last 0 to 12 frames of a batch member
    q_proj_weight              [512, 512]       fp32  standard normal / sqrt(512); (out, in)
    k_proj_weight              [512, 512]       fp32  likewise
    v_proj_weight              [512, 512]       fp32  likewise
    pos_proj_weight            [512, 512]       fp32  likewise
    per_dim_scale              [64]             fp32  0.1 * standard normal
    inv_timescales             [256]            fp32  fixed: exp(-j · ln(10000) / 255)
    attention_logits_soft_cap  float                  50.0

Output: [64, 1721, 8, 64] fp32, the attended values by batch member, frame, head.

q, k, v are products of hidden_states with the weights, in 8 heads of 64. q is multiplied by softplus(per_dim_scale) and
by 64 ** -0.5 / ln 2. For a distance d of 0 to 12 frames, R[d] is the product of the position weight with
[sin(d · inv_timescales), cos(d · inv_timescales)], in 8 heads of 64. Frame t attends to frame s where 0 ≤ t - s ≤ 12,
s ≥ 0 and s is no padding, with the logit cap · tanh((q[t]·k[s] + q[t]·R[t - s]) / cap). Frames that are padding
themselves still attend, and their rows are compared. Everything is computed in fp32.
"""

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import pad, softplus

from metakernelbench.problems.problem import Cost, Inputs, Provenance

SUBJECT = (
    "Local attention of each audio frame to itself and the 12 before it, with projected sinusoidal relative positions, "
    "a tanh soft cap and a padding mask."
)

PROVENANCE = Provenance(
    upstream="SOL-ExecBench, subset L2, row 37, workload 12",
    licence="NVIDIA Evaluation Dataset License Agreement (nothing of the dataset is used)",
    source_model="Gemma 3n E2B (audio encoder), as upstream names it",
    inferred=(
        "The formulas follow the public Gemma 3n audio attention in Hugging Face transformers.",
        "8 heads of 64: the model has 8 heads, its hidden size is larger.",
        "Look-back 12, look-ahead 0 and blocks of 12 are the model's context and chunk sizes.",
        "Timescales from 1 to 10000, the soft cap of 50 and the query scale are the model's.",
        "The factor 0.1 of per_dim_scale, and standard normal hidden states.",
        "One bare tensor is returned: the attended values before any output projection.",
    ),
)

LOOK_BACK = 12
BLOCK = 12
"""Queries that the reference handles together; their context is the block and the look-back before it."""
CONTEXT = LOOK_BACK + BLOCK
SOFT_CAP = 50.0
LONGEST_TIMESCALE = 10000.0


@dataclass(frozen=True)
class Workload:
    batch: int
    frames: int
    heads: int
    head_size: int

    @property
    def hidden(self) -> int:
        return self.heads * self.head_size


FULL = Workload(batch=64, frames=1721, heads=8, head_size=64)
SMOKE = Workload(batch=3, frames=41, heads=8, head_size=8)

OUTPUTS = ("attended",)
FIXED = ("inv_timescales",)


def blocks_of(x: torch.Tensor) -> torch.Tensor:
    """[batch, frames, ...] → [batch, blocks, BLOCK, ...], with zeros after the last frame."""
    batch, frames, *rest = x.shape
    count = -(-frames // BLOCK)
    padded = torch.cat([x, x.new_zeros(batch, count * BLOCK - frames, *rest)], dim=1)
    return padded.reshape(batch, count, BLOCK, *rest)


def contexts_of(x: torch.Tensor) -> torch.Tensor:
    """[batch, frames, ...] → [batch, blocks, CONTEXT, ...]: every block and the LOOK_BACK frames before it, with zeros
    before the first frame and after the last. Every frame is copied into two contexts."""
    batch, _, *rest = x.shape
    padded = torch.cat([x.new_zeros(batch, LOOK_BACK, *rest), x, x.new_zeros(batch, BLOCK - 1, *rest)], dim=1)
    return padded.unfold(1, CONTEXT, BLOCK).movedim(-1, 2).contiguous()


def at_their_keys(by_distance: torch.Tensor) -> torch.Tensor:
    """[..., BLOCK, LOOK_BACK + 1] → [..., BLOCK, CONTEXT]: row w, column c is the entry of distance w + LOOK_BACK - c.

    The last axis starts with the longest distance. Lengthening every row to CONTEXT + 1 and reading the result with
    rows of CONTEXT shifts row w by w places.
    """
    wider = pad(by_distance, (0, CONTEXT - LOOK_BACK)).flatten(-2)
    return wider[..., : BLOCK * CONTEXT].reshape(*by_distance.shape[:-1], CONTEXT)


def reference(
    hidden_states: torch.Tensor,
    mask: torch.Tensor,
    q_proj_weight: torch.Tensor,
    k_proj_weight: torch.Tensor,
    v_proj_weight: torch.Tensor,
    pos_proj_weight: torch.Tensor,
    per_dim_scale: torch.Tensor,
    inv_timescales: torch.Tensor,
    attention_logits_soft_cap: float,
) -> torch.Tensor:
    batch, frames, hidden = hidden_states.shape
    head_size = per_dim_scale.shape[0]
    by_head = (batch, frames, hidden // head_size, head_size)
    query_scale = head_size**-0.5 / math.log(2)
    q = (hidden_states @ q_proj_weight.T).view(by_head) * query_scale * softplus(per_dim_scale)
    k = (hidden_states @ k_proj_weight.T).view(by_head)
    v = (hidden_states @ v_proj_weight.T).view(by_head)
    q_blocks, k_contexts, v_contexts = blocks_of(q), contexts_of(k), contexts_of(v)

    distances = torch.arange(LOOK_BACK, -1, -1, dtype=inv_timescales.dtype, device=q.device)
    angles = distances[:, None] * inv_timescales
    positions = torch.cat([angles.sin(), angles.cos()], dim=-1) @ pos_proj_weight.T
    by_distance = torch.einsum("bunhd,fhd->bhunf", q_blocks, positions.view(-1, *by_head[2:]))
    logits = torch.einsum("bunhd,buchd->bhunc", q_blocks, k_contexts) + at_their_keys(by_distance)
    logits = attention_logits_soft_cap * torch.tanh(logits / attention_logits_soft_cap)

    present = contexts_of(~mask)[:, None, :, None]  # zeros outside the sequence: not present
    place = torch.arange(CONTEXT, device=q.device) - torch.arange(BLOCK, device=q.device)[:, None]
    admitted = present & (place >= 0) & (place <= LOOK_BACK)
    logits = logits.masked_fill(~admitted, torch.finfo(logits.dtype).min)
    probabilities = torch.softmax(logits, dim=-1)
    attended = torch.einsum("bhunc,buchd->bunhd", probabilities, v_contexts)
    return attended.flatten(1, 2)[:, :frames].contiguous()


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    batch, frames, hidden = workload.batch, workload.frames, workload.hidden
    hidden_states = torch.randn(batch, frames, hidden, device=device)
    lengths = torch.randint(frames - LOOK_BACK, frames + 1, (batch, 1), device=device)
    mask = torch.arange(frames, device=device) >= lengths
    weights = tuple(torch.randn(hidden, hidden, device=device) / hidden**0.5 for _ in range(4))
    per_dim_scale = 0.1 * torch.randn(workload.head_size, device=device)
    timescales = hidden // 2
    step = math.log(LONGEST_TIMESCALE) / (timescales - 1)
    inv_timescales = torch.exp(-step * torch.arange(timescales, dtype=torch.float32, device=device))
    return hidden_states, mask, *weights, per_dim_scale, inv_timescales, SOFT_CAP


def cost(workload: Workload) -> Cost:
    """Three dot products of head size per admitted pair and head, the padding mask not counted."""
    batch, frames, hidden = workload.batch, workload.frames, workload.hidden
    parameters = 4 * hidden * hidden + workload.head_size + hidden // 2
    pairs = batch * (frames * (LOOK_BACK + 1) - LOOK_BACK * (LOOK_BACK + 1) // 2)
    projections = 2 * hidden * hidden * (3 * batch * frames + LOOK_BACK + 1)
    return Cost(
        bytes_read=4 * batch * frames * hidden + batch * frames + 4 * parameters,
        bytes_written=4 * batch * frames * hidden,
        flops={"fp32_matrix": projections + 3 * 2 * pairs * hidden},
    )
