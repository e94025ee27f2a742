"""Variants as a Harbor dataset: a folder of tasks that `harbor run -p` runs without anything of ours beside it.

A task is what an attempt is given, and besides

tests/test.sh            grades /app/kernel.py in place, with the verifier in verifier.zip, and leaves the reward
tests/order.json         what is graded
solution/solve.sh        puts a witness in place, where there is one: `harbor run -a oracle` tries a task out

There is no judge beside such a task, so nothing is graded before the end; on a GPU environment the agent has the GPU.
Grading where the agent has worked is weaker than grading elsewhere: the benchmark's own results come from `mkb run`.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import metakernelbench
from metakernelbench.attempts import payload
from metakernelbench.attempts.images import Image
from metakernelbench.attempts.settings import AttemptSettings
from metakernelbench.attempts.task import task_files, write_task
from metakernelbench.dsls import dsl as dsls
from metakernelbench.dsls.docs import build as docs
from metakernelbench.errors import UserError
from metakernelbench.files import replaced_folder
from metakernelbench.grading.witnesses import WITNESSES
from metakernelbench.problems import catalog

GPU_IMAGE = Image(
    base="nvidia/cuda:13.0.0-devel-ubuntu24.04",
    system=("bubblewrap", "python3-pip", "python3-venv", "util-linux"),
)
"""For an environment that grades on its GPU: with the compiler that TIRx calls, and what isolates a worker."""
_VERIFIER_S = 3600.0
_EARLIEST = (1980, 1, 1, 0, 0, 0)
_PACKAGE = Path(metakernelbench.__file__).parent
_TEST = """\
#!/bin/sh
# Harbor's verifier runs this. The verifier of this benchmark comes along, because the agent's own environment has none.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
place=$(mktemp -d)
mkdir -p "${MKB_ROOT:-}/logs/verifier"
python3 -I -m zipfile -e "$here/verifier.zip" "$place"
PYTHONPATH="$place" exec python3 "$here/grade.py"
"""
_SOLVE = """\
#!/bin/sh
cp -- "$(dirname -- "$0")/kernel.py" "${MKB_ROOT:-}/app/kernel.py"
"""
_NO_JUDGE = (
    "\n\n# This run\n\nWhat is said here goes before what is said above. There is no judge beside this sandbox: "
    "`task submit` answers that, and nothing is graded before the end. Work with `task check`{gpu}. The last "
    "`/app/kernel.py` is graded when you say that you are done, or when the time is up.\n"
)
_HAS_GPU = ", and measure on the GPU: this sandbox has the one that grading uses"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task that was written."""

    folder: Path
    problem: str
    dsl: str
    has_solution: bool


def write_dataset(
    folder: Path,
    problems: Sequence[str],
    names: Sequence[str],
    settings: AttemptSettings,
    progress: Callable[[Task], None] = lambda _: None,
) -> list[Task]:
    """Write a task for every problem in every DSL that runs on the settings' device. Raises `UserError`."""
    for name in names:
        if settings.device not in dsls.load(name).devices:
            raise UserError(f"`{name}` does not run on the device `{settings.device}`")
        _entry_point(name)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty", hint="name a new folder; an older dataset may be removed first")
    if settings.device == "cuda" and settings.image == Image():
        settings = settings.model_copy(update={"image": GPU_IMAGE})
    tasks: list[Task] = []
    with replaced_folder(folder) as unfinished:
        for name in names:
            documentation = docs.build(dsls.load(name)).folder
            for problem in problems:
                written = _write(unfinished / f"{problem}-{name}", problem, name, settings, documentation)
                documentation = written.folder / "environment" / "docs"
                tasks.append(replace(written, folder=folder / written.folder.name))
                progress(tasks[-1])
    return tasks


