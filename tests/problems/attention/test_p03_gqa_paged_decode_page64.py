from dataclasses import replace

import torch

from metakernelbench.problems.attention import p03_gqa_paged_decode_page64 as p03
from tests.problems.attention.independent import (
    attention,
    heads_interleaved,
    listed_tokens,
    natural_lse,
    packed,
    pieces,
    query_scaled_in_its_own_dtype,
)
from tests.problems.mistakes import altered
from tests.problems.support import CPU, case


def independent(q, k_cache, v_cache, kv_indptr, kv_indices, last_lengths, sm_scale):
    parts = []
    for query, pages, last in zip(q, pieces(kv_indices, kv_indptr), last_lengths, strict=True):
        count = k_cache.shape[1] * (len(pages) - 1) + int(last)
        k, v = (listed_tokens(cache, pages.tolist(), count) for cache in (k_cache, v_cache))
        parts.append(attention(query[None], k, v, sm_scale))
    return packed(q.dtype, parts)


def test_reference_agrees_with_torch_attention_on_collected_tokens():
    assert case("p03").accepts(independent)


def test_partial_last_pages_and_one_page_sequences_follow_the_rule():
    torch.manual_seed(3)
    inputs = p03.make_inputs(replace(p03.SMOKE, last_page_lengths=(1, 4, 3)), CPU)
    expected = independent(*inputs)
    for form in (p03.reference, p03.vectorized):
        output, lse = form(*inputs)
        assert torch.allclose(output.float(), expected[0].float(), atol=1e-2)
        assert torch.allclose(lse, expected[1], atol=1e-5)


def test_vectorized_passes_the_contract():
    assert case("p03").accepts(p03.vectorized)


def test_cost_is_that_of_the_sheet():
    cost = p03.cost(p03.FULL)
    assert cost.bytes == 7_120_735_068
    assert f"{cost.flops['bf16']:.3e}" == "2.848e+10"
    assert p03.FULL.tokens == 1_738_176


def test_wrong_implementations_are_rejected():
    draw = case("p03")
    wrong = {
        "last page dropped": altered(p03.reference, kv_last_page_len=lambda x: x - 1),
        "one slot too many": altered(p03.reference, kv_last_page_len=lambda x: x + 1),
        "pages taken in pool order": altered(p03.reference, kv_indices=lambda x: x.sort().values),
        "another scale": altered(p03.reference, sm_scale=lambda x: 1.01 * x),
        "query rounded after scaling": query_scaled_in_its_own_dtype(p03.reference),
        "heads interleaved": heads_interleaved(p03.reference, 2),
        "natural log-sum-exp": natural_lse(p03.reference),
    }
    assert [name for name, implementation in wrong.items() if draw.accepts(implementation)] == []
