from metakernelbench.problems.attention import p01_gqa_paged_decode as p01
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


def independent(q, k_cache, v_cache, kv_indptr, kv_indices, sm_scale):
    k, v = (pieces(cache[kv_indices.long(), 0], kv_indptr) for cache in (k_cache, v_cache))
    return packed(q.dtype, (attention(q[b : b + 1], k[b], v[b], sm_scale) for b in range(len(q))))


def test_reference_agrees_with_torch_attention():
    assert case("p01").accepts(independent)


def test_vectorized_passes_the_contract():
    assert case("p01").accepts(p01.vectorized)


def test_cost_is_that_of_the_sheet():
    cost = p01.cost(p01.FULL)
    assert cost.bytes == 242_817_628
    assert f"{cost.flops['bf16']:.3e}" == "9.661e+08"


def test_wrong_implementations_are_rejected():
    draw = case("p01")
    kv_indptr = draw.inputs[3]
    wrong = {
        "last token lost": altered(p01.reference, kv_indices=last_entry_repeats_the_one_before(kv_indptr)),
        "tokens taken in pool order": altered(p01.reference, kv_indices=lambda x: x.sort().values),
        "another scale": altered(p01.reference, sm_scale=lambda x: 1.01 * x),
        "query rounded after scaling": query_scaled_in_its_own_dtype(p01.reference),
        "natural log-sum-exp": natural_lse(p01.reference),
        "heads interleaved": heads_interleaved(p01.reference, 2),
    }
    assert [name for name, implementation in wrong.items() if draw.accepts(implementation)] == []