def _write(folder: Path, problem: str, name: str, settings: AttemptSettings, documentation: Path) -> Task:
    files = task_files(problem, name, settings, None)
    gpu = settings.device == "cuda"
    files["instruction.md"] += _NO_JUDGE.format(gpu=_HAS_GPU if gpu else "").encode()
    files["task.toml"] = _task_toml(problem, name, settings).encode()
    order = {"problem": problem, "dsl": name, "workload": settings.workload, "device": settings.device}
    files["tests/test.sh"] = _TEST.encode()
    files["tests/grade.py"] = (Path(payload.__file__).parent / "grade_in_place.py").read_bytes()
    files["tests/order.json"] = json.dumps(order, indent=1).encode()
    files["tests/verifier.zip"] = _verifier(problem, name)
    witness = WITNESSES / name / f"{problem}.py"
    if witness.is_file():
        files["solution/solve.sh"] = _SOLVE.encode()
        files["solution/kernel.py"] = witness.read_bytes()
    write_task(files, folder, documentation)
    (folder / "environment/docs").unlink()
    shutil.copytree(documentation, folder / "environment/docs", copy_function=_shared)
    if witness.is_file():
        (folder / "solution/solve.sh").chmod(0o755)
    return Task(folder=folder, problem=problem, dsl=name, has_solution=witness.is_file())


def _shared(source: str, target: str) -> None:
    """The same file under another name, where that is possible: all tasks of a DSL have the same documentation."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _task_toml(problem: str, name: str, settings: AttemptSettings) -> str:
    environment = dsls.load(name).environment(settings.device)
    lines = [
        'schema_version = "1.3"',
        "[task]",
        f"name = {json.dumps(f'metakernelbench/{problem}-{name}')}",
        "[metadata]",
        f"family = {json.dumps(catalog.family_of(problem))}",
        f"dsl = {json.dumps(name)}",
        f"workload = {json.dumps(settings.workload)}",
        "[agent]",
        f"timeout_sec = {float(settings.budget_s)}",
        "[verifier]",
        f"timeout_sec = {_VERIFIER_S}",
        "[environment]",
        f"cpus = {settings.cpus}",
        f"memory_mb = {settings.memory_mb}",
        *(["gpus = 1"] if settings.device == "cuda" else []),
        'network_mode = "no-network"',
        'workdir = "/app"',
        "[environment.env]",
        *(f"{key} = {json.dumps(value)}" for key, value in sorted(environment.items())),
    ]
    return "\n".join(lines) + "\n"


def _verifier(problem: str, name: str) -> bytes:
    """An archive with as much of this package as grading one variant takes; the same bytes every time."""
    source = catalog.source_path(problem)
    own = source.relative_to(_PACKAGE)
    files = _common() | {str(own): source.read_bytes(), f"{own.parent}/__init__.py": b""}
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as made:
        for path, contents in sorted(files.items()):
            made.writestr(zipfile.ZipInfo(f"{_PACKAGE.name}/{path}", _EARLIEST), contents, zipfile.ZIP_DEFLATED)
        metadata = f"{_PACKAGE.name}-{metakernelbench.__version__}.dist-info"
        about = f"Metadata-Version: 2.1\nName: {_PACKAGE.name}\nVersion: {metakernelbench.__version__}\n"
        made.writestr(zipfile.ZipInfo(f"{metadata}/METADATA", _EARLIEST), about)
        points = f"[{dsls.ENTRY_POINT_GROUP}]\n{name} = {_entry_point(name)}\n"
        made.writestr(zipfile.ZipInfo(f"{metadata}/entry_points.txt", _EARLIEST), points)
    return archive.getvalue()


@cache
def _common() -> dict[str, bytes]:
    """Path → contents of the modules that every grading takes."""
    folders = {"": "*.py", "grading": "*.py", "problems": "*.py", "problems/formats": "*.py", "dsls": "*.py"}
    paths = [path for folder, pattern in folders.items() for path in (_PACKAGE / folder).glob(pattern)]
    return {str(path.relative_to(_PACKAGE)): path.read_bytes() for path in paths}


@cache
def _entry_point(name: str) -> str:
    """Where a DSL's module is. Raises `UserError` for one that is not ours: its package does not come along."""
    kind = type(dsls.load(name))
    if not kind.__module__.startswith(f"{_PACKAGE.name}."):
        raise UserError(f"the DSL `{name}` comes from another package ({kind.__module__}), which a task cannot bring")
    return f"{kind.__module__}:{kind.__qualname__}"
