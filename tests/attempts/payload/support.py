"""A folder that looks like a sandbox, for a kernel language of the tests whose kernels are Python functions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from metakernelbench.attempts.settings import AttemptSettings
from metakernelbench.attempts.task import task_files
from metakernelbench.dsls import dsl as dsls

PLUGIN = Path(__file__).parents[2] / "grading" / "plugin"
KERNEL = """
import torch
import toydsl


@toydsl.kernel
def norm(x, residual, weight, out):
    total = x.float() + residual.float()
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5)
    out.copy_((total * scale * weight.float()).to(out.dtype))


def solve(x, residual, weight):
    out = torch.empty_like(x)
    norm(x, residual, weight, out)
    return out
"""


def lay_out(root: Path, monkeypatch: pytest.MonkeyPatch, *, devices: tuple[str, ...], device: str) -> None:
    """The task of p28 in the toy DSL, as if its kernels ran on `devices` and gradings took place on `device`."""
    monkeypatch.syspath_prepend(str(PLUGIN))
    import toydsl

    class Language(toydsl.ToyDsl):
        pass

    Language.devices = frozenset(devices)  # type: ignore[misc]
    Language.__module__, Language.__qualname__ = "toydsl", "ToyDsl"
    monkeypatch.setattr(dsls, "load", lambda _name: Language())
    settings = AttemptSettings(device=device, workload="full" if device == "cuda" else "smoke")  # type: ignore[arg-type]
    for name, contents in task_files("p28", "toy", settings, None).items():
        if name.startswith("environment/task/"):
            path = root / name.removeprefix("environment/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(contents)
    (root / "app").mkdir()


def task(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the sandbox's `task` in there."""
    environment = {**os.environ, "MKB_ROOT": str(root), "PYTHONPATH": str(root / "task"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(root / "task/bin/task"), *arguments],
        env=environment, cwd=root / "app", capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
