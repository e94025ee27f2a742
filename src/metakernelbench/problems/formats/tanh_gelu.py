"""The derivative of the tanh form of GELU, x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))."""

import math

import torch

SLOPE = math.sqrt(2 / math.pi)
CUBIC = 0.044715


def tanh_gelu_derivative(x: torch.Tensor) -> torch.Tensor:
    """In the dtype of x."""
    tanh = torch.tanh(SLOPE * (x + CUBIC * x**3))
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh.square()) * SLOPE * (1 + 3 * CUBIC * x.square())
