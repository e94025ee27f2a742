"""How a sandbox gets to see folders that lie where its user cannot go."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from metakernelbench.grading.launching import _mounting


@pytest.mark.skipif(os.geteuid() != 0, reason="only root stages folders")
@pytest.mark.parametrize("count", [1, 4, 5, 12])
def test_however_many_folders_are_staged_each_shows_where_it_should(tmp_path: Path, count: int) -> None:
    staged = {}
    for number in range(count):
        source, place = tmp_path / f"source {number}", tmp_path / f"place {number}"
        source.mkdir()
        place.mkdir()
        (source / "name").write_text(f"{number}\n")
        staged[source] = place
    shown = [str(place / "name") for place in staged.values()]
    done = subprocess.run([*_mounting(staged), "cat", *shown], capture_output=True, text=True, check=False)
    if "unshare" in done.stderr:
        pytest.skip("this machine allows no mount namespace")
    assert done.stdout.split() == [str(number) for number in range(count)], done.stderr
