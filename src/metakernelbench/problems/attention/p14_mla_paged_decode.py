"""One decoding step of multi-head latent attention in absorbed form over a cache of single-token pages.

Inputs (full workload):

    q_nope      [64, 16, 512]      bf16   standard normal; one query token per sequence
    q_pe        [64, 16, 64]       bf16   standard normal
    ckv_cache   [989669, 1, 512]   bf16   standard normal; (page, slot, latent)
    kpe_cache   [989669, 1, 64]    bf16   standard normal; (page, slot, rotary)
    kv_indptr   [65]               int32  fixed: sequence b owns entries kv_indptr[b] … kv_indptr[b+1] - 1
    kv_indices  [75145]            int32  the tokens of all sequences: distinct, in random order
    sm_scale    float                     fixed

Outputs: output [64, 16, 512] bf16, lse [64, 16] fp32.

A sequence's tokens are those listed for it. All heads share a token's latent vector c and rotary part r; the logit of a
head is sm_scale · (q_nope·c + q_pe·r), the rotary embedding being applied already. lse is the log-sum-exp of the logits
divided by ln 2; the output is the softmax-weighted sum of the latents. Everything is computed in fp32 and the output is
rounded once. The contexts have 510 to 9,197 tokens.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats.latent_attention import attend_latent
from metakernelbench.problems.formats.paged import padded_rows, random_pages, spans
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = "One decoding step of multi-head latent attention (absorbed form) over a paged cache with one token per page."

PROVENANCE = Provenance(
    upstream="FlashInfer-Trace",
    definition="mla_paged_decode_h16_ckv512_kpe64_ps1",
    record="5bef8d88-0f74-4ccb-a256-b02842951df3",
    licence="Apache-2.0",
    source_model="DeepSeek-V3 (tensor parallel 8)",
)

SM_SCALE = 0.1352337747812271


@dataclass(frozen=True)
class Workload:
    heads: int
    latent: int
    rotary: int
    pool: int
    token_offsets: tuple[int, ...]

    @property
    def sequences(self) -> int:
        return len(self.token_offsets) - 1

    @property
    def tokens(self) -> int:
        """Cache tokens that take part, over all sequences."""
        return self.token_offsets[-1]


# fmt: off
FULL = Workload(
    heads=16, latent=512, rotary=64, pool=989669,
    token_offsets=(
        0, 537, 1051, 1689, 2199, 3771, 5311, 6904, 8494, 11155, 13258, 15676, 24873, 25427, 25946, 27825,
        28517, 29331, 30010, 30680, 31220, 31736, 32254, 32866, 33378, 36677, 37310, 37846, 38896, 39415, 39983,
        40641, 41155, 41689, 42417, 43059, 43975, 45419, 47001, 48634, 50171, 51682, 52311, 53407, 54908, 56394,
        57906, 58425, 58975, 59915, 60483, 61003, 64016, 64571, 65094, 66520, 67099, 67743, 68267, 68784, 69317,
        70745, 72061, 73455, 75145,
    ),
)
# fmt: on
SMOKE = Workload(heads=4, latent=32, rotary=8, pool=64, token_offsets=(0, 7, 8, 25))

OUTPUTS = ("output", "lse")
FIXED = ("kv_indptr",)


def reference(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    compute = wide(q_nope)
    output = torch.zeros_like(q_nope)
    lse = torch.full(q_nope.shape[:2], -torch.inf, dtype=compute, device=q_nope.device)
    for b, (start, stop) in enumerate(spans(kv_indptr)):
        one, tokens = slice(b, b + 1), kv_indices[start:stop]
        latents = ckv_cache.squeeze(1)[tokens].to(compute)
        k_pe = kpe_cache.squeeze(1)[tokens].to(compute)
        attended, lse[one] = attend_latent(q_nope[one].to(compute), q_pe[one].to(compute), latents, k_pe, sm_scale)
        output[one] = attended.to(q_nope.dtype)
    return output, lse


def vectorized(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All sequences at once, padded to the longest: eight times the tokens, but a dozen launches, not hundreds."""
    compute = wide(q_nope)
    rows, padding = padded_rows(kv_indptr)
    tokens = kv_indices[rows]
    latents = ckv_cache.squeeze(1)[tokens].to(compute)
    k_pe = kpe_cache.squeeze(1)[tokens].to(compute)
    q_nope_rows, q_pe_rows = q_nope[:, None].to(compute), q_pe[:, None].to(compute)
    output, lse = attend_latent(q_nope_rows, q_pe_rows, latents, k_pe, sm_scale, padding[:, None])
    return output.squeeze(1).to(q_nope.dtype), lse.squeeze(1)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    queries, pool = (workload.sequences, workload.heads), (workload.pool, 1)
    q_nope = torch.randn(*queries, workload.latent, dtype=torch.bfloat16, device=device)
    q_pe = torch.randn(*queries, workload.rotary, dtype=torch.bfloat16, device=device)
    ckv_cache = torch.randn(*pool, workload.latent, dtype=torch.bfloat16, device=device)
    kpe_cache = torch.randn(*pool, workload.rotary, dtype=torch.bfloat16, device=device)
    kv_indptr = torch.tensor(workload.token_offsets, dtype=torch.int32, device=device)
    kv_indices = random_pages(workload.tokens, workload.pool, device)
    return q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, SM_SCALE


def cost(workload: Workload) -> Cost:
    heads = workload.sequences * workload.heads
    key = workload.latent + workload.rotary
    integers = workload.tokens + workload.sequences + 1
    return Cost(
        bytes_read=2 * (workload.tokens + heads) * key + 4 * integers,
        bytes_written=2 * heads * workload.latent + 4 * heads,
        flops={"bf16": 2 * workload.tokens * workload.heads * (key + workload.latent)},
    )
