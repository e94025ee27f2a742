"""Smoke workloads are tiny: one thread is fastest, and test processes side by side stay out of each other's way."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
