"""Multi-head latent attention in absorbed form: all heads share one key per token, which is also its value.

A token's key is a latent vector followed by a rotary part; its value is the latent vector. Queries have the same two
parts for every head.
"""

import math

import torch


def attend_latent(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    latents: torch.Tensor,
    k_pe: torch.Tensor,
    sm_scale: float,
    hidden: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q_nope [rows, heads, latent] with q_pe [rows, heads, rotary] over latents [keys, latent] with k_pe
    [keys, rotary], all in the dtype to compute in.

    Returns the output [rows, heads, latent] and the log-sum-exp of the logits divided by ln 2 [rows, heads]. The logits
    are the sum of both dot products, times `sm_scale` afterwards; `hidden` [rows, keys] is True where the query may not
    see the key. All tensors may have a leading axis of sequences.
    """
    latent_logits = torch.einsum("...qhl,...kl->...qhk", q_nope, latents)
    rotary_logits = torch.einsum("...qhr,...kr->...qhk", q_pe, k_pe)
    logits = (latent_logits + rotary_logits) * sm_scale
    if hidden is not None:
        logits = logits.masked_fill(hidden[..., None, :], -math.inf)
    lse = torch.logsumexp(logits, dim=-1) / math.log(2)
    return torch.einsum("...qhk,...kl->...qhl", torch.softmax(logits, dim=-1), latents), lse
