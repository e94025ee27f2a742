"""The perturbation behind the stability check: products and sums move to a neighbour, exact arithmetic does not."""

import pytest
import torch

from metakernelbench.problems.nudge import Nudged

CPU = torch.device("cpu")


def _neighbours(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    up, down = torch.full_like(x, torch.inf), torch.full_like(x, -torch.inf)
    return torch.nextafter(x, up), torch.nextafter(x, down)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x @ x,
        lambda x: torch.einsum("ij,jk->ik", x, x),
        lambda x: torch.nn.functional.linear(x, x, x[0]),
        lambda x: x.sum(dim=-1),
        lambda x: x.mean(dim=0),
        lambda x: x.softmax(dim=-1),
        lambda x: x.cumsum(dim=0),
        lambda x: x.exp(),
        torch.sigmoid,
        lambda x: torch.zeros_like(x).index_add_(0, torch.arange(8), x),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inexact_results_become_a_neighbour_of_what_they_were(operation, dtype):
    x = torch.randn(8, 8, dtype=dtype)
    before = operation(x)
    with Nudged(0, CPU) as mode:
        after = operation(x)
    up, down = _neighbours(before)
    assert mode.nudged == 1
    assert bool(((after == up) | (after == down)).all())
    assert bool((after == up).any()) and bool((after == down).any())


def test_exact_arithmetic_and_half_precision_results_are_left_alone():
    x = torch.randn(8, 8)
    with Nudged(0, CPU) as mode:
        assert torch.equal(x * 2, x + x)
        assert torch.equal(x.square().sqrt(), x.abs())
        assert (x.bfloat16() @ x.bfloat16()).dtype == torch.bfloat16
        assert int((x > 0).sum()) == int((x > 0).long().sum())
        x.amax()
    assert mode.nudged == 0


def test_infinities_stay():
    x = torch.tensor([[1.0, -torch.inf]])
    with Nudged(0, CPU):
        assert torch.equal(x.sum(dim=-1), torch.tensor([-torch.inf]))
