from functools import partial

import torch

from metakernelbench.problems.attention import p15_mla_paged_prefill as p15
from tests.problems.attention.independent import (
    attention,
    last_entry_repeats_the_one_before,
    natural_lse,
    packed,
    pieces,
)
from tests.problems.mistakes import altered
from tests.problems.support import case


def independent(
    q_nope, q_pe, ckv_cache, kpe_cache, qo_indptr, kv_indptr, kv_indices, sm_scale, *, causal=True, shift=0
):
    """Ordinary attention with one KV head: the key is the joined vector, the value its latent part."""
    q, k = torch.cat([q_nope, q_pe], dim=-1), torch.cat([ckv_cache, kpe_cache], dim=-1)
    parts = zip(pieces(q, qo_indptr), pieces(k[kv_indices.long()], kv_indptr), strict=True)
    latent = q_nope.shape[-1]
    return packed(q.dtype, (attention(q, k, k[..., :latent], sm_scale, causal=causal, shift=shift) for q, k in parts))


def test_reference_agrees_with_torch_attention():
    assert case("p15").accepts(independent)


def test_vectorized_passes_the_contract():
    assert case("p15").accepts(p15.vectorized)


def test_cost_is_that_of_the_sheet():
    cost = p15.cost(p15.FULL)
    assert cost.bytes == 70_518_616
    assert f"{cost.flops['bf16']:.3e}" == "7.674e+09"
    assert p15.FULL.pairs == 220_406


def test_wrong_implementations_are_rejected():
    draw = case("p15")
    kv_indptr = draw.inputs[5]
    wrong = {
        "no mask": partial(independent, causal=False),
        "one key of the future": partial(independent, shift=1),
        "last visible key lost": partial(independent, shift=-1),
        "last token lost": altered(p15.reference, kv_indices=last_entry_repeats_the_one_before(kv_indptr)),
        "tokens taken in pool order": altered(p15.reference, kv_indices=lambda x: x.sort().values),
        "no rotary part": altered(p15.reference, q_pe=torch.zeros_like),
        "another scale": altered(p15.reference, sm_scale=lambda x: 1.01 * x),
        "natural log-sum-exp": natural_lse(p15.reference),
    }
    assert [name for name, implementation in wrong.items() if draw.accepts(implementation)] == []
