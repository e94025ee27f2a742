"""The selector of sparse attention: scores every cached token with small FP8 heads and returns the best 2048.

Inputs (full workload):

    q_index_fp8        [31, 64, 128]        e4m3   standard normal, rounded; (sequence, index head, d)
    k_index_cache_fp8  [11923, 64, 1, 132]  int8   pages of 64 tokens as bytes, packed as below
    weights            [31, 64]             fp32   standard normal, so some are negative
    seq_lens           [31]                 int32  fixed, 6 to 2,693
    block_table        [31, 43]             int32  the pages of each sequence: distinct, at random, never page 0; then 0

Output: a tuple of one, topk_indices [31, 2048] int32.

A page is 64 · 132 bytes: first 64 · 128 E4M3 values, token after token, then 64 little-endian fp32 scales in [0.5,
1), one per token; the shape [64, 1, 132] says nothing of that. A token's key is its values times its scale. Token j
of a sequence lies in slot j % 64 of page block_table[b, j // 64]; slots past the end of the sequence hold unrelated
data.

The score of a token is the sum over the heads of weight · max(0, q·key), computed in fp32. The min(2048, length)
tokens of the highest score are taken in the order of their position in the sequence, each as page · 64 + slot; the
rest is -1. The draw is repeated until the 2048th and the 2049th score differ by at least 1e-3 in every sequence that
has both, far more than fp32 rounding, so that the selection is the same for every correct implementation.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = "Score cached tokens with FP8 index heads and return the slots of the 2048 best of each sequence, in order."

PROVENANCE = Provenance(
    upstream="FlashInfer-Trace",
    definition="dsa_topk_indexer_fp8_h64_d128_topk2048_ps64",
    record="a52c09bc-2ee5-4366-be02-457932a80631",
    licence="Apache-2.0",
    source_model="DeepSeek-V3.2",
)

TOP_K = 2048
SCALE_BYTES = 4
MARGIN = 1e-3
MOST_DRAWS = 16


@dataclass(frozen=True)
class Workload:
    heads: int
    head_size: int
    page_size: int
    pool: int
    seq_lens: tuple[int, ...]

    @property
    def pages(self) -> tuple[int, ...]:
        """Pages of each sequence."""
        return tuple(-(-n // self.page_size) for n in self.seq_lens)


# fmt: off
FULL = Workload(
    heads=64, head_size=128, page_size=64, pool=11923,
    seq_lens=(
        63, 9, 2693, 212, 11, 25, 6, 50, 77, 22, 25, 10, 52, 76, 11, 30, 1822, 25, 1034, 1811, 7, 13, 23, 1896,
        13, 285, 18, 166, 16, 1421, 12,
    ),
)
# fmt: on
# One selection leaves out a third of its tokens, so that scores summed in bf16 would choose others.
SMOKE = Workload(heads=8, head_size=16, page_size=64, pool=90, seq_lens=(3, 3000, 2048, 70))

OUTPUTS = ("topk_indices",)
FIXED = ("seq_lens",)


def dequantised(pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Packed pages [n, page_size, 1, head_size + 4] → keys [n, page_size, head_size]."""
    count, page_size, _, width = pages.shape
    packed = pages.reshape(count, -1)
    value_bytes = page_size * (width - SCALE_BYTES)
    values = packed[:, :value_bytes].view(torch.float8_e4m3fn).to(dtype).reshape(count, page_size, -1)
    scales = packed[:, value_bytes:].contiguous().view(torch.float32).to(dtype)
    return values * scales[..., None]


