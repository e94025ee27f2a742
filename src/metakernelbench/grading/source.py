"""The first stage: is there a kernel.py that can be read at all. Nothing here runs any of it."""

from __future__ import annotations

import ast
import warnings

from metakernelbench.grading.codes import finding
from metakernelbench.grading.contract import Contract
from metakernelbench.grading.verdict import Finding


class OtherEncoding(ValueError):
    """A source is not what it seems."""


def read(source: bytes | None, contract: Contract) -> ast.Module | Finding:
    """The syntax tree of a kernel.py, or what is wrong with it. None stands for a missing file."""
    if source is None:
        return finding("missing")
    if len(source) > contract.max_source_bytes:
        return finding("too-large", f"kernel.py has more than {contract.max_source_bytes:,} bytes")
    if not source.strip():
        return finding("empty")
    tree = _tree(source)
    return finding("no-solve") if isinstance(tree, ast.Module) and not _defines_solve(tree) else tree


def _tree(source: bytes) -> ast.Module | Finding:
    try:
        return parse(source)
    except UnicodeDecodeError as error:
        line = source[: error.start].count(b"\n") + 1
        return finding("not-utf8", f"Byte {error.start} does not decode", line)
    except OtherEncoding as error:
        return finding("not-utf8", str(error))
    except SyntaxError as error:
        return finding("syntax-error", error.msg, error.lineno)
    except (ValueError, RecursionError, MemoryError) as error:
        return finding("syntax-error", f"Python's parser gave up ({type(error).__name__})")


def parse(source: bytes) -> ast.Module:
    """The syntax tree of a source that says the same to who reads it as UTF-8 and to Python, which obeys a comment that
    declares another encoding: what is a comment in one can be code in the other. Raises `UnicodeDecodeError`,
    `OtherEncoding`, and what Python's parser raises."""
    with warnings.catch_warnings(action="ignore"):
        tree, imported = ast.parse(source.decode("utf-8-sig")), ast.parse(source)
    if ast.dump(tree) != ast.dump(imported):
        raise OtherEncoding("its first lines declare an encoding in which it says something else than in UTF-8")
    return tree


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
