from functools import partial

from metakernelbench.problems.attention import p16_mla_ragged_prefill as p16
from tests.problems.attention.independent import (
    attention,
    natural_lse,
    packed,
    pieces,
    query_scaled_in_its_own_dtype,
)
from tests.problems.mistakes import altered
from tests.problems.support import case


def independent(q, k, v, qo_indptr, kv_indptr, sm_scale, *, causal=True, shift=0):
    parts = zip(pieces(q, qo_indptr), pieces(k, kv_indptr), pieces(v, kv_indptr), strict=True)
    return packed(q.dtype, (attention(*part, sm_scale, causal=causal, shift=shift) for part in parts))


def aligned_at_the_first_key(q, k, v, qo_indptr, kv_indptr, sm_scale):
    """The mask of a square: query i sees keys 0 … i whatever the prefix."""
    parts = zip(pieces(q, qo_indptr), pieces(k, kv_indptr), pieces(v, kv_indptr), strict=True)
    return packed(q.dtype, (attention(x, y[: len(x)], z[: len(x)], sm_scale, causal=True) for x, y, z in parts))


def test_reference_agrees_with_torch_attention():
    assert case("p16").accepts(independent)


def test_vectorized_passes_the_contract():
    assert case("p16").accepts(p16.vectorized)


def test_cost_is_that_of_the_sheet():
    cost = p16.cost(p16.FULL)
    assert cost.bytes == 224_420_672
    assert f"{cost.flops['bf16']:.3e}" == "8.260e+09"


def test_wrong_implementations_are_rejected():
    draw = case("p16")
    wrong = {
        "no mask": partial(independent, causal=False),
        "one key of the future": partial(independent, shift=1),
        "last visible key lost": partial(independent, shift=-1),
        "mask without the prefix": aligned_at_the_first_key,
        "another scale": altered(p16.reference, sm_scale=lambda x: 1.01 * x),
        "query rounded after scaling": query_scaled_in_its_own_dtype(p16.reference),
        "natural log-sum-exp": natural_lse(p16.reference),
        "scale of the key size": altered(p16.reference, sm_scale=lambda _: 192**-0.5),
    }
    assert [name for name, implementation in wrong.items() if draw.accepts(implementation)] == []
