from __future__ import annotations

from collections.abc import Iterator

import pytest

from metakernelbench.grading.client import VerifierProcess
from tests.grading.support import Grader, plugin_installed


@pytest.fixture(scope="session")
def grade() -> Iterator[Grader]:
    with plugin_installed(), VerifierProcess() as process:
        yield Grader(process)
