"""The recurrences of the family, one token at a time in the dtype of the inputs, independent of the problem modules."""

from __future__ import annotations

import torch


def promoted(*values):
    """Float tensors in float64, the rest as it is."""
    return [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in values]


def spread(x, heads, dim, *, tiled=False):
    """Query or key heads for `heads` value heads: neighbours share one, or, as a mistake, every so-many-th."""
    ratio = heads // x.shape[dim]
    return torch.cat([x] * ratio, dim=dim) if tiled else x.repeat_interleave(ratio, dim=dim)


def delta_rule(q, k, v, log_decay, beta, state, *, decay_late=False, read_early=False):
    """[..., T, K], [..., T, V], log-decays [..., T, K or 1], beta [..., T], state [..., K, V]."""
    outputs = []
    for t in range(q.shape[-2]):
        decay = log_decay[..., t, :].exp().unsqueeze(-1)
        if not decay_late:
            state = decay * state
        before = state
        correction = beta[..., t, None] * (v[..., t, :] - (k[..., t, :, None] * state).sum(-2))
        state = state + k[..., t, :, None] * correction[..., None, :]
        if decay_late:
            state = decay * state
        outputs.append((q[..., t, :, None] * (before if read_early else state)).sum(-2))
    return torch.stack(outputs, dim=-2), state


def accumulation(q, k, v, log_decay):
    """Outputs of S ← diag(d)·S + k ⊗ v, o = Sᵀq."""
    state = torch.zeros(*q.shape[:-2], q.shape[-1], v.shape[-1], dtype=q.dtype)
    outputs = []
    for t in range(q.shape[-2]):
        state = log_decay[..., t, :].exp().unsqueeze(-1) * state + k[..., t, :, None] * v[..., t, None, :]
        outputs.append((q[..., t, :, None] * state).sum(-2))
    return torch.stack(outputs, dim=-2)


def state_space(x, a, B, C, state):
    """x [b, T, h, P], a [b, T, h], B and C [b, T, h, N] (already one per head), state [b, h, P, N]."""
    outputs = []
    for t in range(x.shape[1]):
        state = a[:, t].exp()[..., None, None] * state + x[:, t, :, :, None] * B[:, t, :, None, :]
        outputs.append((state * C[:, t, :, None, :]).sum(-1))
    return torch.stack(outputs, dim=1), state
