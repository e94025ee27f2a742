"""Finds the problem modules by their place and name, and loads them one at a time (loading imports torch)."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from metakernelbench.errors import UnknownName, UserError

if TYPE_CHECKING:
    from metakernelbench.problems.problem import Problem

_FOLDER = Path(__file__).parent
_MODULE = re.compile(r"(p\d\d)_(\w+)\.py")


@cache
def _modules() -> dict[str, Path]:
    """Problem id → module file, in the order of the numbers."""
    found = {}
    for path in _FOLDER.glob("*/p*.py"):
        if match := _MODULE.fullmatch(path.name):
            found[match[1]] = path
    return dict(sorted(found.items()))


def problem_ids(family: str | None = None) -> list[str]:
    """The ids of all problems, or of one family's, in order. Imports no problem."""
    return [id for id, path in _modules().items() if family is None or path.parent.name == family]


def family_of(id: str) -> str:
    """The family of a problem. Imports no problem."""
    return _path(id).parent.name


def slug_of(id: str) -> str:
    """The words of a problem's module name. Imports no problem."""
    return _path(id).stem[4:]


def source_path(id: str) -> Path:
    """The file of a problem's module. Imports no problem."""
    return _path(id)


def subject_of(id: str) -> str:
    """The subject of a problem, read from the source. Imports no problem, so that a list of all is instant."""
    path = _path(id)
    try:
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "SUBJECT":
                return str(ast.literal_eval(statement.value))
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    raise UserError(f"{path} has no SUBJECT", hint='add SUBJECT = "...": one sentence that says what is computed')


def _path(id: str) -> Path:
    modules = _modules()
    if id not in modules:
        raise UnknownName("problem", id, modules, hint="see all of them with `mkb problems list`")
    return modules[id]


@cache
def load(id: str) -> Problem:
    """Import a problem's module. Raises `UnknownName` for an unknown id, `AttributeError` for an incomplete module."""
    from metakernelbench.problems.problem import Problem

    path = _path(id)
    module = importlib.import_module(f"metakernelbench.problems.{path.parent.name}.{path.stem}")
    return Problem(
        id=id,
        slug=path.stem[4:],
        family=path.parent.name,
        subject=module.SUBJECT,
        provenance=module.PROVENANCE,
        workloads={"full": module.FULL, "smoke": module.SMOKE},
        outputs=module.OUTPUTS,
        reference=module.reference,
        vectorized=getattr(module, "vectorized", None),
        make_inputs=module.make_inputs,
        cost=module.cost,
        path=str(path),
        fixed=getattr(module, "FIXED", ()),
        cast_outputs=getattr(module, "CAST_OUTPUTS", ()),
    )
