"""Latent attention of decoding tokens, each over its own list of selected cache tokens (sparse attention).

Inputs (full workload):

    q_nope          [62, 16, 512]     bf16   standard normal; one query token per sequence
    q_pe            [62, 16, 64]      bf16   standard normal
    ckv_cache       [6465, 64, 512]   bf16   standard normal; (page, slot, latent)
    kpe_cache       [6465, 64, 64]    bf16   standard normal; (page, slot, rotary)
    sparse_indices  [62, 2048]        int32  per query the numbers page · 64 + slot of its 2 to 2,048 selected tokens,
                                             in ascending order, then -1; no token is in two rows
    sm_scale        float                    fixed

Outputs: output [62, 16, 512] bf16, lse [62, 16] fp32.

A query attends to the tokens listed for it; an entry -1 stands for nothing. All heads share a token's latent vector c
and rotary part r; the logit of a head is sm_scale · (q_nope·c + q_pe·r), the rotary embedding being applied already.
lse is the log-sum-exp of the logits divided by ln 2; the output is the softmax-weighted sum of the latents.
Everything is computed in fp32 and the output is rounded once. How many tokens a row lists is fixed; one row lists
2,048, one has 2.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats.latent_attention import attend_latent
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = "Sparse latent attention: each decoding token attends to its own list of up to 2048 tokens of a paged cache."

PROVENANCE = Provenance(
    upstream="FlashInfer-Trace",
    definition="dsa_sparse_attention_h16_ckv512_kpe64_topk2048_ps64",
    record="0f8137e0c871466f8b4bdce5bfd57658",
    licence="Apache-2.0",
    source_model="DeepSeek-V3.2 (tensor parallel 8)",
)

SM_SCALE = 0.1352337788608801


@dataclass(frozen=True)
class Workload:
    heads: int
    latent: int
    rotary: int
    page_size: int
    pool: int
    counts: tuple[int, ...]
    """Selected tokens of each row; all of its context, except in the long row."""
    long_row: int
    runs: tuple[tuple[int, int], ...]
    """The long row's selection from its context: (first token, length) of each run; the last run ends the context."""

    @property
    def list_width(self) -> int:
        return self.counts[self.long_row]


# fmt: off
FULL = Workload(
    heads=16, latent=512, rotary=64, page_size=64, pool=6465,
    counts=(
        18, 11, 2048, 20, 25, 45, 135, 7, 8, 10, 22, 17, 11, 30, 130, 9, 600, 255, 1033, 1010, 58, 2, 21, 954,
        7, 14, 1015, 28, 64, 5, 18, 33, 26, 86, 5, 14, 10, 90, 53, 22, 2, 17, 154, 51, 121, 25, 16, 5, 19, 12,
        44, 124, 33, 1157, 9, 5, 1319, 300, 23, 35, 389, 8,
    ),
    long_row=2,
    runs=(
        (0, 53), (54, 10), (65, 25), (91, 11), (103, 42), (146, 12), (159, 65), (225, 7), (233, 3), (237, 40),
        (278, 1), (280, 12), (293, 13), (307, 8), (316, 1), (318, 5), (324, 4), (329, 3), (333, 3), (337, 21),
        (359, 14), (374, 1), (377, 1), (379, 24), (404, 110), (515, 13), (529, 20), (550, 6), (557, 41),
        (599, 16), (616, 14), (631, 15), (647, 10), (658, 6), (665, 24), (691, 11), (703, 15), (719, 10),
        (730, 21), (752, 21), (774, 26), (801, 28), (830, 7), (838, 11), (850, 1), (852, 12), (865, 18),
        (884, 5), (890, 1), (892, 1), (894, 9), (904, 11), (916, 10), (927, 12), (940, 4), (946, 23), (970, 7),
        (978, 6), (985, 29), (1015, 5), (1021, 22), (1045, 13), (1059, 37), (1097, 10), (1108, 42), (1151, 1),
        (1153, 30), (1184, 2), (1187, 31), (1219, 33), (1253, 8), (1262, 102), (1366, 54), (1421, 98),
        (1520, 19), (1540, 23), (1564, 7), (1572, 31), (1604, 35), (1640, 21), (1662, 4), (1668, 10), (1681, 4),
        (1688, 15), (1706, 4), (1711, 13), (1725, 3), (1729, 1), (1731, 3), (1736, 12), (1749, 47), (1798, 70),
        (1869, 108), (1978, 2), (1981, 9), (1992, 6), (1999, 31), (2031, 24), (2056, 105),
    ),
)
SMOKE = Workload(
    heads=4, latent=32, rotary=8, page_size=4, pool=24,
    counts=(3, 1, 8, 5), long_row=2, runs=((0, 3), (4, 2), (8, 3)),
)
# fmt: on

OUTPUTS = ("output", "lse")


def reference(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    sparse_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    compute = wide(q_nope)
    tokens = sparse_indices.clamp_min(0)
    latents = ckv_cache.flatten(0, 1)[tokens].to(compute)
    k_pe = kpe_cache.flatten(0, 1)[tokens].to(compute)
    absent = (sparse_indices < 0)[:, None]
    output, lse = attend_latent(q_nope[:, None].to(compute), q_pe[:, None].to(compute), latents, k_pe, sm_scale, absent)
    return output.squeeze(1).to(q_nope.dtype), lse.squeeze(1)


def selected_tokens(workload: Workload, row: int, device: torch.device) -> torch.Tensor:
    """The selected positions of a row's context, ascending."""
    if row != workload.long_row:
        return torch.arange(workload.counts[row], device=device)
    return torch.cat([torch.arange(first, first + length, device=device) for first, length in workload.runs])


def random_lists(workload: Workload, device: torch.device) -> torch.Tensor:
    """sparse_indices, each row's context placed on pages of its own, drawn at random."""
    pages = torch.randperm(workload.pool, device=device)
    lists = torch.full((len(workload.counts), workload.list_width), -1, dtype=torch.int32, device=device)
    used = 0
    for row, count in enumerate(workload.counts):
        tokens = selected_tokens(workload, row, device)
        slots = pages[used + tokens // workload.page_size] * workload.page_size + tokens % workload.page_size
        lists[row, :count] = slots.sort().values
        context = sum(workload.runs[-1]) if row == workload.long_row else count
        used += -(-context // workload.page_size)
    return lists


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    queries, slots = (len(workload.counts), workload.heads), (workload.pool, workload.page_size)
    q_nope = torch.randn(*queries, workload.latent, dtype=torch.bfloat16, device=device)
    q_pe = torch.randn(*queries, workload.rotary, dtype=torch.bfloat16, device=device)
    ckv_cache = torch.randn(*slots, workload.latent, dtype=torch.bfloat16, device=device)
    kpe_cache = torch.randn(*slots, workload.rotary, dtype=torch.bfloat16, device=device)
    return q_nope, q_pe, ckv_cache, kpe_cache, random_lists(workload, device), SM_SCALE


def cost(workload: Workload) -> Cost:
    heads = len(workload.counts) * workload.heads
    key = workload.latent + workload.rotary
    tokens = sum(workload.counts)
    return Cost(
        bytes_read=2 * (tokens + heads) * key + 4 * len(workload.counts) * workload.list_width,
        bytes_written=2 * heads * workload.latent + 4 * heads,
        flops={"bf16": 2 * tokens * workload.heads * (key + workload.latent)},
    )
