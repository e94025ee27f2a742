"""p47 against one token at a time in float64, and the mistakes that the contract refuses."""

import pytest
import torch

from metakernelbench.problems.moe import p47_correction_bias_shared_expert as p47
from tests.problems.support import case
from tests.problems.workloads import tf32


def _expert(x, gate, up, down):
    a = gate @ x
    return down @ (a / (1 + torch.exp(-a)) * (up @ x))


def _by_token(
    hidden, gate_weight, bias, gate, up, down, shared_gate, shared_up, shared_down, norm_min, *, use_bias=True,
    biased_weights=False, normalise=True, shared=True, experts=p47.TOP_K, router=lambda x: x
):  # fmt: skip
    """Every token by itself in float64; only the results are rounded."""
    x = hidden.double().flatten(0, 1)
    gate, up, down = gate.double(), up.double(), down.double()
    logits = router(hidden.float()).double().flatten(0, 1) @ router(gate_weight).double().t()
    out = torch.zeros_like(x)
    for token in range(len(x)):
        probs = torch.exp(logits[token]) / torch.exp(logits[token]).sum()
        score = probs + bias.double()[0] if use_bias else probs
        chosen = sorted(range(len(probs)), key=lambda e: -float(score[e]))[:experts]
        source = score if biased_weights else probs
        total = max(float(source[chosen].sum()), norm_min) if normalise else 1.0
        for expert in chosen:
            out[token] += source[expert] / total * _expert(x[token], gate[expert], up[expert], down[expert])
        if shared:
            out[token] += _expert(x[token], shared_gate.double(), shared_up.double(), shared_down.double())
    return out.view_as(hidden).to(hidden.dtype), logits.float()


@pytest.mark.parametrize("seed", [7, 8])
def test_reference_and_vectorized_agree_with_one_token_at_a_time(seed):
    problem = case("p47", seed)
    assert problem.accepts(_by_token)
    assert problem.accepts(p47.vectorized)


@pytest.mark.parametrize(
    "mistake",
    [
        {"use_bias": False},
        {"biased_weights": True},
        {"normalise": False},
        {"shared": False},
        {"experts": p47.TOP_K - 1},
        {"router": tf32},
    ],
    ids=lambda mistake: next(iter(mistake)),
)
def test_a_wrong_layer_is_refused(mistake):
    assert not case("p47").accepts(lambda *inputs: _by_token(*inputs, **mistake))


def test_no_selection_is_closer_than_the_margin():
    hidden, gate_weight, bias = case("p47").inputs[:3]
    rows = hidden.flatten(0, 1)
    assert not p47._unstable(rows, gate_weight, bias).any()
    assert p47._unstable(torch.zeros_like(rows), gate_weight, torch.zeros_like(bias)).all()


def test_cost_is_that_of_the_fact_sheet():
    cost = p47.cost(p47.FULL)
    assert cost.bytes_read == 11_274_289_152 + 352_321_536 + 134_217_728 + 2_097_152 + 256
    assert cost.bytes_written == 134_217_728 + 2_097_152
    assert cost.flops["bf16"] == pytest.approx(14.43e12, rel=1e-3)
    assert cost.flops["fp32_matrix"] == pytest.approx(8.6e9, rel=2e-3)
