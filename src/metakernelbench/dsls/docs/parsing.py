"""What a module's source says of it, without importing it: lines of definitions; a page where nothing else works."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from metakernelbench.dsls.docs.entries import Entry

type _Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree_of(path: Path) -> ast.Module | None:
    """The syntax tree of a source file; None where it cannot be read."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(path.read_text(errors="replace"))
    except (OSError, SyntaxError, ValueError):
        return None


@cache
def lines_of(path: Path) -> dict[str, int]:
    """Qualified name → line, of every class and function that the file defines outside functions."""
    tree = tree_of(path)
    return dict(_definitions(tree, "")) if tree is not None else {}


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}{child.name}"
            yield name, child.lineno
            if isinstance(child, ast.ClassDef):
                yield from _definitions(child, f"{name}.")
        elif not isinstance(child, ast.expr):
            yield from _definitions(child, prefix)


def entries_of(path: Path, where: str) -> tuple[str, tuple[Entry, ...]]:
    """A module's docstring and its public classes and functions, from its source alone."""
    tree = tree_of(path)
    if tree is None:
        return "", ()
    return ast.get_docstring(tree) or "", tuple(_entries(tree.body, where))


def _entries(body: list[ast.stmt], where: str) -> Iterator[Entry]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield Entry(
                name=node.name,
                kind="class",
                doc=ast.get_docstring(node) or "",
                where=f"{where}:{node.lineno}",
                members=tuple(_entries(node.body, where)),
            )
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield Entry(
                name=node.name,
                kind="function",
                signature=_signature(node),
                doc=ast.get_docstring(node) or "",
                where=f"{where}:{node.lineno}",
            )


def _signature(node: _Function) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return f"({ast.unparse(node.args)}){returns}"
