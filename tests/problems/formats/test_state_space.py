"""Mamba-2's chunked scan against the recurrence over tokens, in float64."""

import pytest
import torch

from metakernelbench.problems.formats.state_space import chunked_scan
from tests.problems.linear_attention.recurrent import spread, state_space


@pytest.mark.parametrize("size", [1, 5, 8, 32])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_chunked_scan_is_the_recurrence(size, groups):
    torch.manual_seed(0)
    x, a = torch.randn(2, 21, 4, 3).double(), -torch.rand(2, 21, 4).double()
    B, C = torch.randn(2, 2, 21, groups, 6).double()
    state = torch.randn(2, 4, 3, 6).double()
    expected = state_space(x, a, spread(B, 4, 2), spread(C, 4, 2), state)
    for actual, wanted in zip(chunked_scan(x, a, B, C, state, size), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-11, atol=1e-12)
