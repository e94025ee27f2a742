"""The first stage: is there a kernel.py that can be read at all. Nothing here runs any of it."""

from __future__ import annotations

import ast
import warnings

from metakernelbench.grading.codes import finding
from metakernelbench.grading.contract import Contract
from metakernelbench.grading.verdict import Finding


def read(source: bytes | None, contract: Contract) -> ast.Module | Finding:
    """The syntax tree of a kernel.py, or what is wrong with it. None stands for a missing file."""
    text = _text(source, contract)
    if isinstance(text, Finding):
        return text
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text)
    except SyntaxError as error:
        return finding("syntax-error", error.msg, error.lineno)
    except (ValueError, RecursionError, MemoryError) as error:
        return finding("syntax-error", f"Python's parser gave up ({type(error).__name__})")
    return tree if _defines_solve(tree) else finding("no-solve")


def _text(source: bytes | None, contract: Contract) -> str | Finding:
    if source is None:
        return finding("missing")
    if len(source) > contract.max_source_bytes:
        return finding("too-large", f"kernel.py has {len(source):,} bytes of at most {contract.max_source_bytes:,}")
    if not source.strip():
        return finding("empty")
    try:
        return source.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = source[: error.start].count(b"\n") + 1
        return finding("not-utf8", f"Byte {error.start} does not decode", line)


def _defines_solve(tree: ast.Module) -> bool:
    """Whether anything in the module binds `solve` outside functions and classes."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name == "solve":
                return True
            continue
        if isinstance(node, ast.Name) and node.id == "solve" and isinstance(node.ctx, ast.Store):
            return True
        if isinstance(node, ast.alias) and (node.asname or node.name) == "solve":
            return True
        waiting += ast.iter_child_nodes(node)
    return False
