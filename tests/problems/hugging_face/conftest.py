"""No gradients, except where a test asks for them with `torch.enable_grad`."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield
