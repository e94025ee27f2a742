from functools import partial

import torch

from metakernelbench.problems.attention import p04_gqa_paged_prefill_whole_prompts as p04
from tests.problems.attention.independent import (
    attention,
    heads_interleaved,
    last_entry_repeats_the_one_before,
    natural_lse,
    packed,
    pieces,
    query_scaled_in_its_own_dtype,
)
from tests.problems.mistakes import altered
from tests.problems.support import case


def independent(q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, sm_scale, *, causal=True, shift=0):
    k, v = (pieces(cache[kv_indices.long(), 0], kv_indptr) for cache in (k_cache, v_cache))
    parts = zip(pieces(q, qo_indptr), k, v, strict=True)
    return packed(q.dtype, (attention(*part, sm_scale, causal=causal, shift=shift) for part in parts))


def test_reference_agrees_with_torch_attention():
    assert case("p04").accepts(independent)


def test_chunks_of_queries_do_not_change_the_values(monkeypatch):
    draw = case("p04")
    monkeypatch.setattr(p04, "CHUNK", 2)
    output, lse = p04.reference(*draw.inputs)
    assert torch.allclose(output.float(), draw.expected[0].float(), atol=1e-2)
    assert torch.allclose(lse, draw.expected[1], atol=1e-5)


def test_vectorized_passes_the_contract():
    assert case("p04").accepts(p04.vectorized)


def test_cost_is_that_of_the_sheet():
    cost = p04.cost(p04.FULL)
    assert cost.bytes == 269_876_272
    assert f"{cost.flops['bf16']:.3e}" == "7.670e+10"


def test_wrong_implementations_are_rejected():
    draw = case("p04")
    kv_indptr = draw.inputs[4]
    wrong = {
        "no mask": partial(independent, causal=False),
        "one key of the future": partial(independent, shift=1),
        "last token lost": altered(p04.reference, kv_indices=last_entry_repeats_the_one_before(kv_indptr)),
        "tokens taken in pool order": altered(p04.reference, kv_indices=lambda x: x.sort().values),
        "another scale": altered(p04.reference, sm_scale=lambda x: 1.01 * x),
        "query rounded after scaling": query_scaled_in_its_own_dtype(p04.reference),
        "natural log-sum-exp": natural_lse(p04.reference),
        "heads interleaved": heads_interleaved(p04.reference, 2),
    }
    assert [name for name, implementation in wrong.items() if draw.accepts(implementation)] == []
