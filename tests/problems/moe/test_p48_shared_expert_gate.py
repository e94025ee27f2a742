"""p48 against one token at a time in float64, and the mistakes that the contract refuses."""

from dataclasses import replace

import pytest
import torch

from metakernelbench.problems.moe import p48_shared_expert_gate as p48
from tests.problems.support import case
from tests.problems.workloads import case_at


def _expert(x, gate, up, down):
    a = gate @ x
    return down @ (a / (1 + torch.exp(-a)) * (up @ x))


def _by_token(
    hidden, router, gate, up, down, shared_gate, shared_up, shared_down, expert_gate, *, experts=p48.TOP_K,
    normalise=True, shared=True, gated=True, swap=False, half_logits=False
):  # fmt: skip
    """Every token by itself in float64; only the results are rounded."""
    x, gate, up, down = hidden.double().flatten(0, 1), gate.double(), up.double(), down.double()
    if swap:
        gate, up = up, gate
    logits = x @ router.double().t()
    if half_logits:
        logits = logits.bfloat16().double()
    out = torch.zeros_like(x)
    for token in range(len(x)):
        probs = torch.exp(logits[token]) / torch.exp(logits[token]).sum()
        chosen = sorted(range(len(probs)), key=lambda e: -float(probs[e]))[:experts]
        total = float(probs[chosen].sum()) if normalise else 1.0
        for expert in chosen:
            out[token] += probs[expert] / total * _expert(x[token], gate[expert], up[expert], down[expert])
        if shared:
            strength = torch.sigmoid(expert_gate.double()[0] @ x[token]) if gated else 1.0
            out[token] += strength * _expert(x[token], shared_gate.double(), shared_up.double(), shared_down.double())
    return out.view_as(hidden).to(hidden.dtype), logits.to(hidden.dtype)


@pytest.mark.parametrize("seed", [7, 8])
def test_reference_and_vectorized_agree_with_one_token_at_a_time(seed):
    problem = case("p48", seed)
    assert problem.accepts(_by_token)
    assert problem.accepts(p48.vectorized)


@pytest.mark.parametrize(
    "mistake",
    [{"experts": p48.TOP_K - 1}, {"normalise": False}, {"shared": False}, {"gated": False}, {"swap": True}],
    ids=lambda mistake: next(iter(mistake)),
)
def test_a_wrong_layer_is_refused(mistake):
    assert not case("p48").accepts(lambda *inputs: _by_token(*inputs, **mistake))


def test_selecting_by_logits_rounded_to_bfloat16_is_refused():
    many_experts = case_at("p48", replace(p48.SMOKE, experts=512))
    assert many_experts.accepts(_by_token)
    assert not many_experts.accepts(lambda *inputs: _by_token(*inputs, half_logits=True))


def test_cost_is_that_of_the_fact_sheet():
    cost = p48.cost(p48.FULL)
    assert cost.bytes_read == 3_221_225_472 + 6_291_456 + 2_097_152 + 4_096 + 160_694_272
    assert cost.bytes_written == 160_694_272 + 40_173_568
    assert cost.flops["bf16"] == pytest.approx(2.80e12, rel=2e-3)