def reference(
    q_index_fp8: torch.Tensor,
    k_index_cache_fp8: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
) -> tuple[torch.Tensor]:
    compute = wide(weights)
    page_size = k_index_cache_fp8.shape[1]
    q, all_keys = q_index_fp8.to(compute), dequantised(k_index_cache_fp8, compute)
    indices = torch.full((len(q), TOP_K), -1, dtype=torch.int32, device=q.device)
    for b, length in enumerate(seq_lens.tolist()):
        pages = block_table[b, : -(-length // page_size)]
        keys = all_keys[pages].flatten(0, 1)[:length]
        scores = (torch.relu(q[b] @ keys.T) * weights[b, :, None]).sum(dim=0)
        taken = min(TOP_K, length)
        position = scores.topk(taken).indices.sort().values
        indices[b, :taken] = pages[position // page_size] * page_size + position % page_size
    return (indices,)


def vectorized(
    q_index_fp8: torch.Tensor,
    k_index_cache_fp8: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
) -> tuple[torch.Tensor]:
    """All sequences at once, padded to the longest, from the pages in the block table alone."""
    compute = wide(weights)
    page_size = k_index_cache_fp8.shape[1]
    batch, table_width = block_table.shape
    keys = dequantised(k_index_cache_fp8[block_table.flatten()], compute).view(batch, table_width * page_size, -1)
    scores = torch.einsum("bht,bh->bt", torch.relu(q_index_fp8.to(compute) @ keys.mT), weights)
    outside = torch.arange(scores.shape[1], device=scores.device) >= seq_lens[:, None]
    best = scores.masked_fill(outside, -torch.inf).topk(TOP_K).indices
    nothing = scores.shape[1]  # sorts behind every position
    position = best.masked_fill(best >= seq_lens[:, None], nothing).sort(dim=-1).values
    page = block_table.gather(1, (position // page_size).clamp_max(table_width - 1))
    slots = (page * page_size + position % page_size).masked_fill(position == nothing, -1)
    return (slots.to(torch.int32),)


def random_block_table(workload: Workload, device: torch.device) -> torch.Tensor:
    table = torch.zeros(len(workload.seq_lens), max(workload.pages), dtype=torch.int32, device=device)
    pages = 1 + torch.randperm(workload.pool - 1, device=device)
    used = 0
    for b, count in enumerate(workload.pages):
        table[b, :count] = pages[used : used + count]
        used += count
    return table


def random_cache(workload: Workload, device: torch.device) -> torch.Tensor:
    """Packed pages with random values and scales in every slot."""
    values = torch.randn(workload.pool, workload.page_size * workload.head_size, device=device)
    scales = 0.5 * torch.rand(workload.pool, workload.page_size, device=device) + 0.5
    packed = torch.cat([values.to(torch.float8_e4m3fn).view(torch.int8), scales.view(torch.int8)], dim=1)
    return packed.view(workload.pool, workload.page_size, 1, workload.head_size + SCALE_BYTES)


def smallest_margin(
    workload: Workload, q: torch.Tensor, cache: torch.Tensor, weights: torch.Tensor, block_table: torch.Tensor
) -> float:
    """The least difference of the last score taken and the first one left, over the sequences that leave any."""
    margins = [float("inf")]
    for b, length in enumerate(workload.seq_lens):
        if length > TOP_K:
            keys = dequantised(cache[block_table[b, : workload.pages[b]]], torch.float32).flatten(0, 1)[:length]
            scores = (torch.relu(q[b].float() @ keys.T) * weights[b, :, None]).sum(dim=0)
            best = scores.topk(TOP_K + 1).values
            margins.append(float(best[-2] - best[-1]))
    return min(margins)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    batch = len(workload.seq_lens)
    seq_lens = torch.tensor(workload.seq_lens, dtype=torch.int32, device=device)
    block_table = random_block_table(workload, device)
    for _ in range(MOST_DRAWS):
        q = torch.randn(batch, workload.heads, workload.head_size, device=device).to(torch.float8_e4m3fn)
        cache = random_cache(workload, device)
        weights = torch.randn(batch, workload.heads, device=device)
        if smallest_margin(workload, q, cache, weights, block_table) >= MARGIN:
            return q, cache, weights, seq_lens, block_table
    raise RuntimeError(f"no draw out of {MOST_DRAWS} has a margin of {MARGIN} at the selection's edge")


def cost(workload: Workload) -> Cost:
    """A sequence of at most 2048 tokens is taken whole, whatever its scores: only longer ones are scored."""
    batch = len(workload.seq_lens)
    scored = [n for n in workload.seq_lens if n > TOP_K]
    query = workload.heads * (workload.head_size + 4)
    key = workload.head_size + SCALE_BYTES
    return Cost(
        bytes_read=len(scored) * query + sum(scored) * key + 4 * (batch + sum(workload.pages)),
        bytes_written=4 * batch * TOP_K,
        flops={"fp8": 2 * sum(scored) * workload.heads * workload.head_size},
    )
