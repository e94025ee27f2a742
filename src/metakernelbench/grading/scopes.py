"""Which names of a kernel.py are its own, where a built-in function has the same: by Python's rules of scope.

A name that a function binds is never a built-in in it, whatever runs. One that the module binds is a built-in until
the binding has run, and again when it is deleted, so only an unconditional definition or import above the use counts.
What a class binds is no help: outside its body nobody finds it there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

type _Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def own_names(tree: ast.Module) -> set[int]:
    """The `id` of every `ast.Name` that cannot be a built-in's. Nothing recurses: trees may be as deep as one likes."""
    deleted = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Del)}
    lines = {name: line for name, line in _defined_by(tree) if name not in deleted}
    own: set[int] = set()
    waiting: list[tuple[ast.AST, frozenset[str]]] = [(tree, frozenset())]
    while waiting:
        node, local = waiting.pop()
        if isinstance(node, ast.Name) and (node.id in local or lines.get(node.id, node.lineno) < node.lineno):
            own.add(id(node))
        if isinstance(node, _FUNCTIONS):
            inside = (local | _bound_by(node)) - _declared_elsewhere(node)
            body = node.body if isinstance(node.body, list) else [node.body]
            waiting += [(child, inside) for child in body]
            outside = [child for child in ast.iter_child_nodes(node) if child not in body]
            waiting += [(child, local) for child in outside]
        else:
            if isinstance(node, _COMPREHENSIONS):
                local |= {name for part in node.generators for name in _targets(part.target)}
            waiting += [(child, local) for child in ast.iter_child_nodes(node)]
    return own


def _defined_by(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """What the module's own statements define or import, with their lines; the first of each name."""
    for node in reversed(tree.body):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node.lineno
            case ast.Import() | ast.ImportFrom():
                yield from ((alias.asname or alias.name.partition(".")[0], node.lineno) for alias in node.names)


def _bound_by(function: _Function) -> frozenset[str]:
    """The names that a function binds itself: parameters, and whatever is assigned in its body."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return frozenset({argument.arg for argument in every if argument is not None} | set(_assigned_in(function)))


def _assigned_in(function: _Function) -> Iterator[str]:
    for node in _own_nodes(function):
        match node:
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Import() | ast.ImportFrom():
                yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name
            case ast.MatchMapping(rest=str(name)):
                yield name


def _declared_elsewhere(function: _Function) -> set[str]:
    return {name for node in _own_nodes(function) if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}


def _own_nodes(function: _Function) -> Iterator[ast.AST]:
    """What belongs to a function's own scope: not the insides of other functions, of classes and of comprehensions, of
    which only what `:=` assigns is the function's."""
    waiting: list[ast.AST] = list(function.body) if isinstance(function.body, list) else [function.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, _COMPREHENSIONS):
            waiting += [n.target for n in ast.walk(node) if isinstance(n, ast.NamedExpr)]
            continue
        yield node
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            waiting += ast.iter_child_nodes(node)


def _targets(target: ast.expr) -> Iterator[str]:
    return (node.id for node in ast.walk(target) if isinstance(node, ast.Name))
