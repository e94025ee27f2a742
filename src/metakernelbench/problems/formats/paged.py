"""Paged caches: which rows of a pool of pages belong to which sequence or token.

A cache is a pool of pages of `page_size` slots. A *slot number* counts slots over the whole pool: it lies in page
`slot // page_size` at offset `slot % page_size`. Slot -1 marks a padding token, which reads and writes nothing.
"""

from itertools import pairwise

import torch


def spans(offsets: torch.Tensor) -> list[tuple[int, int]]:
    """(start, stop) of every sequence, read to the host from an array of n + 1 row offsets."""
    return list(pairwise(offsets.tolist()))


def offsets_of(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """The n + 1 row offsets of n consecutive lengths."""
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return tuple(offsets)


def lengths_of(offsets: tuple[int, ...]) -> tuple[int, ...]:
    """The n lengths behind n + 1 row offsets."""
    return tuple(stop - start for start, stop in pairwise(offsets))


def padded_rows(offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of ragged sequences as a rectangle: row numbers [n, longest], and where they are padding, [n, longest].

    The padding repeats a row that exists, so that the numbers may be used to gather.
    """
    starts, lengths = offsets[:-1, None], offsets.diff()[:, None]
    place = torch.arange(int(lengths.max()), device=offsets.device)
    return starts + place.minimum(lengths - 1), place >= lengths


def sequence_tokens(cache: torch.Tensor, pages: torch.Tensor, last_length: int, dtype: torch.dtype) -> torch.Tensor:
    """One sequence's rows of `cache` [pool, page_size, ...] as [tokens, ...] in `dtype`.

    All slots of all its pages but the last, then the first `last_length` slots of the last. The rest of the last page
    holds other data, which is not the sequence's.
    """
    full = cache[pages[:-1]].to(dtype).flatten(0, 1)
    partial = cache[pages[-1], :last_length].to(dtype)
    return torch.cat([full, partial])


def random_pages(count: int, pool: int, device: torch.device) -> torch.Tensor:
    """`count` distinct page numbers out of `pool`, in random order, int32."""
    return torch.randperm(pool, device=device)[:count].to(torch.int32)


def random_slots(tokens: int, slots: int, most_padding: int, device: torch.device) -> torch.Tensor:
    """Distinct random slots for `tokens` tokens, int64, of which the last 1 to `most_padding` are padding (-1)."""
    mapping = torch.randperm(slots, device=device)[:tokens]
    padding = int(torch.randint(1, most_padding + 1, (), device=device))
    mapping[tokens - padding :] = -1
    return mapping


def random_lengths(total: int, count: int, device: torch.device) -> torch.Tensor:
    """`count` random lengths of at least 1 that add up to `total`, int32: the gaps between random distinct cuts."""
    cuts = 1 + torch.randperm(total - 1, device=device)[: count - 1].sort().values
    ends = torch.tensor([0, total], device=device)
    return torch.cat([ends[:1], cuts, ends[1:]]).diff().to(torch.int32)


def gathered_entries(cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """The entries of all sequences, one below the other: row i of sequence b is slot i % page_size of page
    block_table[b, i // page_size]. No loop over the sequences."""
    page_size = cache.shape[1]
    sequence = torch.repeat_interleave(torch.arange(len(seq_lens), device=cache.device), seq_lens)
    starts = seq_lens.cumsum(0) - seq_lens
    place = torch.arange(len(sequence), device=cache.device) - starts[sequence]
    return cache[block_table[sequence, place // page_size], place % page_size]
