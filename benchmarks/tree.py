"""Lets a script run from a tree that nobody installed: what its machine needs is torch, numpy and the kernel languages.

Import this first. It puts `src` on the path of this process and of those it starts, and, where the package is not
installed, writes the little that an installation would have left there, for the kernel languages are found by it.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def use() -> None:
    """Make `import metakernelbench` work here and in child processes."""
    added = [str(ROOT / "src")]
    try:
        importlib.metadata.version("metakernelbench")
    except importlib.metadata.PackageNotFoundError:
        added.append(str(_registration()))
    sys.path[:0] = added
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*added, os.environ.get("PYTHONPATH")]))


def _registration() -> Path:
    """A folder with the package's name and entry points, made anew."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = Path(tempfile.gettempdir()) / "metakernelbench-registration"
    shutil.rmtree(folder, ignore_errors=True)
    info = folder / "metakernelbench-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: metakernelbench\nVersion: 0\n")
    lines: list[str] = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


use()
