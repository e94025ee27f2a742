"""What every test gets: GPU tests are skipped where there is no GPU, and say so as failures where one is required; and
a PostgreSQL server for those that ask for one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.postgresql import Server, skip_if_missing


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Server]:
    """A running PostgreSQL server; skips where there is none to be had. Ask it for a `new_database`."""
    skip_if_missing()
    server = Server()
    try:
        server.make()
        yield server
    finally:
        server.remove()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` on a machine without one, unless MKB_REQUIRE_GPU=1 turns the skip into a failure."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or os.environ.get("MKB_REQUIRE_GPU"):
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU; MKB_REQUIRE_GPU=1 makes this a failure"))
