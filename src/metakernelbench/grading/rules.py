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
            ast.For: self._loop,
            ast.AsyncFor: self._loop,
            ast.comprehension: self._loop,
            ast.withitem: self._with,
            ast.FunctionDef: self._definition,
            ast.AsyncFunctionDef: self._definition,
            ast.MatchClass: self._class_pattern,
            ast.ClassDef: self._class,
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

    def _module_as_value(self, node: ast.Name | ast.Attribute) -> None:
        if self._names.is_module_as_value(node):
            what = f"The module `{ast.unparse(node)}` as a value: read its names with a dot"
            self._add("dynamic-code", what, node.lineno)

    def _attribute(self, node: ast.Attribute) -> None:
        self._module_as_value(node)
        if _is_dunder(node.attr) and node.attr not in policy.HARMLESS_DUNDERS:
            self._add("dunder-access", f"`{node.attr}`", node.lineno)
        own = isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr in policy.OFTEN_OWN_ATTRIBUTES
        # A name that stands for a module may stand for something else too, so what nothing has is asked of both.
        used = [self._use(dotted, node.lineno) for dotted in self._names.origins(node)]
        if not any(used) and not own:
            self._read_of_anything(node.attr, node.lineno)

    def _read_of_anything(self, name: str, line: int) -> None:
        """An attribute that means the same whatever it is read from."""
        if _is_dunder(name) and name not in policy.HARMLESS_DUNDERS:
            self._add("dunder-access", f"`{name}`", line)
        elif _is_smuggled(name):
            self._add("forbidden-import", f"`{name}` by way of an attribute", line)
        elif name in policy.TELLTALE_ATTRIBUTES:
            self._add(policy.TELLTALE_ATTRIBUTES[name], f"`{name}`", line)

    def _class(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                self._add("forbidden-import", f"An import in the class `{node.name}`: write it above", statement.lineno)

    def _class_pattern(self, node: ast.MatchClass) -> None:
        """`case object(x=y)` reads the attribute `x` of anything at all."""
        for name in node.kwd_attrs:
            self._read_of_anything(name, node.lineno)

    def _name(self, node: ast.Name) -> None:
        self._module_as_value(node)
        if self._names.is_own(node):
            return
        if node.id in ("getattr", "setattr") and not self._names.is_called(node):
            self._add("dynamic-code", f"`{node.id}` under another name", node.lineno)
        elif node.id in policy.DANGEROUS_BUILTINS and isinstance(node.ctx, ast.Load):
            self._add(policy.DANGEROUS_BUILTINS[node.id], f"`{node.id}`", node.lineno)
        elif _is_dunder(node.id) and node.id not in policy.HARMLESS_DUNDERS:
            self._add("dunder-access", f"`{node.id}`", node.lineno)

    def _use(self, dotted: str, line: int) -> bool:
        """A name of a module, however it is reached; whether it is one that is not to be used."""
        found = self._fault_of(dotted)
        if found is not None:
            self._add(*found, line)
        return found is not None

    def _fault_of(self, dotted: str) -> tuple[str, str] | None:  # noqa: PLR0911 (one for each rule)
        """The code for using a name of a module, and what to say; None for one that may be used."""
        parts = dotted.split(".")
        if prefix := _below(dotted, policy.FORBIDDEN_NAMES):
            code, why = policy.FORBIDDEN_NAMES[prefix]
            return code, f"`{prefix}` {why}"
        if prefix := _below(dotted, self._dsl.forbidden):
            return "forbidden-attribute", f"`{prefix}`: {self._dsl.forbidden[prefix]}"
        if any(map(_is_smuggled, parts[1:])):
            return "forbidden-import", f"a module by way of `{dotted}`"
        if policy.PRIVATE.match(dotted) and not policy.ALLOWED_PRIVATE.match(dotted):
            return "forbidden-attribute", f"`{dotted}` is one of torch's internals"
        if parts[0] in policy.STANDARD_LIBRARY and any(part.startswith("_") and not _is_dunder(part) for part in parts):
            return "forbidden-attribute", f"`{dotted}` is one of the standard library's internals"
        if policy.MODULES_ELSEWHERE.get(parts[0], frozenset()).intersection(parts[1:]):
            return "forbidden-attribute", f"a module by way of `{dotted}`"
        if not dotted.startswith("cuda.bindings.") or len(parts) <= 3:
            return None
        if dotted in policy.STREAM_HANDLES or _below(dotted, self._dsl.imports):
            return None
        return "forbidden-attribute", f"`{dotted}`: only stream handles may be used of it"

    # actions ----------------------------------------------------------------------------------------------------------

    def _call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "__setattr__" and node.args:
            for owner in self._names.origins(node.args[0]):
                self._add("monkeypatch", f"`__setattr__` on `{owner}`", node.lineno)
        if not isinstance(node.func, ast.Name) or self._names.is_own(node.func):
            return
        if node.func.id in ("getattr", "setattr") and any(isinstance(x, ast.Starred) for x in node.args):
            self._add("dynamic-code", f"`{node.func.id}` with arguments made at run time", node.lineno)
        if len(node.args) < 2:
            return
        target, name = node.args[0], folded(node.args[1])
        modules = self._names.origins(target)
        if node.func.id == "setattr" and modules and not all(_below(m, policy.ASSIGNABLE) for m in modules):
            self._add("monkeypatch", f"`setattr` on `{sorted(modules)[0]}`", node.lineno)
        if node.func.id in ("getattr", "setattr", "hasattr"):
            if name is None and modules and node.func.id != "hasattr":  # which hands nothing on
                self._add("dynamic-code", f"`{node.func.id}` with a name made at run time", node.lineno)
            elif name is not None and not modules:
                self._read_of_anything(name, node.lineno)
            elif name is not None and _is_dunder(name) and name not in policy.HARMLESS_DUNDERS:
                self._add("dunder-access", f"`{name}`", node.lineno)
            elif name is not None:
                for module in modules:
                    self._use(f"{module}.{name}", node.lineno)

    def _assignment(self, node: ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete) -> None:
        targets: list[ast.expr] = list(node.targets) if isinstance(node, ast.Assign | ast.Delete) else [node.target]
        self._assign(targets)
        patterns = any(isinstance(target, ast.Name) and target.id == "__match_args__" for target in targets)
        if patterns and not isinstance(node, ast.Delete) and node.value is not None:
            self._match_args(node.value)

    def _loop(self, node: ast.For | ast.AsyncFor | ast.comprehension) -> None:
        self._assign([node.target])

    def _with(self, node: ast.withitem) -> None:
        self._assign([node.optional_vars] if node.optional_vars is not None else [])

    def _match_args(self, value: ast.expr) -> None:
        """What a positional class pattern reads."""
        texts = [folded(item) for item in value.elts] if isinstance(value, ast.Tuple | ast.List) else [None]
        for text in texts:
            if text is None:
                self._add("dunder-access", "`__match_args__` made at run time", value.lineno)
            else:
                self._read_of_anything(text, value.lineno)

    def _assign(self, targets: list[ast.expr]) -> None:
        for target in _flat(targets):
            if isinstance(target, ast.Attribute | ast.Subscript):
                for owner in self._names.origins(target.value):
                    if not _below(owner, policy.ASSIGNABLE):
                        self._add("monkeypatch", f"An assignment to a part of `{owner}`", target.lineno)

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


def _is_smuggled(name: str) -> bool:
    return name in policy.SMUGGLED_MODULES or name.removeprefix("_") in policy.SMUGGLED_MODULES


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
