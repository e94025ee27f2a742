"""p46 against autograd, and the terms whose absence the contract notices."""

from dataclasses import replace

import pytest
import torch

from metakernelbench.problems.moe import p46_router_backward as p46
from tests.problems.support import case
from tests.problems.workloads import case_at


@pytest.mark.parametrize("seed", range(3))
def test_reference_is_the_derivative_that_autograd_finds(seed):
    hidden, gate, probs, selected, _, grad_weights, grad_mask, grad_logits = (
        x.double() if x.is_floating_point() else x for x in case("p46", seed).inputs
    )
    logits = probs.log().requires_grad_()
    probs = logits.softmax(dim=-1)
    chosen = probs.gather(1, selected)
    total = chosen.sum(dim=-1, keepdim=True)
    token, slot = torch.meshgrid(torch.arange(len(selected)), torch.arange(selected.shape[1]), indexing="ij")
    objective = (chosen / total * grad_weights).sum() + (chosen * grad_mask[selected, slot, token]).sum()
    (grad,) = torch.autograd.grad(objective + (logits * grad_logits).sum(), logits)
    with torch.no_grad():
        found = p46.reference(hidden, gate, probs, selected, total, grad_weights, grad_mask, grad_logits)
    for gradient, expected in zip(found, (grad @ gate, grad.t() @ hidden), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-14)


def _without(term: str):
    """The reference with one of its terms left out."""

    def implementation(hidden, gate, probs, selected, total, grad_weights, grad_mask, grad_logits):
        if term == "direct":
            grad_logits = torch.zeros_like(grad_logits)
        if term == "mask":
            grad_mask = torch.zeros_like(grad_mask)
        if term == "weights":
            grad_weights = torch.zeros_like(grad_weights)
        if term == "normalisation":
            total = torch.ones_like(total)
        grads = p46.reference(hidden, gate, probs, selected, total, grad_weights, grad_mask, grad_logits)
        return (grads[0], torch.zeros_like(grads[1])) if term == "second product" else grads

    return implementation


def _sizes(tokens: int) -> p46.Workload:
    """Experts and slots of the full workload, whose proportions decide what the allowance hides."""
    return replace(p46.FULL, tokens=tokens, width=256)


@pytest.mark.parametrize("term", ["direct", "mask", "weights", "normalisation", "second product"])
def test_no_term_can_be_left_out(term):
    assert not case("p46").accepts(_without(term))
    assert not case_at("p46", _sizes(tokens=256)).accepts(_without(term))


def test_the_softmax_in_between_cannot_be_left_out():
    def no_inner_product(hidden, gate, probs, selected, total, grad_weights, grad_mask, grad_logits):
        inner = (grad_weights.float() * probs.gather(1, selected)).sum(-1, keepdim=True)
        token, slot = torch.arange(len(selected))[:, None], torch.arange(selected.shape[1])
        chosen = grad_weights.float() / total - inner / total**2 + grad_mask[selected, slot, token].float()
        grad = probs * torch.zeros_like(probs).scatter(1, selected, chosen) + grad_logits.float()
        return grad.bfloat16() @ gate, grad.bfloat16().t() @ hidden

    assert not case_at("p46", _sizes(tokens=256)).accepts(no_inner_product)


def test_cost_is_that_of_the_fact_sheet():
    cost = p46.cost(p46.FULL)
    read = 268_435_456 + 524_288 + 33_554_432 + 4_194_304 + 262_144 + 1_048_576 + 1_048_576 + 16_777_216
    assert cost.bytes_read == read
    assert cost.bytes == pytest.approx(594.8e6, rel=1e-4)
    assert cost.flops["bf16"] == pytest.approx(68.7e9, rel=1e-3)
