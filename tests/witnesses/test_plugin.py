"""What TIRx's plugin looks for in compiled code is in no witness, in its form for a GPU either."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tvm")

ROOT = Path(__file__).parents[2]
COMPILE = """
from metakernelbench.dsls.dsl import load
load("tirx").intercept(lambda _kernel, _tensors, launch: launch())
from tests.witnesses.check import WITNESSES, witness
for path in sorted((WITNESSES / "tirx").glob("p*.py")):
    witness("tirx", path.stem).compile_for("sm_90a")
    print(path.stem, flush=True)
"""


def test_the_plugin_refuses_no_witness_in_its_form_for_a_gpu() -> None:
    done = subprocess.run([sys.executable, "-c", COMPILE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-100:]} {done.stderr[-2000:]}"
    assert len(done.stdout.split()) == len(list((ROOT / "witnesses" / "tirx").glob("p*.py")))
