"""Starts a new problem: a module with every part in place, to be filled in until `mkb problems check` passes."""

from __future__ import annotations

import re
from pathlib import Path

from metakernelbench.errors import UnknownName, UserError
from metakernelbench.problems.catalog import problem_ids, source_path

TEMPLATE = Path(__file__).parent / "new_problem.py.txt"
"""A complete small problem; what must be replaced says REPLACE."""


def write_new_problem(family: str, id: str, slug: str, folder: Path = Path(__file__).parent) -> Path:
    """Write the template as `<folder>/<family>/<id>_<slug>.py` and return its path. Never replaces a file."""
    families = sorted(path.parent.name for path in folder.glob("*/__init__.py") if path.parent.name != "formats")
    if family not in families:
        raise UnknownName("family", family, families)
    if not re.fullmatch(r"p\d\d", id):
        raise UserError(f"`{id}` is no problem number", hint="use `p` and two digits, such as `p75`")
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", slug):
        raise UserError(f"`{slug}` is no slug", hint="use lower-case words joined by underscores: `fused_add_rmsnorm`")
    if id in problem_ids():
        taken = [number for number in map("p{:02}".format, range(1, 100)) if number not in problem_ids()]
        hint = f"the next free number is {taken[0]}" if taken else "all numbers are taken"
        raise UserError(f"`{id}` exists: {source_path(id)}", hint=hint)
    path = folder / family / f"{id}_{slug}.py"
    with path.open("x", encoding="utf-8") as file:
        file.write(TEMPLATE.read_text(encoding="utf-8"))
    return path
