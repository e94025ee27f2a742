"""What the worker's side may import of this package: a folder of its own with the few files that it needs.

The worker must not be able to import a problem, so it does not get this package but a copy of the listed files, the DSL
modules, and the plugin's own file where the DSL comes from another package.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

import metakernelbench
from metakernelbench.dsls.dsl import Dsl
from metakernelbench.grading.folders import new_folder

_PACKAGE = Path(metakernelbench.__file__).parent
_FILES = (
    "__init__.py",
    "errors.py",
    "grading/__init__.py",
    "grading/buffers.py",
    "grading/channel.py",
    "grading/cuda_ipc.py",
    "grading/entering.py",
    "grading/host.py",
    "grading/observation.py",
    "grading/seccomp.py",
    "grading/warming.py",
    "grading/worker.py",
)
_BOOT = "from metakernelbench.grading.host import main\nimport sys\nmain(sys.argv[1:])\n"


def build_runtime(dsl: Dsl) -> Path:
    """A new folder with `boot.py`, which starts a host, and all that it imports of ours. The caller removes it."""
    folder = new_folder("runtime")
    for name in _FILES:
        _copy(_PACKAGE / name, folder / "metakernelbench" / name)
    for path in (_PACKAGE / "dsls").glob("*.py"):
        _copy(path, folder / "metakernelbench" / "dsls" / path.name)
    module = type(dsl).__module__
    if not module.startswith("metakernelbench."):
        file = sys.modules[module].__file__
        assert file is not None
        _copy(Path(file), folder / Path(*module.split(".")).with_suffix(".py"))
    (folder / "boot.py").write_text(_BOOT)
    return folder


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def package_paths() -> list[Path]:
    """Folders on this process's import path that hold installed packages, ours left out."""
    standard = {Path(p).resolve() for p in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))}
    found = []
    for entry in map(Path, filter(None, sys.path)):
        within_standard = any(entry.resolve().is_relative_to(s) for s in standard) and "-packages" not in str(entry)
        ours = (entry / "metakernelbench" / "problems").is_dir() and "-packages" not in entry.name
        if entry.is_dir() and not within_standard and not ours:
            found.append(entry)
    return found
