import torch

from metakernelbench.problems.formats.grouped_attention import (
    attend,
    attend_without_repeating,
    hidden_keys,
    visible_pairs,
)
from tests.problems.attention.independent import attention


def agree(actual, expected):
    return all(torch.allclose(a, e, rtol=1e-12) for a, e in zip(actual, expected, strict=True))


def draw(rows, keys, heads=6, kv_heads=2):
    torch.manual_seed(5)
    q = torch.randn(rows, heads, 8, dtype=torch.float64)
    k, v = torch.randn(2, keys, kv_heads, 8, dtype=torch.float64)
    return q, k, v


def test_both_forms_agree_with_torch_attention():
    q, k, v = draw(4, 9)
    hidden = hidden_keys(torch.arange(4), 9, 5)
    for form in (attend, attend_without_repeating):
        assert agree(form(q, k, v, 0.3), attention(q, k, v, 0.3))
        assert agree(form(q, k, v, 0.3, hidden), attention(q, k, v, 0.3, causal=True))


def test_a_batch_of_sequences_is_each_of_them():
    q, k, v = draw(4, 9)
    hidden = torch.stack([hidden_keys(torch.arange(4), 9, 5), hidden_keys(torch.arange(4), 9, 0)])
    output, lse = attend_without_repeating(torch.stack([q, -q]), torch.stack([k, v]), torch.stack([v, k]), 0.3, hidden)
    first, second = attend(q, k, v, 0.3, hidden[0]), attend(-q, v, k, 0.3, hidden[1])
    assert agree((output[0], lse[0]), first)
    assert agree((output[1], lse[1]), second)


def test_visible_pairs_counts_what_the_mask_leaves():
    masks = [hidden_keys(torch.arange(q), k, k - q) for q, k in ((4, 9), (1, 1), (5, 5))]
    assert visible_pairs((4, 1, 5), (9, 1, 5)) == sum(int((~m).sum()) for m in masks)
