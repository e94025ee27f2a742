"""The example of a plugin: one more kernel language, found, posed, documented and graded, with no edit of ours."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "warp_dsl"
KERNEL = EXAMPLE / "kernels" / "p28.py"

pytestmark = pytest.mark.skipif(find_spec("warp") is None, reason="warp-lang is not installed")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables under which the plugin is installed: its code, and the facts that an installer writes."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    site = tmp_path_factory.mktemp("site")
    facts = site / "mkb_warp-0.1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    (facts / "entry_points.txt").write_text(
        "".join(f"[{group}]\n" + "".join(f"{a} = {b}\n" for a, b in names.items()) for group, names in groups)
    )
    path = os.pathsep.join(filter(None, (str(site), str(EXAMPLE / "src"), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "2"}


def mkb(environment: dict[str, str], *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "metakernelbench", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=220, check=False)
    return done.returncode, done.stdout + done.stderr


def test_its_kernel_passes(environment: dict[str, str]) -> None:
    code, text = mkb(environment, "grade", "p28", str(KERNEL), "--dsl", "warp", "--device", "cpu", "--json")
    verdict: dict[str, Any] = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert (code, verdict["passed"], verdict["findings"]) == (0, True, [])
    assert verdict["versions"]["warp-lang"] in (EXAMPLE / "pyproject.toml").read_text()


def test_its_task_names_it_and_brings_its_module_and_documentation(environment: dict[str, str], tmp_path: Path) -> None:
    code, text = mkb(environment, "task", "build", "p28", "--dsl", "warp", str(tmp_path / "task"))
    assert code == 0, text
    inside = tmp_path / "task" / "environment"
    assert "a fast kernel in NVIDIA Warp" in (tmp_path / "task" / "instruction.md").read_text()
    assert (inside / "task/mkb_warp/plugin.py").read_bytes() == (EXAMPLE / "src/mkb_warp/plugin.py").read_bytes()
    assert "warp-lang==" in (inside / "requirements.txt").read_text()
    assert "## launch\n" in (inside / "docs/modules/warp.md").read_text()
    assert (inside / "docs/guide.md").read_bytes() == (EXAMPLE / "src/mkb_warp/guide.md").read_bytes()


def test_what_it_forbids_exists(environment: dict[str, str]) -> None:
    code = (
        "import importlib, warp\n"
        "from mkb_warp.plugin import WarpDsl\n"
        "for name in WarpDsl.forbidden:\n"
        "    owner, _, attribute = name.rpartition('.')\n"
        "    if not hasattr(importlib.import_module(owner), attribute):\n"
        "        importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_code_of_its_guide_runs(environment: dict[str, str], tmp_path: Path) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", (EXAMPLE / "src/mkb_warp/guide.md").read_text(), re.M | re.S)
    (tmp_path / "block.py").write_text(block)
    done = subprocess.run(
        [sys.executable, tmp_path / "block.py"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
