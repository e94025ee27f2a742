import math

import pytest
import torch

from metakernelbench.problems.formats.fp8 import from_e4m3_bytes, to_e4m3_bytes


def value_of(code: int) -> float:
    """The number an E4M3 byte stands for, from its definition: bias 7, three significand bits, NaN only at 0x7f."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, significand = (code >> 3) & 15, code & 7
    if (exponent, significand) == (15, 7):
        return math.nan
    if exponent == 0:
        return sign * significand * 2.0**-9
    return sign * (8 + significand) * 2.0 ** (exponent - 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_all_256_codes_have_the_value_of_the_definition(dtype):
    actual = from_e4m3_bytes(torch.arange(256, dtype=torch.uint8), dtype)
    expected = torch.tensor([value_of(c) for c in range(256)], dtype=torch.float64)
    assert torch.equal(actual.double().nan_to_num(nan=999.0), expected.nan_to_num(nan=999.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_interval_rounds_to_nearest_with_ties_to_even(dtype):
    for code in range(126):  # the intervals between consecutive non-negative values, 0 … 448
        low, high = value_of(code), value_of(code + 1)
        middle = (low + high) / 2
        even = code if code % 2 == 0 else code + 1
        points = {low: code, high: code + 1, middle: even}
        points[middle - (high - low) / 64] = code
        points[middle + (high - low) / 64] = code + 1
        x = torch.tensor(list(points), dtype=dtype)
        assert to_e4m3_bytes(x).tolist() == list(points.values())
        assert to_e4m3_bytes(-x).tolist() == [c | 0x80 for c in points.values()]


def test_values_beyond_the_largest_are_clamped():
    assert to_e4m3_bytes(torch.tensor([449.0, 1e9, -1e9])).tolist() == [0x7E, 0x7E, 0xFE]
