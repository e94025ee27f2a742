"""Makes the Harbor task of a variant: everything that the agent of one attempt is given.

task.toml            limits, budget, network
instruction.md       what the agent is told
environment/
  task/              /task in the sandbox, read-only: specification, tools, contract
  docs/              /docs in the sandbox, read-only: documentation of the DSL's packages, a link to where it is kept
                     or, for environments that build an image, a copy
  docs.txt           what the documentation is made from, as a fingerprint
  requirements.txt   the packages of the sandbox
  Dockerfile         for environments that build an image; our own do without
tests/test.sh        says that scoring is done elsewhere
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import metakernelbench
from metakernelbench.attempts import payload
from metakernelbench.attempts.images import dockerfile, requirements
from metakernelbench.attempts.instruction import contract_text, instruction, named, rules_text
from metakernelbench.attempts.sandbox.runtime import BASE_REQUIREMENTS
from metakernelbench.attempts.settings import AttemptSettings
from metakernelbench.dsls import dsl as dsls
from metakernelbench.dsls.docs import build as docs
from metakernelbench.errors import UnknownName
from metakernelbench.experiments.planned import SkillForm
from metakernelbench.problems import catalog
from metakernelbench.problems.roofline import Gpu, gpu_named

_PACKAGE = Path(metakernelbench.__file__).parent
_SHARED = (
    "__init__.py",
    "problems/__init__.py",
    "problems/problem.py",
    "grading/__init__.py",
    "grading/contract.py",
    "grading/verdict.py",
    "grading/compare.py",
    "grading/codes.py",
    "grading/names.py",
    "grading/policy.py",
    "grading/rules.py",
    "grading/scopes.py",
    "grading/source.py",
    "dsls/__init__.py",
    "dsls/dsl.py",
    "dsls/guides.py",
    "dsls/launches.py",
    "errors.py",
    "text.py",
)
"""Modules that the sandbox has besides the problem's own: what specifications import, the public comparison, and what
`task check` needs. Nothing of the verifier's schedule, seeds or measurements is among them."""
_TOOLS = {"environment/task/bin/task": "task_tool.py", "environment/task/bin/docs-search": "docs_search.py"}
_CHECKS = {f"environment/task/checks/{name}": name for name in ("check.py", "trial.py")}
"""Where the sandbox's commands are in the task folder → their files in `payload`."""
_DOCS = "environment/docs"
_TEST = """\
#!/bin/sh
echo "This task is scored by its judge, outside the sandbox; run it with mkb run." >&2
exit 1
"""


def task_files(
    problem: str, dsl: str, settings: AttemptSettings, skill: str | None, skill_form: SkillForm = "free"
) -> dict[str, bytes]:
    """Path → contents of every file of the task folder."""
    language = dsls.load(dsl)
    source = catalog.source_path(problem)
    packages = (*BASE_REQUIREMENTS, *requirements(settings.image, language.requirements))
    texts = {
        "task.toml": _task_toml(problem, language, settings),
        "instruction.md": instruction(subject_of(source), named(language), settings, skill, skill_form),
        "tests/test.sh": _TEST,
        "environment/Dockerfile": dockerfile(settings.image),
        "environment/requirements.txt": "".join(f"{line}\n" for line in packages),
        "environment/task/contract.md": contract_text(),
        "environment/task/rules.md": rules_text(language),
        "environment/task/problem.py": source.read_text(),
        "environment/task/profile.sh": _payload("profile.sh"),
        f"{_DOCS}.txt": f"{docs.fingerprint(language)}\n",
        "environment/task/facts.json": json.dumps(facts(language, settings), indent=1, sort_keys=True),
        **{path: _payload(name) for path, name in (_TOOLS | _CHECKS).items()},
        **{f"environment/task/{path}": text for path, text in _plugin(language).items()},
    }
    return {name: text.encode() for name, text in (texts | _shared_modules()).items()}


