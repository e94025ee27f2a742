"""Static rules: what kernel.py may import, name and do, told from its syntax tree, with a line and what to change.

The rules explain honest mistakes early and make cheating conspicuous; they are not what keeps the verdict honest. They
follow names through imports, assignments and constant `getattr`s. Whatever the source merely mentions in a comment, a
docstring or a message is no matter.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Container, Iterator

from metakernelbench.dsls.dsl import Dsl
from metakernelbench.grading import policy
from metakernelbench.grading.codes import finding
from metakernelbench.grading.names import Names, folded
from metakernelbench.grading.verdict import Finding

_MOST = 20


def check(tree: ast.Module, dsl: Dsl) -> list[Finding]:
    """All violations, in the order of the lines, each only once."""
    checker = _Checker(tree, dsl)
    for node in ast.walk(tree):
        checker.visit(node)
    return sorted(checker.found.values(), key=lambda item: item.line or 0)[:_MOST]


class _Checker:
    def __init__(self, tree: ast.Module, dsl: Dsl) -> None:
        self._dsl = dsl
        self._names = Names(tree)
        self.found: dict[tuple[str, str], Finding] = {}
        self._visitors: dict[type[ast.AST], Callable[..., None]] = {
            ast.Import: self._import,
            ast.ImportFrom: self._import_from,
            ast.Attribute: self._attribute,
            ast.Name: self._name,
            ast.Call: self._call,
            ast.Constant: self._constant,
            ast.BinOp: self._constant,
            ast.JoinedStr: self._constant,
            ast.Assign: self._assignment,
            ast.AugAssign: self._assignment,
            ast.AnnAssign: self._assignment,
            ast.Delete: self._assignment,
            ast.FunctionDef: self._definition,
            ast.AsyncFunctionDef: self._definition,
            ast.MatchClass: self._class_pattern,
        }

    def visit(self, node: ast.AST) -> None:
        visitor = self._visitors.get(type(node))
        if visitor is not None:
            visitor(node)

    def _add(self, code: str, what: str, line: int) -> None:
        self.found.setdefault((code, what), finding(code, what, line))

    # imports ----------------------------------------------------------------------------------------------------------

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._module(alias.name, node.lineno)

    def _import_from(self, node: ast.ImportFrom) -> None:
        if node.level or not node.module:
            self._add("forbidden-import", "A relative import: kernel.py stands alone", node.lineno)
            return
        for alias in node.names:
            if alias.name == "*":
                self._add("forbidden-import", f"`from {node.module} import *` hides what is used", node.lineno)
                self._module(node.module, node.lineno)
            else:
                self._module(f"{node.module}.{alias.name}", node.lineno)

    def _module(self, dotted: str, line: int) -> None:
        """An imported module, or a name imported from one."""
        top = dotted.partition(".")[0]
        if _below(dotted, self._dsl.imports) or top in policy.ALLOWED_MODULES:
            self._use(dotted, line)
        elif dotted in policy.STREAM_HANDLES or any(name.startswith(dotted + ".") for name in policy.STREAM_HANDLES):
            return  # which of its names are used is seen where they are used
        elif top == "importlib":
            self._add("dynamic-import", f"`{dotted}`", line)
        elif top in policy.OTHER_COMPILERS:
            self._add("other-compiler", f"`{dotted}`: this task is about {self._dsl.title}", line)
        else:
            self._add("forbidden-import", f"`{dotted}`", line)

    # names ------------------------------------------------------------------------------------------------------------

    def _attribute(self, node: ast.Attribute) -> None:
        if _is_dunder(node.attr) and node.attr not in policy.HARMLESS_DUNDERS:
            self._add("dunder-access", f"`{node.attr}`", node.lineno)
        origins = self._names.origins(node)
        for dotted in origins:
            self._use(dotted, node.lineno)
        if node.attr in policy.TELLTALE_ATTRIBUTES and not origins:
            self._add(policy.TELLTALE_ATTRIBUTES[node.attr], f"`{node.attr}`", node.lineno)

    def _class_pattern(self, node: ast.MatchClass) -> None:
        """`case object(x=y)` reads the attribute `x` of anything at all."""
        for name in node.kwd_attrs:
            if _is_dunder(name) and name not in policy.HARMLESS_DUNDERS:
                self._add("dunder-access", f"`{name}`", node.lineno)
            elif name in policy.SMUGGLED_MODULES:
                self._add("forbidden-import", f"`{name}` by way of a class pattern", node.lineno)
            elif name in policy.TELLTALE_ATTRIBUTES:
                self._add(policy.TELLTALE_ATTRIBUTES[name], f"`{name}`", node.lineno)

    def _name(self, node: ast.Name) -> None:
        if node.id in ("getattr", "setattr") and not self._names.is_called(node) and not self._names.defines(node.id):
            self._add("dynamic-code", f"`{node.id}` under another name", node.lineno)
        elif node.id in policy.DANGEROUS_BUILTINS and not self._names.defines(node.id):
            self._add(policy.DANGEROUS_BUILTINS[node.id], f"`{node.id}`", node.lineno)
        elif _is_dunder(node.id) and node.id not in policy.HARMLESS_DUNDERS:
            self._add("dunder-access", f"`{node.id}`", node.lineno)

    def _use(self, dotted: str, line: int) -> None:
        """A name of a module, however it is reached."""
        if prefix := _below(dotted, policy.FORBIDDEN_NAMES):
            code, why = policy.FORBIDDEN_NAMES[prefix]
            self._add(code, f"`{prefix}` {why}", line)
        elif prefix := _below(dotted, self._dsl.forbidden):
            self._add("forbidden-attribute", f"`{prefix}`: {self._dsl.forbidden[prefix]}", line)
        elif smuggled := set(dotted.split(".")[1:]) & policy.SMUGGLED_MODULES:
            self._add("forbidden-import", f"`{smuggled.pop()}` by way of `{dotted}`", line)
        elif dotted.startswith("torch._") and not policy.ALLOWED_PRIVATE.match(dotted):
            self._add("forbidden-attribute", f"`{dotted}` is one of torch's internals", line)
        elif dotted.startswith("cuda.bindings."):
            parts = dotted.split(".")
            if len(parts) > 3 and dotted not in policy.STREAM_HANDLES and not _below(dotted, self._dsl.imports):
                self._add("forbidden-attribute", f"`{dotted}`: only stream handles may be used of it", line)

    # actions ----------------------------------------------------------------------------------------------------------

    def _call(self, node: ast.Call) -> None:
        if not isinstance(node.func, ast.Name) or len(node.args) < 2 or self._names.defines(node.func.id):
            return
        target, name = node.args[0], folded(node.args[1])
        modules = self._names.origins(target)
        if node.func.id == "setattr" and modules and not all(_below(m, policy.ASSIGNABLE) for m in modules):
            self._add("monkeypatch", f"`setattr` on `{sorted(modules)[0]}`", node.lineno)
        if node.func.id in ("getattr", "setattr", "hasattr"):
            if name is None and modules:
                self._add("dynamic-code", f"`{node.func.id}` with a name made at run time", node.lineno)
            elif name is not None and _is_dunder(name) and name not in policy.HARMLESS_DUNDERS:
                self._add("dunder-access", f"`{name}`", node.lineno)
            elif name is not None:
                for module in modules:
                    self._use(f"{module}.{name}", node.lineno)

    def _assignment(self, node: ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete) -> None:
        targets: list[ast.expr] = list(node.targets) if isinstance(node, ast.Assign | ast.Delete) else [node.target]
        for target in _flat(targets):
            if isinstance(target, ast.Attribute | ast.Subscript):
                for owner in self._names.origins(target.value):
                    if not _below(owner, policy.ASSIGNABLE):
                        self._add("monkeypatch", f"An assignment to a part of `{owner}`", node.lineno)

    def _definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in policy.HOOK_METHODS:
            self._add("monkeypatch", f"`{node.name}` runs when it is not called", node.lineno)

    def _constant(self, node: ast.Constant | ast.BinOp | ast.JoinedStr) -> None:
        if self._names.is_bare_text(node):
            return
        text = folded(node)
        if text is not None and (policy.FOREIGN_SOURCE.search(text) or policy.BINARY_TEXT.search(text)):
            self._add("inline-source", "A string holds source or binary code of another language", node.lineno)


def _below(dotted: str, prefixes: Container[str]) -> str | None:
    """The longest of `prefixes` that is `dotted` or a package above it."""
    name = dotted
    while name:
        if name in prefixes:
            return name
        name = name.rpartition(".")[0]
    return None


def _is_dunder(name: str) -> bool:
    return len(name) > 4 and name.startswith("__") and name.endswith("__")


def _flat(targets: list[ast.expr]) -> Iterator[ast.expr]:
    waiting = list(targets)
    while waiting:
        target = waiting.pop()
        if isinstance(target, ast.Tuple | ast.List):
            waiting += target.elts
        elif isinstance(target, ast.Starred):
            waiting.append(target.value)
        else:
            yield target
