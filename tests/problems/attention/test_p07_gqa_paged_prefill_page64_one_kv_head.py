from dataclasses import replace
from functools import partial

import torch

from metakernelbench.problems.attention import p07_gqa_paged_prefill_page64_one_kv_head as p07
from tests.problems.attention.independent import (
    attention,
    listed_tokens,
    natural_lse,
    packed,
    pieces,
    query_scaled_in_its_own_dtype,
)
from tests.problems.mistakes import altered
from tests.problems.support import CPU, case


def independent(q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, last_lengths, sm_scale, *, causal=True, shift=0):
    parts = []
    for queries, pages, last in zip(pieces(q, qo_indptr), pieces(kv_indices, kv_indptr), last_lengths, strict=True):
        count = k_cache.shape[1] * (len(pages) - 1) + int(last)
        k, v = (listed_tokens(cache, pages.tolist(), count) for cache in (k_cache, v_cache))
        parts.append(attention(queries, k, v, sm_scale, causal=causal, shift=shift))
    return packed(q.dtype, parts)


def aligned_at_the_first_key(q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, _last_lengths, sm_scale):
    """The mask of a square: query i sees keys 0 … i whatever the prefix."""
    parts = []
    for queries, pages in zip(pieces(q, qo_indptr), pieces(kv_indices, kv_indptr), strict=True):
        k, v = (listed_tokens(cache, pages.tolist(), len(queries)) for cache in (k_cache, v_cache))
        parts.append(attention(queries, k, v, sm_scale, causal=True))
    return packed(q.dtype, parts)


def test_reference_agrees_with_torch_attention():
    assert case("p07").accepts(independent)


def test_chunks_of_queries_do_not_change_the_values(monkeypatch):
    draw = case("p07")
    monkeypatch.setattr(p07, "CHUNK", 2)
    output, lse = p07.reference(*draw.inputs)
    assert torch.allclose(output.float(), draw.expected[0].float(), atol=1e-2)
    assert torch.allclose(lse, draw.expected[1], atol=1e-5)


def test_partial_last_pages_follow_the_rule():
    torch.manual_seed(3)
    inputs = p07.make_inputs(replace(p07.SMOKE, last_page_lengths=(4, 2, 3)), CPU)
    expected = independent(*inputs)
    for form in (p07.reference, p07.vectorized):
        output, lse = form(*inputs)
        assert torch.allclose(output.float(), expected[0].float(), atol=1e-2)
        assert torch.allclose(lse, expected[1], atol=1e-5)


def test_vectorized_passes_the_contract():
    assert case("p07").accepts(p07.vectorized)


def test_cost_is_that_of_the_sheet():
    cost = p07.cost(p07.FULL)
    assert cost.bytes == 39_272_480
    assert f"{cost.flops['bf16']:.3e}" == "1.073e+11"


def test_wrong_implementations_are_rejected():
    draw = case("p07")
    wrong = {
        "no mask": partial(independent, causal=False),
        "one key of the future": partial(independent, shift=1),
        "mask without the prefix": aligned_at_the_first_key,
        "last visible key lost": partial(independent, shift=-1),
        "one slot too many": altered(p07.reference, kv_last_page_len=lambda x: x + 1),
        "last page dropped": altered(p07.reference, kv_last_page_len=lambda x: x - 1),
        "pages taken in pool order": altered(p07.reference, kv_indices=lambda x: x.sort().values),
        "another scale": altered(p07.reference, sm_scale=lambda x: 1.01 * x),
        "query rounded after scaling": query_scaled_in_its_own_dtype(p07.reference),
        "natural log-sum-exp": natural_lse(p07.reference),
    }
    assert [name for name, implementation in wrong.items() if draw.accepts(implementation)] == []