@cache
def _shared_modules() -> dict[str, str]:
    """What every sandbox has of this package. Read once: planning makes the files of all tasks, several times over."""
    formats = (f"problems/formats/{path.name}" for path in (_PACKAGE / "problems/formats").glob("*.py"))
    names = sorted((*_SHARED, *formats))
    return {f"environment/task/metakernelbench/{name}": (_PACKAGE / name).read_text() for name in names}


def facts(language: dsls.Dsl, settings: AttemptSettings) -> dict[str, Any]:
    """What `task check` knows of the DSL and of where implementations are graded."""
    gpu = known_gpu(settings)
    return {
        "title": language.title,
        "module": type(language).__module__,
        "class": type(language).__qualname__,
        "imports": sorted(language.imports),
        "forbidden": dict(language.forbidden),
        "devices": sorted(language.devices),
        "device": settings.device,
        "workload": settings.workload,
        "gpu": settings.gpu,
        "arch": gpu and gpu.arch,
        "capability": gpu and gpu.capability,
        "processors": gpu and gpu.processors,
        "compiles_here": gpu is not None and language.compiling_for(gpu.arch) is not None,
    }


def known_gpu(settings: AttemptSettings) -> Gpu | None:
    """What is known of the GPU that implementations are graded on; None where that is a CPU, or a GPU not listed."""
    try:
        return gpu_named(settings.gpu) if settings.device == "cuda" else None
    except UnknownName:
        return None


def _plugin(language: dsls.Dsl) -> dict[str, str]:
    """The DSL's module, under the name by which it is imported, with the packages above it."""
    parts = type(language).__module__.split(".")
    names = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    specs = {name: importlib.util.find_spec(name) for name in names}
    origins = {name: Path(spec.origin) for name, spec in specs.items() if spec is not None and spec.origin is not None}
    return {
        f"{name.replace('.', '/')}{'/__init__' if path.name == '__init__.py' else ''}.py": path.read_text()
        for name, path in origins.items()
    }


def write_task(files: dict[str, bytes], folder: Path, documentation: Path, *, copy: bool = False) -> None:
    """Write a task folder, in place of what was there. `documentation` is linked to, or copied where an image is to be
    built from the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, contents in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents)
    for executable in (*_TOOLS, "tests/test.sh"):
        (folder / executable).chmod(0o755)
    if copy:
        shutil.copytree(documentation, folder / _DOCS)
    else:
        (folder / _DOCS).symlink_to(documentation)


def digest(files: dict[str, bytes]) -> str:
    """One digest of all that an agent is given."""
    whole = hashlib.sha256()
    for name, contents in sorted(files.items()):
        whole.update(f"{name}\0{len(contents)}\0".encode() + contents)
    return whole.hexdigest()


@cache
def subject_of(source: Path) -> str:
    """A specification's `SUBJECT`, without importing it (and with it torch)."""
    for statement in ast.parse(source.read_text()).body:
        if isinstance(statement, ast.Assign) and [ast.unparse(target) for target in statement.targets] == ["SUBJECT"]:
            return str(ast.literal_eval(statement.value))
    raise AttributeError(f"{source} defines no SUBJECT")


@cache
def _payload(name: str) -> str:
    return (Path(payload.__file__).parent / name).read_text()


def _task_toml(problem: str, dsl: dsls.Dsl, settings: AttemptSettings) -> str:
    """TOML by hand: the values are numbers and plain strings, for which JSON's spelling is TOML's."""
    gpu = known_gpu(settings)
    environment = {**dsl.environment("cpu"), **((dsl.compiling_for(gpu.arch) if gpu else None) or {})}
    lines = [
        'schema_version = "1.3"',
        "[task]",
        f"name = {json.dumps(f'metakernelbench/{problem}-{dsl.name}')}",
        "[agent]",
        f"timeout_sec = {float(settings.budget_s)}",
        "[environment]",
        f"cpus = {settings.cpus}",
        f"memory_mb = {settings.memory_mb}",
        'network_mode = "no-network"',
        'workdir = "/app"',
        "[environment.env]",
        *(f"{name} = {json.dumps(value)}" for name, value in sorted(environment.items())),
    ]
    return "\n".join(lines) + "\n"
