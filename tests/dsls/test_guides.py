"""The code in the DSL guides runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from metakernelbench.dsls.dsl import load

GUIDES = Path(__file__).parents[2] / "docs" / "dsl"


def blocks(dsl: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (GUIDES / f"{dsl}.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("dsl", "number"), [(dsl, n) for dsl in ("cute", "tirx") for n in range(len(blocks(dsl)))])
def test_code_block_runs(dsl: str, number: int, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(blocks(dsl)[number])
    environment = {**os.environ, **load(dsl).environment("cpu"), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("dsl", ["cute", "tirx"])
def test_guide_has_code(dsl: str) -> None:
    assert blocks(dsl)
