"""p45 against first come, first served in plain Python, and the mistakes that the contract refuses."""

import pytest
import torch

from metakernelbench.problems.moe import p45_capacity_limited_experts as p45
from tests.problems.support import case


def _first_come(hidden, selected, weights, gate, up, down, *, capacity=None, slot_major=False, renormalise=False):
    """Pairs claim places one after the other; an expert's work is done in the roundings of the reference."""
    tokens, top_k = selected.shape
    capacity = p45._capacity(tokens * top_k, len(gate)) if capacity is None else capacity
    order = [(t, k) for t in range(tokens) for k in range(top_k)]
    if slot_major:
        order.sort(key=lambda pair: (pair[1], pair[0]))
    load, kept = [0] * len(gate), {t: [] for t in range(tokens)}
    for token, slot in order:
        expert = int(selected[token, slot])
        if load[expert] < capacity:
            kept[token].append((expert, float(weights[token, slot])))
            load[expert] += 1
    out = torch.zeros(hidden.shape)
    for token, survivors in kept.items():
        total = sum(weight for _, weight in survivors) if renormalise else 1.0
        for expert, weight in survivors:
            a = hidden[token] @ gate[expert]
            y = (torch.nn.functional.silu(a) * (hidden[token] @ up[expert])) @ down[expert]
            out[token] += weight / total * y.float()
    return out.bfloat16()


@pytest.mark.parametrize("seed", range(3))
def test_reference_agrees_with_first_come_first_served(seed):
    assert case("p45", seed).accepts(_first_come)


@pytest.mark.parametrize(
    "mistake", [{"capacity": 10**6}, {"capacity": 9}, {"capacity": 11}, {"slot_major": True}, {"renormalise": True}]
)
def test_another_policy_is_refused(mistake):
    assert not all(case("p45", s).accepts(lambda *inputs: _first_come(*inputs, **mistake)) for s in range(4))


def test_every_smoke_draw_of_the_checks_drops_something():
    for seed in (0, 7, 101):
        selected = case("p45", seed).inputs[1]
        assert int(torch.bincount(selected.flatten()).max()) > 10
        assert all(len(set(row)) == 2 for row in selected.tolist())


def test_capacity_is_exactly_512_at_full_size():
    assert p45._capacity(p45.FULL.tokens * p45.FULL.top_k, p45.FULL.experts) == 512
    assert p45._capacity(32, 4) == 10
    assert p45._capacity(33, 4) == 11


def test_as_many_pairs_survive_as_the_cost_assumes():
    torch.manual_seed(0)
    popularity = 0.5 * torch.randn(160)
    gumbel = -torch.log(-torch.log(torch.rand(8192, 160)))
    load = torch.bincount((popularity + gumbel).topk(8).indices.flatten(), minlength=160)
    assert int(load.clamp(max=512).sum()) == pytest.approx(p45.FULL.expected_survivors, rel=0.04)


def test_cost_is_that_of_the_fact_sheet():
    cost = p45.cost(p45.FULL)
    assert cost.bytes_read == 15_099_494_400 + 100_663_296 + 524_288 + 131_072
    assert cost.bytes_written == 100_663_296
    assert cost.flops["bf16"] == pytest.approx(5.49e12, rel=1e-3)
