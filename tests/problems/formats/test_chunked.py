"""Chunked linear attention against the recurrences, in float64 and with ragged last chunks."""

import pytest
import torch

from metakernelbench.problems.formats.chunked import (
    chunked_accumulation,
    chunked_delta_rule,
    into_chunks,
    segment_sum,
)
from tests.problems.linear_attention.recurrent import accumulation, delta_rule


def _draw(channels: int, strongest: float = 0.5):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 21, 6).double(), torch.randn(2, 3, 21, 6).double(), torch.randn(2, 3, 21, 5).double()
    log_decay = -strongest * torch.rand(2, 3, 21, channels).double()
    return q, torch.nn.functional.normalize(k, dim=-1), v, log_decay, torch.rand(2, 3, 21).double()


def test_segment_sums_are_sums_of_what_lies_between():
    a = torch.tensor([1.0, 2.0, 4.0])
    inf = -torch.inf
    assert segment_sum(a).tolist() == [[0.0, inf, inf], [2.0, 0.0, inf], [6.0, 4.0, 0.0]]


def test_segment_sums_do_not_cancel():
    a = torch.tensor([-1e6, -0.1, -0.2])
    assert float(segment_sum(a)[2, 1]) == pytest.approx(-0.2, rel=1e-6)


def test_chunks_are_padded_with_zeros_at_the_end():
    chunks = into_chunks(torch.ones(2, 5, 3), 4, -2)
    assert chunks.shape == (2, 2, 4, 3)
    assert chunks[0, 1, :, 0].tolist() == [1, 0, 0, 0]
    assert into_chunks(torch.ones(2, 8), 4, -1).shape == (2, 2, 4)


@pytest.mark.parametrize("channels", [1, 6])
@pytest.mark.parametrize("size", [1, 7, 8, 64])
def test_chunked_accumulation_is_the_recurrence(channels, size):
    q, k, v, log_decay, _ = _draw(channels)
    expected = accumulation(q, k, v, log_decay)
    torch.testing.assert_close(chunked_accumulation(q, k, v, log_decay, size), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("channels", [1, 6])
@pytest.mark.parametrize("size", [1, 7, 8, 64])
def test_the_chunked_delta_rule_is_the_recurrence(channels, size):
    q, k, v, log_decay, beta = _draw(channels)
    state = torch.randn(2, 3, 6, 5).double()
    found = chunked_delta_rule(q, k, v, log_decay, beta, state, size)
    for actual, expected in zip(found, delta_rule(q, k, v, log_decay, beta, state), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


def test_decays_per_head_may_exceed_the_range_of_float32():
    q, k, v, log_decay, beta = (x.float() for x in _draw(1, strongest=60.0))
    state = torch.randn(2, 3, 6, 5)
    found = chunked_delta_rule(q, k, v, log_decay, beta, state, 16)
    for actual, expected in zip(found, delta_rule(q, k, v, log_decay, beta, state), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
