from functools import partial

from metakernelbench.problems.attention import p05_gqa_paged_prefill_short_prefixes as p05
from tests.problems.attention.independent import (
    attention,
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


def aligned_at_the_first_key(q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, sm_scale):
    """The mask of a square: query i sees keys 0 … i whatever the prefix."""
    k, v = (pieces(cache[kv_indices.long(), 0], kv_indptr) for cache in (k_cache, v_cache))
    parts = zip(pieces(q, qo_indptr), k, v, strict=True)
    return packed(q.dtype, (attention(x, y[: len(x)], z[: len(x)], sm_scale, causal=True) for x, y, z in parts))


def test_reference_agrees_with_torch_attention():
    assert case("p05").accepts(independent)


def test_vectorized_passes_the_contract():
    assert case("p05").accepts(p05.vectorized)


def test_cost_is_that_of_the_sheet():
    cost = p05.cost(p05.FULL)
    assert cost.bytes == 33_633_320
    assert f"{cost.flops['bf16']:.3e}" == "4.074e+10"


def test_wrong_implementations_are_rejected():
    draw = case("p05")
    kv_indptr = draw.inputs[4]
    wrong = {
        "no mask": partial(independent, causal=False),
        "one key of the future": partial(independent, shift=1),
        "mask without the prefix": aligned_at_the_first_key,
        "last visible key lost": partial(independent, shift=-1),
        "last token lost": altered(p05.reference, kv_indices=last_entry_repeats_the_one_before(kv_indptr)),
        "tokens taken in pool order": altered(p05.reference, kv_indices=lambda x: x.sort().values),
        "another scale": altered(p05.reference, sm_scale=lambda x: 1.01 * x),
        "query rounded after scaling": query_scaled_in_its_own_dtype(p05.reference),
        "natural log-sum-exp": natural_lse(p05.reference),
    }
    assert [name for name, implementation in wrong.items() if draw.accepts(implementation)] == []
