"""Imports point one way: from the command line down to the problems, never back up."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "metakernelbench"

MAY_IMPORT = {
    "problems": set(),
    "dsls": set(),
    "grading": {"problems", "dsls"},
    "judging": {"grading", "problems", "dsls"},
    "attempts": {"judging", "grading", "problems", "dsls", "experiments.planned"},
    "experiments": {
        "annotation.lookup",
        "annotation.rubric",
        "attempts",
        "store",
        "judging",
        "grading",
        "problems",
        "dsls",
    },
    "store": {"attempts", "experiments.planned", "experiments.spec", "grading"},
    "annotation": {"store", "experiments.planned", "attempts", "grading", "problems"},
    "analysis": {"annotation", "store", "experiments", "attempts", "grading", "problems"},
    "report": {"analysis", "annotation", "store", "experiments", "attempts", "grading", "problems", "dsls"},
    "cli": {
        "report",
        "analysis",
        "annotation",
        "experiments",
        "store",
        "attempts",
        "judging",
        "grading",
        "problems",
        "dsls",
    },
}
"""Folder → the other folders, or single modules of them, that its modules may import; `errors`, `files` and `text` may
be imported by all."""

MODULES_MAY_IMPORT = {
    "problems/check.py": {"grading.compare"},
    "problems/check_rules.py": {"grading.compare"},
    "problems/check_subject.py": {"grading.compare"},
    "problems/measure.py": {"grading.compare"},
}
"""The tools that hold the references themselves to the contract."""

HEAVY = {"torch", "harbor", "litellm", "polars", "altair", "sqlalchemy", "scipy", "numpy"}


def imports_of(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Dotted names that a module imports; with `top_level_only`, those outside functions and TYPE_CHECKING blocks."""
    tree = ast.parse(path.read_text())
    nodes = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)] if top_level_only else ast.walk(tree)
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_folder_imports_only_from_the_folders_below_it(folder: str) -> None:
    for path in (PACKAGE / folder).rglob("*.py"):
        extra = MODULES_MAY_IMPORT.get(str(path.relative_to(PACKAGE)), set())
        allowed = MAY_IMPORT[folder] | extra | {folder, "errors", "files", "text"}
        for name in imports_of(path):
            if not name.startswith("metakernelbench."):
                continue
            inside = name.removeprefix("metakernelbench.")
            if inside == "__version__":
                continue
            assert any(inside == a or inside.startswith(f"{a}.") for a in allowed), (
                f"{path.relative_to(PACKAGE)} imports {name}; {folder} may import {sorted(allowed)}"
            )


def test_the_command_line_imports_nothing_heavy_at_its_top() -> None:
    for path in (PACKAGE / "cli").glob("*.py"):
        heavy = {name.split(".")[0] for name in imports_of(path, top_level_only=True)} & HEAVY
        assert not heavy, (
            f"cli/{path.name} imports {sorted(heavy)} at its top: import inside the function that needs it"
        )


def test_every_folder_of_the_package_is_in_the_table() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(MAY_IMPORT)
