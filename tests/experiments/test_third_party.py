"""The design of the documentation's page, installed as a package of its own would be."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "designs.md").read_text()
MODULE = re.search(r'```python\n("""there_and_back\.py""".*?)```', PAGE, re.DOTALL)
ENTRY = re.search(r"```toml\n(\[project\.entry-points.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder as `pip install --target` would leave it."""
    assert MODULE and ENTRY
    (tmp_path / "there_and_back.py").write_text(MODULE[1])
    information = tmp_path / "there_and_back-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: there-and-back\nVersion: 1.0\n")
    group, name, value = re.findall(r'"([\w.]+)"\]\n([\w-]+) = "([\w.:]+)"', ENTRY[1])[0]
    (information / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    return tmp_path


def mkb(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "metakernelbench", *arguments],
        env=os.environ | {"PYTHONPATH": str(installed), "COLUMNS": "120"},
        cwd=installed,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_pages_design_is_found_and_explains_itself(installed: Path) -> None:
    done = mkb(installed, "designs", "show", "there-and-back")
    assert done.returncode == 0, done.stderr
    assert "Does a skill gain by a visit to another DSL?" in done.stdout
    assert "option of [options.there-and-back]: again (bool), False where it is left out" in done.stdout
    assert "    treatment  p01/cute/a/model/0/back-from-tirx\n" in done.stdout


def test_an_experiment_can_use_it_with_its_options(installed: Path) -> None:
    (installed / "mine.toml").write_text("""
        name = "mine"
        design = ["cross-dsl", "there-and-back"]
        options.there-and-back.again = true
        problems = ["p28"]
        dsls = ["tirx", "triton"]
        models = ["scripted/nothing"]
        [attempt]
        device = "cpu"
        sandbox = "host"
    """)
    done = mkb(installed, "run", "mine.toml", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "mine: 8 attempts, 4 comparisons (cross-dsl, there-and-back: 1 problem" in done.stdout
    assert "there-and-back: back" in done.stdout
