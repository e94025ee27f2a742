"""Gradients of a causal attention layer with normalised queries and keys, rotary embedding and soft-capped logits.

Inputs (full workload), all fp32:

    grad_output             [64, 256, 3072]  standard normal: the gradient at the layer's output
    hidden_states           [64, 256, 3072]  standard normal
    cos, sin                [64, 256, 128]   fixed: of t · 10000 ** (-j / 64) for position t; column j and j + 64 alike
    q_weight                [3072, 3072]     standard normal / sqrt(3072); (out, in), as all weights
    k_weight, v_weight      [1024, 3072]     likewise
    o_weight                [3072, 3072]     likewise
    q_norm_weight           [128]            0.1 * standard normal
    k_norm_weight           [128]            likewise
    scaling                 float            128 ** -0.5
    attn_logit_softcapping  float            50.0
    rms_norm_eps            float            1e-6

Outputs, fp32: the gradients at hidden_states, q_weight, k_weight, v_weight, o_weight, q_norm_weight, k_norm_weight.

The layer: queries, keys and values are products of hidden_states with the weights, in heads of 128 (24 query heads and
8 KV heads, three consecutive query heads on each). Every query and key head is divided by its root mean square (eps
inside the root), multiplied by 1 + norm weight, and rotated by its position: (a, b) → (a·cos - b·sin, b·cos + a·sin) on
the two halves of the head. Logits = scaling · q·k, then cap · tanh(logits / cap), then the causal mask; softmax, the
values, output projection. No bias, no dropout. Everything is computed in fp32.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.problem import Cost, Inputs, Provenance

SUBJECT = (
    "Backward pass of causal grouped-query attention with per-head RMS norm of queries and keys, rotary embedding and "
    "a tanh soft cap, given the gradient at the layer's output."
)

PROVENANCE = Provenance(
    upstream="SOL-ExecBench, subset L2, row 36, workload 5",
    licence="NVIDIA Evaluation Dataset License Agreement (nothing of the dataset is used)",
    source_model="Gemma 3 4B, as upstream names it",
    inferred=(
        "The formulas follow the public Gemma 3 attention and norm in Hugging Face transformers, with the soft cap of "
        "its eager attention; the backward pass is ours, checked against autograd.",
        "grad_output and hidden_states are standard normal: no visible source gives their law.",
        "rms_norm_eps = 1e-6 in its leading digits (Gemma 3's default).",
        "scaling = 1 / sqrt(head size); the real model scales by 256 ** -0.5 with heads of 256, this problem has 128.",
        "attn_logit_softcapping = 50, Gemma 2's value; Gemma 3's own default is none.",
        "The rotary base 10000 is that of Gemma 3's local layers, whose window exceeds the 256 positions.",
        "The order of the seven gradients is that of the inputs they belong to.",
    ),
)

ROTARY_BASE = 10000.0
SOFT_CAP = 50.0
RMS_NORM_EPS = 1e-6


@dataclass(frozen=True)
class Workload:
    batch: int
    length: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_size: int


FULL = Workload(batch=64, length=256, hidden=3072, query_heads=24, kv_heads=8, head_size=128)
SMOKE = Workload(batch=2, length=16, hidden=48, query_heads=6, kv_heads=2, head_size=8)

OUTPUTS = (
    "grad_hidden_states",
    "grad_q_weight",
    "grad_k_weight",
    "grad_v_weight",
    "grad_o_weight",
    "grad_q_norm_weight",
    "grad_k_norm_weight",
)
FIXED = ("cos", "sin")


def heads_of(x: torch.Tensor, head_size: int) -> torch.Tensor:
    """[batch, t, width] → [batch, head, t, head_size]."""
    return x.reshape(*x.shape[:2], -1, head_size).transpose(1, 2)


def flat_of(x: torch.Tensor) -> torch.Tensor:
    """[batch, head, t, head_size] → [batch · t, width]."""
    return x.transpose(1, 2).reshape(x.shape[0] * x.shape[2], -1)


def sum_over_group(x: torch.Tensor, group: int) -> torch.Tensor:
    """[batch, query head, t, head_size] → [batch, KV head, t, head_size], summed over the heads that share one."""
    return x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(dim=2)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


def rotate_half_transposed(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([b, -a], dim=-1)


def backward_through_norm_and_rotation(
    grad: torch.Tensor,
    normalised: torch.Tensor,
    inverse_rms: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """From the gradient at the rotated heads to those at the projected heads and at the norm weight."""
    grad = grad * cos + rotate_half_transposed(grad * sin)
    grad_weight = (grad * normalised).sum(dim=(0, 1, 2))
    grad = grad * (1 + weight)
    return inverse_rms * (grad - normalised * (grad * normalised).mean(dim=-1, keepdim=True)), grad_weight


def reference(
    grad_output: torch.Tensor,
    hidden_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    v_weight: torch.Tensor,
    o_weight: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    scaling: float,
    attn_logit_softcapping: float,
    rms_norm_eps: float,
) -> tuple[torch.Tensor, ...]:
    length, head_size = hidden_states.shape[1], q_norm_weight.shape[0]
    group = q_weight.shape[0] // k_weight.shape[0]
    cos, sin = cos[:, None], sin[:, None]

    # The forward pass, as far as its values are needed.
    q_projected = heads_of(hidden_states @ q_weight.T, head_size)
    k_projected = heads_of(hidden_states @ k_weight.T, head_size)
    v = heads_of(hidden_states @ v_weight.T, head_size).repeat_interleave(group, dim=1)
    q_inverse_rms = torch.rsqrt(q_projected.square().mean(dim=-1, keepdim=True) + rms_norm_eps)
    k_inverse_rms = torch.rsqrt(k_projected.square().mean(dim=-1, keepdim=True) + rms_norm_eps)
    q_normalised, k_normalised = q_projected * q_inverse_rms, k_projected * k_inverse_rms
    q, k = q_normalised * (1 + q_norm_weight), k_normalised * (1 + k_norm_weight)
    q = q * cos + rotate_half(q) * sin
    k = (k * cos + rotate_half(k) * sin).repeat_interleave(group, dim=1)
    squashed = torch.tanh(scaling * (q @ k.mT) / attn_logit_softcapping)
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    probabilities = torch.softmax((attn_logit_softcapping * squashed).masked_fill(future, -torch.inf), dim=-1)
    attended = probabilities @ v

    # Output projection and attention.
    grad_flat = grad_output.flatten(0, 1)
    grad_o_weight = grad_flat.T @ flat_of(attended)
    grad_attended = heads_of(grad_output @ o_weight, head_size)
    grad_v = sum_over_group(probabilities.mT @ grad_attended, group)
    grad_p = grad_attended @ v.mT
    grad_logits = probabilities * (grad_p - (probabilities * grad_p).sum(dim=-1, keepdim=True))
    grad_scores = scaling * grad_logits * (1 - squashed.square())
    grad_q = grad_scores @ k
    grad_k = sum_over_group(grad_scores.mT @ q, group)

    # Rotation, norms and projections.
    grad_q, grad_q_norm_weight = backward_through_norm_and_rotation(
        grad_q, q_normalised, q_inverse_rms, q_norm_weight, cos, sin
    )
    grad_k, grad_k_norm_weight = backward_through_norm_and_rotation(
        grad_k, k_normalised, k_inverse_rms, k_norm_weight, cos, sin
    )
    x, gq, gk, gv = hidden_states.flatten(0, 1), flat_of(grad_q), flat_of(grad_k), flat_of(grad_v)
    grad_hidden_states = (gq @ q_weight + gk @ k_weight + gv @ v_weight).view_as(hidden_states)
    return (
        grad_hidden_states,
        gq.T @ x,
        gk.T @ x,
        gv.T @ x,
        grad_o_weight,
        grad_q_norm_weight,
        grad_k_norm_weight,
    )


def rotary_tables(workload: Workload, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [batch, length, head_size], the same for every member of the batch, stored in full."""
    half = workload.head_size // 2
    frequencies = ROTARY_BASE ** (-torch.arange(half, dtype=torch.float32, device=device) / half)
    angles = torch.arange(workload.length, dtype=torch.float32, device=device)[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1).expand(workload.batch, -1, -1)
    return angles.cos().contiguous(), angles.sin().contiguous()


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    hidden, size = workload.hidden, workload.head_size
    activation = (workload.batch, workload.length, hidden)
    q_width, kv_width = workload.query_heads * size, workload.kv_heads * size
    grad_output = torch.randn(activation, device=device)
    hidden_states = torch.randn(activation, device=device)
    cos, sin = rotary_tables(workload, device)
    q_weight = torch.randn(q_width, hidden, device=device) / hidden**0.5
    k_weight = torch.randn(kv_width, hidden, device=device) / hidden**0.5
    v_weight = torch.randn(kv_width, hidden, device=device) / hidden**0.5
    o_weight = torch.randn(hidden, q_width, device=device) / q_width**0.5
    q_norm_weight = 0.1 * torch.randn(size, device=device)
    k_norm_weight = 0.1 * torch.randn(size, device=device)
    tensors = (grad_output, hidden_states, cos, sin, q_weight, k_weight, v_weight, o_weight, q_norm_weight)
    return (*tensors, k_norm_weight, size**-0.5, SOFT_CAP, RMS_NORM_EPS)


def cost(workload: Workload) -> Cost:
    """Six attention products (two forward, four backward), each over the visible half of the pairs."""
    tokens, hidden = workload.batch * workload.length, workload.hidden
    q_width, kv_width = workload.query_heads * workload.head_size, workload.kv_heads * workload.head_size
    weights = hidden * (2 * q_width + 2 * kv_width) + 2 * workload.head_size
    pairs = workload.batch * workload.length * (workload.length + 1) // 2
    projections = 3 * 2 * tokens * hidden * (q_width + 2 * kv_width) + 2 * 2 * tokens * hidden * q_width
    return Cost(
        bytes_read=4 * (2 * tokens * hidden + 2 * tokens * workload.head_size + weights),
        bytes_written=4 * (tokens * hidden + weights),
        flops={"fp32_matrix": projections + 6 * 2 * pairs * q_width},
    )
