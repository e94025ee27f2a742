"""Routed SwiGLU experts: the loop over experts and the grouped form against one token at a time."""

import pytest
import torch

from metakernelbench.problems.formats.routed_experts import routed_grouped, routed_loop


@pytest.mark.parametrize("form", [routed_loop, routed_grouped])
def test_each_token_gets_the_weighted_sum_of_its_experts(form):
    torch.manual_seed(0)
    tokens, width, experts, expert_width = 6, 32, 5, 16
    x = torch.randn(tokens, width)
    gate, up = torch.randn(2, experts, expert_width, width) / 6
    down = torch.randn(experts, width, expert_width) / 4
    selected = torch.tensor([[0, 3], [3, 0], [4, 3], [3, 4], [0, 4], [3, 0]])  # experts 1 and 2 have no token
    weights = torch.rand(tokens, 2)
    for token, row in enumerate(form(x, selected, weights, gate, up, down)):
        expected = torch.zeros(width)
        for expert, weight in zip(selected[token].tolist(), weights[token], strict=True):
            a = gate[expert] @ x[token]
            expected += weight * (down[expert] @ (a / (1 + torch.exp(-a)) * (up[expert] @ x[token])))
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-5)
