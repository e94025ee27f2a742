"""Causal multi-head latent attention in absorbed form behind short cached prefixes, over single-token pages.

Inputs (full workload):

    q_nope      [1954, 16, 512]    bf16   standard normal; the queries of 28 sequences, one below the other
    q_pe        [1954, 16, 64]     bf16   standard normal
    ckv_cache   [989669, 1, 512]   bf16   standard normal; (page, slot, latent)
    kpe_cache   [989669, 1, 64]    bf16   standard normal; (page, slot, rotary)
    qo_indptr   [29]               int32  fixed: sequence b owns query rows qo_indptr[b] … qo_indptr[b+1] - 1
    kv_indptr   [29]               int32  fixed: and entries kv_indptr[b] … kv_indptr[b+1] - 1 of kv_indices
    kv_indices  [2044]             int32  the cache tokens of all sequences: distinct, in random order
    sm_scale    float                     fixed

Outputs: output [1954, 16, 512] bf16, lse [1954, 16] fp32.

A sequence's keys are the cache tokens listed for it, in that order. It has 1 to 8 keys more than queries, and query i
sees the keys up to i + that difference, so the last query sees the last key. All heads share a token's latent vector c
and rotary part r; the logit of a head is sm_scale · (q_nope·c + q_pe·r), the rotary embedding being applied already.
lse is the log-sum-exp of the visible logits divided by ln 2; the output is the softmax-weighted sum of the latents.
Everything is computed in fp32 and the output is rounded once. The sequences have 1 to 420 queries.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats.grouped_attention import hidden_keys, visible_pairs
from metakernelbench.problems.formats.latent_attention import attend_latent
from metakernelbench.problems.formats.paged import lengths_of, random_pages, spans
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = "Causal prefill of multi-head latent attention (absorbed form) with short prefixes over single-token pages."

PROVENANCE = Provenance(
    upstream="FlashInfer-Trace",
    definition="mla_paged_prefill_causal_h16_ckv512_kpe64_ps1",
    record="892d1b8f-f6fe-40ad-aa3f-b6d391753bd3",
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
    query_offsets: tuple[int, ...]
    key_offsets: tuple[int, ...]

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs, over all sequences."""
        return visible_pairs(lengths_of(self.query_offsets), lengths_of(self.key_offsets))


# fmt: off
FULL = Workload(
    heads=16, latent=512, rotary=64, pool=989669,
    query_offsets=(
        0, 20, 31, 114, 128, 164, 173, 190, 327, 423, 456, 460, 499, 520, 602, 603, 613, 1033, 1061, 1081, 1142,
        1532, 1581, 1757, 1823, 1832, 1864, 1943, 1954,
    ),
    key_offsets=(
        0, 23, 38, 123, 141, 180, 191, 212, 353, 452, 488, 494, 538, 561, 651, 655, 669, 1092, 1122, 1145, 1209,
        1602, 1655, 1835, 1905, 1917, 1951, 2032, 2044,
    ),
)
# fmt: on
SMOKE = Workload(heads=4, latent=32, rotary=8, pool=48, query_offsets=(0, 3, 4, 10), key_offsets=(0, 6, 8, 15))

OUTPUTS = ("output", "lse")
FIXED = ("qo_indptr", "kv_indptr")


def reference(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    compute = wide(q_nope)
    output = torch.zeros_like(q_nope)
    lse = torch.full(q_nope.shape[:2], -torch.inf, dtype=compute, device=q_nope.device)
    for (first, last), (start, stop) in zip(spans(qo_indptr), spans(kv_indptr), strict=True):
        tokens = kv_indices[start:stop]
        latents = ckv_cache.squeeze(1)[tokens].to(compute)
        k_pe = kpe_cache.squeeze(1)[tokens].to(compute)
        keys, queries = stop - start, last - first
        hidden = hidden_keys(torch.arange(queries, device=q_nope.device), keys, keys - queries)
        for i in range(queries):
            one = slice(first + i, first + i + 1)
            attended, lse[one] = attend_latent(
                q_nope[one].to(compute), q_pe[one].to(compute), latents, k_pe, sm_scale, hidden[i : i + 1]
            )
            output[one] = attended.to(q_nope.dtype)
    return output, lse


def vectorized(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All queries of a sequence at once, with one gather and one cast for all sequences."""
    compute = wide(q_nope)
    q_nope_wide, q_pe_wide = q_nope.to(compute), q_pe.to(compute)
    latents, k_pe = (cache.squeeze(1)[kv_indices].to(compute) for cache in (ckv_cache, kpe_cache))
    outputs, lses = [], []
    for (first, last), (start, stop) in zip(spans(qo_indptr), spans(kv_indptr), strict=True):
        rows, listed = slice(first, last), slice(start, stop)
        keys, queries = stop - start, last - first
        hidden = hidden_keys(torch.arange(queries, device=q_nope.device), keys, keys - queries)
        attended, lse = attend_latent(
            q_nope_wide[rows], q_pe_wide[rows], latents[listed], k_pe[listed], sm_scale, hidden
        )
        outputs.append(attended)
        lses.append(lse)
    return torch.cat(outputs).to(q_nope.dtype), torch.cat(lses)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    queries, pool = (workload.query_offsets[-1], workload.heads), (workload.pool, 1)
    q_nope = torch.randn(*queries, workload.latent, dtype=torch.bfloat16, device=device)
    q_pe = torch.randn(*queries, workload.rotary, dtype=torch.bfloat16, device=device)
    ckv_cache = torch.randn(*pool, workload.latent, dtype=torch.bfloat16, device=device)
    kpe_cache = torch.randn(*pool, workload.rotary, dtype=torch.bfloat16, device=device)
    qo_indptr = torch.tensor(workload.query_offsets, dtype=torch.int32, device=device)
    kv_indptr = torch.tensor(workload.key_offsets, dtype=torch.int32, device=device)
    kv_indices = random_pages(workload.key_offsets[-1], workload.pool, device)
    return q_nope, q_pe, ckv_cache, kpe_cache, qo_indptr, kv_indptr, kv_indices, SM_SCALE


def cost(workload: Workload) -> Cost:
    heads = workload.query_offsets[-1] * workload.heads
    keys = workload.key_offsets[-1]
    width = workload.latent + workload.rotary
    integers = keys + len(workload.query_offsets) + len(workload.key_offsets)
    return Cost(
        bytes_read=2 * (heads + keys) * width + 4 * integers,
        bytes_written=2 * heads * workload.latent + 4 * heads,
        flops={"bf16": 2 * workload.pairs * workload.heads * (width + workload.latent)},
    )
