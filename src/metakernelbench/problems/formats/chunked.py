"""Linear attention in chunks: what a recurrence over tokens becomes when it advances one chunk at a time.

A state S (key × value) decays by diag(d) per token and absorbs an outer product. Within a chunk, everything that does
not depend on the incoming state is a product of matrices, for all chunks at once; only the state goes from chunk to
chunk in order. In exact arithmetic the results equal those of the recurrence.

Log-decays come as [..., T, K] (one per key channel) or [..., T, 1] (one per head). Per-channel decays are factored into
e^G and e^-G with G their running sum in the chunk, so a chunk must not decay by more than float32's range. Per-head
decays are formed from differences and have no such limit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad


def segment_sum(a: torch.Tensor) -> torch.Tensor:
    """[..., L] → [..., L, L]: entry (i, j) is a_{j+1} + … + a_i for i ≥ j (0 on the diagonal), minus infinity above.

    Each sum is formed by itself: differences of one running sum would cancel.
    """
    size = a.shape[-1]
    lower = torch.ones(size, size, dtype=torch.bool, device=a.device).tril()
    terms = a.unsqueeze(-1).expand(*a.shape, size).masked_fill(~lower.tril(-1), 0)
    return terms.cumsum(dim=-2).masked_fill(~lower, float("-inf"))


def into_chunks(x: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """`x` with axis `dim` (counted from the end) split into (chunks, size), padded with zeros at its end."""
    missing = -x.shape[dim] % size
    padded = pad(x, [0, 0] * (-dim - 1) + [0, missing])
    return padded.unflatten(dim, (padded.shape[dim] // size, size))  # type: ignore[no-untyped-call, no-any-return]


class _Decay(NamedTuple):
    """The decays of all chunks, from log-decays [..., chunks, size, K or 1]."""

    from_start: torch.Tensor
    """[..., chunks, size, K or 1]: what is left, after each token, of what came before the chunk."""
    to_end: torch.Tensor
    """[..., chunks, size, K or 1]: what is left, at the end of the chunk, of what each token brought."""
    log_decay: torch.Tensor

    @property
    def whole(self) -> torch.Tensor:
        """[..., chunks, K or 1, 1]: what is left of the state after a whole chunk."""
        return self.from_start[..., -1, :].unsqueeze(-1)

    def products(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """[..., size, size]: x_i · y_j with what decays between j and i; zero for i < j."""
        if self.log_decay.shape[-1] == 1:
            return (x @ y.mT) * segment_sum(self.log_decay.squeeze(-1)).exp()
        return ((x * self.from_start) @ (y / self.from_start).mT).tril()


def _decays(log_decay: torch.Tensor) -> _Decay:
    later = pad(log_decay[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)
    return _Decay(log_decay.cumsum(-2).exp(), later.exp(), log_decay)


def chunked_accumulation(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, size: int
) -> torch.Tensor:
    """Outputs [..., T, V] of S ← diag(d)·S + k ⊗ v, o = Sᵀq, from a state of zeros."""
    length = q.shape[-2]
    q, k, v, log_decay = (into_chunks(x, size, -2) for x in (q, k, v, log_decay))
    decay = _decays(log_decay)
    within = decay.products(q, k) @ v
    reading, adding = q * decay.from_start, (k * decay.to_end).mT @ v
    state = torch.zeros_like(adding[..., 0, :, :])
    outputs = []
    for chunk in range(q.shape[-3]):
        outputs.append(within[..., chunk, :, :] + reading[..., chunk, :, :] @ state)
        state = decay.whole[..., chunk, :, :] * state + adding[..., chunk, :, :]
    return torch.cat(outputs, dim=-2)[..., :length, :]


def chunked_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [..., T, V] and last state of S ← diag(d)·S, S ← S + k ⊗ β(v − Sᵀk), o = Sᵀq, from `state` [..., K, V].

    The corrections of a chunk depend on each other through a unit lower-triangular system, solved for all at once.
    """
    length, key_size = q.shape[-2], k.shape[-1]
    q, k, v, log_decay = (into_chunks(x, size, -2) for x in (q, k, v, log_decay))
    beta = into_chunks(beta.unsqueeze(-1), size, -2)
    decay = _decays(log_decay)
    right = beta * torch.cat([k * decay.from_start, v], dim=-1)
    solved = torch.linalg.solve_triangular(beta * decay.products(k, k), right, upper=False, unitriangular=True)
    from_state, from_values = solved[..., :key_size], solved[..., key_size:]
    scores, reading, writing = decay.products(q, k), q * decay.from_start, (k * decay.to_end).mT
    outputs = []
    for chunk in range(q.shape[-3]):
        update = from_values[..., chunk, :, :] - from_state[..., chunk, :, :] @ state
        outputs.append(reading[..., chunk, :, :] @ state + scores[..., chunk, :, :] @ update)
        state = decay.whole[..., chunk, :, :] * state + writing[..., chunk, :, :] @ update
    return torch.cat(outputs, dim=-2)[..., :length, :], state
