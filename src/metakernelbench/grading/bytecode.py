"""Compiled Python of the packages that verifier and worker import: without it, every start costs seconds more.

Where the packages came without (some images switch bytecode off), it is written once to a cache of ours, by importing
them in a process that runs no submission. Workers read it and cannot write it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from metakernelbench.dsls.dsl import Dsl
from metakernelbench.grading import processes

_IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception:
        pass
"""


def bytecode_folder(dsl: Dsl, device: str) -> Path:
    """The folder for `PYTHONPYCACHEPREFIX`, filled for torch and `dsl`."""
    folder = bytecode_home()
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    versions = sorted(dsl.versions().items())
    key = hashlib.sha256(repr((sys.version, sys.path, dsl.name, device, versions)).encode()).hexdigest()[:16]
    marker = folder / f"{dsl.name}-{device}-{key}"
    if not marker.exists() and not _compiled_in_place():
        _import_once(["torch", *sorted(dsl.imports)], folder, dsl.environment(device))
        marker.touch()
    return folder


def bytecode_home() -> Path:
    """Where the cache lies, for this user; root's where workers with another user id can read it."""
    usual = "/var/cache" if os.geteuid() == 0 else Path.home() / ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or usual) / "metakernelbench" / "bytecode"


def _compiled_in_place() -> bool:
    """Whether torch lies here with its bytecode beside it."""
    spec = importlib.util.find_spec("torch")
    return spec is not None and spec.origin is not None and (Path(spec.origin).parent / "__pycache__").is_dir()


def _import_once(names: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Import `names` where that works; what does not import here costs its worker the time, no more."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(
        [sys.executable, "-s", "-c", _IMPORT_ALL, *names],
        env={**kept, **processes.shared_environment(), **environment, "PYTHONPYCACHEPREFIX": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=600,
    )
