"""p51 against one token at a time in float64, and the mistakes that the contract refuses."""

import pytest
import torch

from metakernelbench.problems.moe import p51_clamped_biased_experts as p51
from tests.problems.support import case
from tests.problems.workloads import tf32


def _by_token(
    hidden, indices, weights, gate_up, gate_up_bias, down, down_bias, *, halves=False, clamp=True, clamp_below=False,
    shift=1.0, alpha=1.702, renormalise=False, bias=True
):  # fmt: skip
    """Every token by itself in float64."""
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    for token, experts in enumerate(indices.tolist()):
        total = float(weights[token, experts].double().sum()) if renormalise else 1.0
        for expert in experts:
            z = hidden[token].double() @ gate_up[expert].double() + gate_up_bias[expert].double() * bias
            gate, up = z.chunk(2) if halves else z.view(-1, 2).unbind(1)
            if clamp:
                gate, up = gate.minimum(torch.tensor(7.0)), up.maximum(torch.tensor(-7.0)).minimum(torch.tensor(7.0))
            if clamp_below:
                gate = gate.maximum(torch.tensor(-7.0))
            h = (up + shift) * gate / (1 + torch.exp(-alpha * gate))
            y = h @ down[expert].double() + down_bias[expert].double() * bias
            out[token] += float(weights[token, expert]) / total * y
    return out.float()


@pytest.mark.parametrize("seed", range(3))
def test_reference_and_vectorized_agree_with_one_token_at_a_time(seed):
    problem = case("p51", seed)
    assert problem.accepts(_by_token)
    assert problem.accepts(p51.vectorized)


@pytest.mark.parametrize(
    "mistake",
    [
        {"halves": True},
        {"clamp": False},
        {"clamp_below": True},
        {"shift": 0.0},
        {"alpha": 1.7},
        {"renormalise": True},
        {"bias": False},
    ],
    ids=lambda mistake: next(iter(mistake)),
)
def test_a_wrong_expert_is_refused(mistake):
    assert not case("p51").accepts(lambda *inputs: _by_token(*inputs, **mistake))


def test_one_tf32_pass_is_refused():
    assert not case("p51").accepts(lambda x, i, w, m, *rest: p51.vectorized(tf32(x), i, w, tf32(m), *rest))


def test_cost_is_that_of_the_fact_sheet():
    cost = p51.cost(p51.FULL)
    assert cost.bytes_read == sum(
        (8_493_465_600, 2_949_120, 4_246_732_800, 1_474_560, 188_743_680, 524_288, 262_144)
    )  # fmt: skip
    assert cost.bytes_written == 188_743_680
    assert cost.flops["fp32_matrix"] == pytest.approx(3.26e12, rel=1e-3)
