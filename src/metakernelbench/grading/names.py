"""What the names of a kernel.py stand for, as far as its syntax tree tells: modules and what is read from them.

Flow is ignored: a name stands for everything that it is ever bound to. Trees may be as deep as an attacker likes, so
nothing here recurses without a limit.
"""

from __future__ import annotations

import ast
import os
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from importlib.machinery import PathFinder, all_suffixes

from metakernelbench.grading.scopes import local_names, own_names

_MAX_DEPTH = 50
_MAX_ORIGINS = 16


class Names:
    """The names of one module."""

    def __init__(self, tree: ast.Module) -> None:
        self._origins: dict[str, set[str]] = defaultdict(set)
        self._local = local_names(tree)
        self._own = own_names(tree, self._local)
        self._top = set(map(id, tree.body))
        self._bound_inside = set[str]()
        self._bare = set[int]()
        self._called = set[int]()
        self._imported = set[str]()
        self._followed = set[int]()
        assignments: list[tuple[str, ast.expr]] = []
        in_classes = {id(part) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for part in node.body}
        for node in ast.walk(tree):
            self._collect(node, assignments)
            self._mark(node, is_attribute_of_a_class=id(node) in in_classes)
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

    def is_module_as_value(self, node: ast.Name | ast.Attribute) -> bool:
        """Whether a module is handed on where it can no longer be followed: put in a list, given to a function."""
        if id(node) in self._followed or not isinstance(node.ctx, ast.Load):
            return False
        return any(map(self._is_module, self.origins(node)))

    def _is_module(self, dotted: str) -> bool:
        return dotted in self._imported or is_module(dotted)

    def _is_another(self, node: ast.Name) -> bool:
        """Whether a function's own name is only called as something is that the module imports at its top."""
        return id(node) in self._local and node.id not in self._bound_inside

    def origins(self, node: ast.expr, depth: int = 0) -> set[str]:  # noqa: PLR0911 (one for each kind of node)
        """The dotted names that an expression may stand for; empty for what does not come from a module."""
        if depth > _MAX_DEPTH:
            return set()
        if isinstance(node, ast.Name):
            return set() if self._is_another(node) else self._origins.get(node.id, set())
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
                self._note_names_inside(node)
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    self._imported |= {top, alias.name}
                    self._origins[alias.asname or top].add(alias.name if alias.asname else top)
            case ast.ImportFrom() if node.module and not node.level:
                self._note_names_inside(node)
                for alias in node.names:
                    self._origins[alias.asname or alias.name].add(f"{node.module}.{alias.name}")
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

    def _mark(self, node: ast.AST, *, is_attribute_of_a_class: bool) -> None:
        """Note the expressions that are followed, or of which nothing is handed on."""
        followed: list[ast.expr] = []
        match node:
            case ast.Attribute() | ast.Expr():
                followed = [node.value]
            case ast.Assign() | ast.AnnAssign() if node.value is not None and not is_attribute_of_a_class:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                followed = [value for target in targets for _, value in _pairs(target, node.value)]
                followed = followed if all(map(_is_names, targets)) else []
            case ast.NamedExpr() if isinstance(node.target, ast.Name):
                followed = [node.value]
            case ast.If() | ast.IfExp() | ast.While() | ast.Assert():
                followed = [node.test]
            case ast.UnaryOp(op=ast.Not()):
                followed = [node.operand]
            case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
                followed = [node.left, *node.comparators]
            case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr")) if node.args:
                followed = [node.args[0]]  # the rules look at these themselves
            case ast.Call():
                followed = [node.func]  # no module can be called, but a function may be called as its file is
        while followed:
            value = followed.pop()
            self._followed.add(id(value))
            if isinstance(value, ast.IfExp) and not isinstance(node, ast.If | ast.IfExp | ast.While):
                followed += [value.body, value.orelse]

    def _note_names_inside(self, node: ast.Import | ast.ImportFrom) -> None:
        if id(node) not in self._top:
            self._bound_inside |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}

    def _follow(self, assignments: list[tuple[str, ast.expr]]) -> None:
        """Pass origins on through assignments until nothing changes."""
        for _ in range(_MAX_DEPTH):
            changed = False
            for name, value in assignments:
                new = self.origins(value) - self._origins[name]
                if len(self._origins[name]) >= _MAX_ORIGINS:
                    new = set(filter(self._is_module, new))  # there are only so many
                if new:
                    self._origins[name] |= new
                    self._bound_inside.add(name)
                    changed = True
            if not changed:
                return


@lru_cache(maxsize=4096)
def is_module(dotted: str) -> bool:
    """Whether an installed package has a module of this name, told from its files: nothing is imported."""
    top, *rest = dotted.split(".")
    spec = PathFinder.find_spec(top)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    found = spec is not None
    for part in rest:
        files = {part + suffix for suffix in all_suffixes()}
        found = any(part in _entries(folder) or files & _entries(folder) for folder in folders)
        folders = [os.path.join(folder, part) for folder in folders if part in _entries(folder)]  # noqa: PTH118
    return found


@lru_cache(maxsize=4096)
def _entries(folder: str) -> frozenset[str]:
    """What lies in a folder; nothing for what is none."""
    try:
        return frozenset(os.listdir(folder))  # noqa: PTH208
    except OSError:
        return frozenset()


def _is_names(target: ast.expr) -> bool:
    """Whether an assignment's target is names all through, which are followed."""
    parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    return all(isinstance(part, ast.Name) for part in parts)


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
