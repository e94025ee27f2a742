"""p50 against autograd through the forward pass, and the mistakes that the contract refuses."""

import pytest
import torch

from metakernelbench.problems.moe import p50_experts_backward as p50
from tests.problems.support import case, clone
from tests.problems.workloads import tf32


def _forward(hidden, indices, weights, gate, up, down):
    """Every pair by itself."""
    out = torch.zeros_like(hidden)
    for token, experts in enumerate(indices.tolist()):
        for slot, expert in enumerate(experts):
            x = hidden[token]
            h = torch.nn.functional.silu(gate[expert] @ x) * (up[expert] @ x)
            out = out.index_add(0, torch.tensor([token]), (weights[token, slot] * (down[expert] @ h))[None])
    return out


@pytest.mark.parametrize("seed", range(3))
def test_anchor_is_the_derivative_that_autograd_finds(seed):
    problem = case("p50", seed)
    grad_output, hidden, indices, *others = problem.inputs
    leaves = [x.double().requires_grad_() for x in (hidden, *others)]
    out = _forward(leaves[0], indices, *leaves[1:])
    for anchor, expected in zip(problem.anchor, torch.autograd.grad(out, leaves, grad_output.double()), strict=True):
        torch.testing.assert_close(anchor, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("seed", range(3))
def test_vectorized_is_accepted(seed):
    assert case("p50", seed).accepts(p50.vectorized)


def test_an_expert_without_tokens_has_zero_gradients():
    def empty_experts(seed):
        return set(range(8)) - set(case("p50", seed).inputs[2].flatten().tolist())

    seed = next(seed for seed in range(200) if empty_experts(seed))
    problem = case("p50", seed)
    (expert, *_) = empty_experts(seed)
    for outputs in (problem.expected, p50.vectorized(*clone(problem.inputs))):
        assert all(bool((gradient[expert] == 0).all()) for gradient in outputs[2:])
    assert problem.accepts(p50.vectorized)


def _with_inputs(change):
    def implementation(*inputs):
        return p50.vectorized(*change(*inputs))

    return implementation


@pytest.mark.parametrize(
    "change",
    [
        lambda g, x, i, w, *m: (g, x, i, torch.ones_like(w), *m),
        lambda g, x, i, w, *m: (g, x, i.flip(1), w, *m),
        lambda g, x, i, w, gate, up, down: (g, x, i, w, up, gate, down),
        lambda g, x, i, w, *m: (g, x, i, w, *(tf32(matrix) for matrix in m)),
        lambda g, x, i, w, *m: (tf32(g), x, i, w, *m),
    ],
    ids=["unweighted", "weights of the other slot", "gate and up swapped", "TF32 weights", "TF32 gradients"],
)
def test_a_wrong_backward_is_refused(change):
    assert not case("p50").accepts(_with_inputs(change))


def test_an_approximate_silu_derivative_is_refused():
    def only_sigmoid(*inputs):
        hidden, weights, gate, up, down = p50.vectorized(*inputs)
        return hidden, weights, gate * (1 + 1e-5), up, down

    assert not case("p50").accepts(only_sigmoid)


def test_cost_is_that_of_the_fact_sheet():
    cost = p50.cost(p50.FULL)
    assert cost.bytes_read == 3 * 4_294_967_296 + 2 * 100_663_296 + 393_216 + 196_608
    assert cost.bytes_written == 3 * 4_294_967_296 + 100_663_296 + 196_608
    assert cost.flops["fp32_matrix"] == pytest.approx(3.30e12, rel=1e-3)
