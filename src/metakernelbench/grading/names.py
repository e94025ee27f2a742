"""What the names of a kernel.py stand for, as far as its syntax tree tells: modules and what is read from them.

Flow is ignored: a name stands for everything that it is ever bound to. Trees may be as deep as an attacker likes, so
nothing here recurses without a limit.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from metakernelbench.grading.scopes import own_names

_MAX_DEPTH = 50
_MAX_ORIGINS = 16


class Names:
    """The names of one module."""

    def __init__(self, tree: ast.Module) -> None:
        self._origins: dict[str, set[str]] = defaultdict(set)
        self._own = own_names(tree)
        self._bare = set[int]()
        self._called = set[int]()
        assignments: list[tuple[str, ast.expr]] = []
        for node in ast.walk(tree):
            self._collect(node, assignments)
        self._follow(assignments)

    def is_own(self, node: ast.Name) -> bool:
        """Whether a name that is also a built-in function's cannot be that function here."""
        return id(node) in self._own

    def is_bare_text(self, node: ast.AST) -> bool:
        """Whether a string is a docstring or a statement of its own, which does nothing."""
        return id(node) in self._bare

    def is_called(self, node: ast.Name) -> bool:
        """Whether a name stands in front of a call's arguments."""
        return id(node) in self._called

    def origins(self, node: ast.expr, depth: int = 0) -> set[str]:  # noqa: PLR0911 (one for each kind of node)
        """The dotted names that an expression may stand for; empty for what does not come from a module."""
        if depth > _MAX_DEPTH:
            return set()
        if isinstance(node, ast.Name):
            return self._origins.get(node.id, set())
        if isinstance(node, ast.Attribute):
            return {f"{base}.{node.attr}" for base in self.origins(node.value, depth + 1)}
        if isinstance(node, ast.NamedExpr):
            return self.origins(node.value, depth + 1)
        if isinstance(node, ast.IfExp):
            return self.origins(node.body, depth + 1) | self.origins(node.orelse, depth + 1)
        if isinstance(node, ast.Call) and _is_getattr(node) and (name := folded(node.args[1])) is not None:
            return {f"{base}.{name}" for base in self.origins(node.args[0], depth + 1)}
        return set()

    def _collect(self, node: ast.AST, assignments: list[tuple[str, ast.expr]]) -> None:
        match node:
            case ast.Import():
                for alias in node.names:
                    self._bind(alias.asname or alias.name.partition(".")[0], alias.name if alias.asname else None)
            case ast.ImportFrom() if node.module and not node.level:
                for alias in node.names:
                    self._bind(alias.asname or alias.name, f"{node.module}.{alias.name}")
            case ast.Assign():
                for target in node.targets:
                    assignments += _pairs(target, node.value)
            case ast.AnnAssign() if node.value is not None:
                assignments += _pairs(node.target, node.value)
            case ast.NamedExpr():
                assignments += _pairs(node.target, node.value)
            case ast.Call():
                self._called.add(id(node.func))
            case ast.Expr(value=ast.Constant() | ast.JoinedStr()):
                self._bare.add(id(node.value))

    def _bind(self, name: str, dotted: str | None) -> None:
        self._origins[name].add(dotted or name)

    def _follow(self, assignments: list[tuple[str, ast.expr]]) -> None:
        """Pass origins on through assignments until nothing changes."""
        for _ in range(_MAX_DEPTH):
            changed = False
            for name, value in assignments:
                new = self.origins(value) - self._origins[name]
                if new and len(self._origins[name]) < _MAX_ORIGINS:
                    self._origins[name] |= new
                    changed = True
            if not changed:
                return


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """The simple assignments that one assignment amounts to."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
        for inner_target, inner_value in zip(target.elts, value.elts, strict=False):
            yield from _pairs(inner_target, inner_value)
    elif isinstance(target, ast.Tuple | ast.List):
        for inner_target in target.elts:
            yield from _pairs(inner_target, value)


def _is_getattr(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "getattr" and len(call.args) >= 2


def folded(node: ast.AST, depth: int = 0) -> str | None:  # noqa: PLR0911 (one for each kind of node)
    """The text of a string that can be told without running anything: constants, their sums and joins, bytes as
    text."""
    if depth > _MAX_DEPTH:
        return None
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bytes):
            return node.value.decode("latin-1")
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = folded(node.left, depth + 1), folded(node.right, depth + 1)
        return None if left is None or right is None else left + right
    if isinstance(node, ast.JoinedStr):
        parts = [folded(part, depth + 1) for part in node.values]
        return None if None in parts else "".join(part for part in parts if part is not None)
    if isinstance(node, ast.FormattedValue):
        return folded(node.value, depth + 1)
    return None
