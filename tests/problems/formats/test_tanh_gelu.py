import torch
from torch.nn.functional import gelu

from metakernelbench.problems.formats.tanh_gelu import tanh_gelu_derivative


def test_is_the_derivative_of_torch_tanh_gelu():
    x = torch.linspace(-8, 8, 1001, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(gelu(x, approximate="tanh").sum(), x)
    torch.testing.assert_close(tanh_gelu_derivative(x.detach()), expected, rtol=1e-13, atol=1e-13)
