import torch

from metakernelbench.problems.attention import p14_mla_paged_decode as p14
from tests.problems.attention.independent import (
    attention,
    last_entry_repeats_the_one_before,
    natural_lse,
    packed,
    pieces,
)
from tests.problems.mistakes import altered
from tests.problems.support import case


def independent(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale):
    """Ordinary attention with one KV head: the key is the joined vector, the value its latent part."""
    q, k = torch.cat([q_nope, q_pe], dim=-1), torch.cat([ckv_cache, kpe_cache], dim=-1)
    listed = pieces(k[kv_indices.long()], kv_indptr)
    latent = q_nope.shape[-1]
    return packed(q.dtype, (attention(q[b : b + 1], k, k[..., :latent], sm_scale) for b, k in enumerate(listed)))


def test_reference_agrees_with_torch_attention():
    assert case("p14").accepts(independent)


def test_vectorized_passes_the_contract():
    assert case("p14").accepts(p14.vectorized)


def test_cost_is_that_of_the_sheet():
    cost = p14.cost(p14.FULL)
    assert cost.bytes == 89_100_200
    assert f"{cost.flops['bf16']:.3e}" == "2.616e+09"


def test_wrong_implementations_are_rejected():
    draw = case("p14")
    kv_indptr = draw.inputs[4]

    def values_with_rotary_part(q_nope, q_pe, ckv, kpe, *others):
        """The value padded by the rotary key, cut at the wrong end."""
        output, lse = p14.reference(q_nope, q_pe, ckv, kpe, *others)
        return output.roll(kpe.shape[-1], dims=-1), lse

    def query_scaled_in_its_own_dtype(q_nope, q_pe, *others):
        scale = others[-1]
        return p14.reference((q_nope * scale).to(q_nope.dtype), (q_pe * scale).to(q_pe.dtype), *others[:-1], 1.0)

    wrong = {
        "last token lost": altered(p14.reference, kv_indices=last_entry_repeats_the_one_before(kv_indptr)),
        "tokens taken in pool order": altered(p14.reference, kv_indices=lambda x: x.sort().values),
        "no rotary part": altered(p14.reference, q_pe=torch.zeros_like),
        "scale of the latent alone": altered(p14.reference, sm_scale=lambda x: x * 1.01),
        "values cut at the wrong end": values_with_rotary_part,
        "query rounded after scaling": query_scaled_in_its_own_dtype,
        "natural log-sum-exp": natural_lse(p14.reference),
    }
    assert [name for name, implementation in wrong.items() if draw.accepts(implementation)] == []
