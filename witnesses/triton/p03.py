"""p03, paged grouped-query decode, in Triton.

A program attends the query heads of a few (sequence, KV head) pairs, token block by token block, with a running
softmax. On a GPU it takes one pair.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def decode(
    q,
    k_cache,
    v_cache,
    page_offsets,
    pages,
    last_lengths,
    out,
    lse,
    scale,
    pairs,
    kv_heads,
    PAIRS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    real = pair < pairs
    sequence, kv_head = pair // kv_heads, pair % kv_heads
    heads = pair[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    column = tl.arange(0, SIZE)
    first_page = tl.load(page_offsets + sequence, mask=real, other=0)
    last_page = tl.load(page_offsets + sequence + 1, mask=real, other=1) - 1
    length = (last_page - first_page) * PAGE + tl.load(last_lengths + sequence, mask=real, other=0)

    rows = heads[:, :, None] * SIZE + column[None, None, :]
    query = tl.load(q + rows, mask=real[:, None, None], other=0.0).to(tl.float32) * scale
    highest = tl.full((PAIRS, GROUP), float("-inf"), tl.float32)
    weight = tl.full((PAIRS, GROUP), 0.0, tl.float32)
    total = tl.full((PAIRS, GROUP, SIZE), 0.0, tl.float32)
    for start in range(0, tl.max(length, axis=0), TOKENS):
        token = start + tl.arange(0, TOKENS)[None, :]
        there = token < length[:, None]
        page = tl.load(pages + first_page[:, None] + token // PAGE, mask=there, other=0).to(tl.int64)
        slot = (page * PAGE + token % PAGE) * kv_heads + kv_head[:, None]
        place = slot[:, :, None] * SIZE + column[None, None, :]
        key = tl.load(k_cache + place, mask=there[:, :, None], other=0.0).to(tl.float32)
        value = tl.load(v_cache + place, mask=there[:, :, None], other=0.0).to(tl.float32)
        logits = tl.sum(query[:, :, None, :] * key[:, None, :, :], axis=3)
        logits = tl.where(there[:, None, :], logits, -1e30)  # finite: a pair may have no token in a block
        new_highest = tl.maximum(highest, tl.max(logits, axis=2))
        shrink = tl.exp(highest - new_highest)
        share = tl.where(there[:, None, :], tl.exp(logits - new_highest[:, :, None]), 0.0)
        weight = weight * shrink + tl.sum(share, axis=2)
        total = total * shrink[:, :, None] + tl.sum(share[:, :, :, None] * value[:, None, :, :], axis=2)
        highest = new_highest
    weight = tl.where(real[:, None], weight, 1.0)
    tl.store(out + rows, (total / weight[:, :, None]).to(tl.bfloat16), mask=real[:, None, None])
    tl.store(lse + heads, (highest + tl.log(weight)) * 1.4426950408889634, mask=real[:, None])


def solve(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    sequences, heads, size = q.shape
    _, page, kv_heads, _ = k_cache.shape
    output = torch.empty_like(q)
    lse = torch.empty(sequences, heads, dtype=torch.float32, device=q.device)
    pairs = sequences * kv_heads
    per_program = 1 if q.is_cuda else 8
    decode[(triton.cdiv(pairs, per_program),)](
        q,
        k_cache,
        v_cache,
        kv_indptr,
        kv_indices,
        kv_last_page_len,
        output,
        lse,
        sm_scale,
        pairs,
        kv_heads,
        PAIRS=per_program,
        GROUP=heads // kv_heads,
        SIZE=size,
        PAGE=page,
        TOKENS=32,
    )
    return output, lse
