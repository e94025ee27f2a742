import torch

from metakernelbench.problems.attention import p17_dsa_sparse_attention as p17
from tests.problems.attention.independent import attention, listed_tokens, natural_lse, packed
from tests.problems.mistakes import altered
from tests.problems.support import case


def independent(q_nope, q_pe, ckv_cache, kpe_cache, sparse_indices, sm_scale):
    """Ordinary attention with one KV head over the tokens of each list, collected one at a time."""
    cache = torch.cat([ckv_cache, kpe_cache], dim=-1).flatten(0, 1)[:, None]
    q, latent, parts = torch.cat([q_nope, q_pe], dim=-1), q_nope.shape[-1], []
    for query, row in zip(q, sparse_indices.tolist(), strict=True):
        listed = [i for i in row if i >= 0]
        k = listed_tokens(cache, listed, len(listed))[:, None]
        parts.append(attention(query[None], k, k[..., :latent], sm_scale))
    return packed(q.dtype, parts)


def test_reference_agrees_with_torch_attention():
    assert case("p17").accepts(independent)


def test_lists_ascend_and_share_no_token_and_end_in_padding():
    lists = case("p17").inputs[4].tolist()
    selected = [[i for i in row if i >= 0] for row in lists]
    assert [len(row) for row in selected] == list(p17.SMOKE.counts)
    assert all(row == sorted(chosen) + [-1] * (8 - len(chosen)) for row, chosen in zip(lists, selected, strict=True))
    assert len({i for row in selected for i in row}) == sum(p17.SMOKE.counts)
    # the third row selects from a context of 11 tokens: three pages, of which tokens 3, 6 and 7 are left out
    assert sorted(i % 4 for i in selected[2]) == sorted([0, 1, 2, 0, 1, 0, 1, 2])


def test_cost_is_that_of_the_sheet():
    cost = p17.cost(p17.FULL)
    assert cost.bytes == 16_306_688
    assert f"{cost.flops['bf16']:.3e}" == "4.121e+08"


def test_wrong_implementations_are_rejected():
    draw = case("p17")

    def last_listed_token_lost(lists):
        ends = (lists >= 0).sum(1, keepdim=True) - 1
        return torch.where((torch.arange(lists.shape[1]) == ends) & (ends > 0), -1, lists)

    def unmasked(q_nope, q_pe, ckv, kpe, lists, scale):
        return p17.reference(q_nope, q_pe, ckv, kpe, lists.clamp_min(0), scale)

    wrong = {
        "padding read as token 0": unmasked,
        "last listed token lost": altered(p17.reference, sparse_indices=last_listed_token_lost),
        "page and slot swapped": altered(p17.reference, ckv_cache=lambda x: x.transpose(0, 1).reshape(x.shape)),
        "no rotary part": altered(p17.reference, q_pe=torch.zeros_like),
        "another scale": altered(p17.reference, sm_scale=lambda x: 1.01 * x),
        "natural log-sum-exp": natural_lse(p17.reference),
    }
    assert [name for name, implementation in wrong.items() if draw.accepts(implementation)] == []
