"""Which names of a kernel.py are its own, where a built-in function has the same: by Python's rules of scope.

A name that a function binds is never a built-in in it, whatever runs. One that the module binds is a built-in until
the binding has run, and again when it is deleted, so only an unconditional definition or import above the use counts,
and none of a name that a `global` statement or the end of an `except` clause could take away again. What a class binds
is no help: outside its body nobody finds it there, and in its body it hides what the function around it binds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

type _Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
type _Scope = _Function | ast.ClassDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def own_names(tree: ast.Module, local: set[int]) -> set[int]:
    """The `id` of every `ast.Name` that cannot be a built-in's; `local` is what `local_names` found."""
    taken_away = set(_taken_away(tree))
    lines = {name: line for name, line in _defined_by(tree) if name not in taken_away}
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    return local | {id(node) for node in names if lines.get(node.id, node.lineno) < node.lineno}


def local_names(tree: ast.Module) -> set[int]:
    """The `id` of every `ast.Name` that a function around it, or a comprehension, binds. Nothing recurses: trees may be
    as deep as one likes."""
    found: set[int] = set()
    waiting: list[tuple[ast.AST, frozenset[str], frozenset[str]]] = [(tree, frozenset(), frozenset())]
    while waiting:
        node, local, hidden = waiting.pop()  # hidden: what the class around binds itself
        if isinstance(node, ast.Name) and node.id in local and node.id not in hidden:
            found.add(id(node))
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            body: list[ast.AST] = list(node.body) if isinstance(node.body, list) else [node.body]
            if isinstance(node, ast.ClassDef):
                within = local, frozenset(_assigned_in(node)) | _declared_elsewhere(node)
            else:
                within = (local | _bound_by(node)) - _declared_elsewhere(node), frozenset[str]()
            waiting += [(child, *within) for child in body]
            inner = set(map(id, body))
            children = [child for child in children if id(child) not in inner]
        elif isinstance(node, _COMPREHENSIONS):
            first = node.generators[0]
            waiting.append((first.iter, local, hidden))  # it is evaluated before there are any targets
            inside = local | {name for part in node.generators for name in _targets(part.target)}
            others = [child for child in children if child is not first] + [first.target, *first.ifs]
            waiting += [(child, inside, hidden) for child in others]
            continue
        waiting += [(child, local, hidden) for child in children]
    return found


def _taken_away(tree: ast.Module) -> Iterator[str]:
    """Names that something in the module may delete, or bind from inside a function."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Del()) | ast.ExceptHandler(name=str(name)):
                yield name
            case ast.Global(names=names):
                yield from names


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


def _assigned_in(scope: _Scope) -> Iterator[str]:
    for node in _own_nodes(scope):
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


def _declared_elsewhere(scope: _Scope) -> set[str]:
    return {name for node in _own_nodes(scope) if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}


def _own_nodes(scope: _Scope) -> Iterator[ast.AST]:
    """What belongs to a scope itself: not the insides of other functions, of classes and of comprehensions, of
    which only what `:=` assigns is."""
    waiting: list[ast.AST] = list(scope.body) if isinstance(scope.body, list) else [scope.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, _COMPREHENSIONS):
            waiting += [n.target for n in ast.walk(node) if isinstance(n, ast.NamedExpr)]
            continue
        yield node
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            waiting += ast.iter_child_nodes(node)


def _targets(target: ast.expr) -> Iterator[str]:
    return (node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
