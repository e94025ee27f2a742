"""Looks at a DSL's packages as a user of them would: imports each module and asks what is in it.

Runs in a process of its own (`python -m metakernelbench.dsls.docs.inspecting`), because it imports whatever the
packages hold. Reads a request as JSON from standard input, `{"modules", "skip"}`, and writes one JSON list of modules
to the file named by its argument.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import os
import pkgutil
import re
import sys
import sysconfig
import types
import typing
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from metakernelbench.dsls.docs import parsing
from metakernelbench.dsls.docs.entries import Entry, Kind, Module
from metakernelbench.dsls.docs.rendering import first_sentence

_SITE = Path(sysconfig.get_path("purelib")).resolve()
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_LONGEST_SIGNATURE = 600
_LONGEST_VALUE = 80
_DEEPEST = 3
"""How far attributes of namespace objects are followed: `T.ptx.tcgen05.mma`."""
_QUALIFIED = re.compile(r"\b(?:[a-z_]\w*\.)+([A-Za-z_]\w*)")
_FORWARD = re.compile(r"ForwardRef\('(\w+)'\)")
_MISSING = object()


def main() -> None:
    """Answer the request on standard input."""
    request = json.load(sys.stdin)
    target = Path(sys.argv[1])
    with Path(os.devnull).open("w") as nowhere:
        sys.stdout = nowhere  # what the packages print when they are imported is not wanted
        warnings.simplefilter("ignore")
        found = Collector(request["modules"], request["skip"]).modules()
        target.write_text(json.dumps([dataclasses.asdict(module) for module in found]))


class Collector:
    """Finds the modules below some dotted names, and what is in them."""

    def __init__(self, roots: Sequence[str], skip: Iterable[str]) -> None:
        self._roots = roots
        self._skip = frozenset(skip)
        self._tops = tuple(f"{root.partition('.')[0]}." for root in roots)

    def modules(self) -> list[Module]:
        """All modules that are to be documented, in the order of their names, each only once."""
        imported: dict[str, types.ModuleType] = {}
        unread: list[Module] = []
        for name, path in self._names():
            try:
                imported[name] = importlib.import_module(name)
            except BaseException as error:  # a module may raise what it likes, or leave
                unread.append(_from_source(name, path, error))
        names: dict[int, list[str]] = {}
        for name, module in imported.items():
            names.setdefault(id(module), []).append(name)
        pages = {known[0]: known for known in names.values()}
        self._documented = {imported[first].__name__: first for first in pages}
        found = [self._module(first, imported[first], known[1:]) for first, known in pages.items()]
        return sorted([*found, *unread], key=lambda module: module.name)

    def _names(self) -> Iterator[tuple[str, Path | None]]:
        """Every module to try, with its source file where that is known. The roots come first."""
        for root in self._roots:
            yield root, None
        for root in self._roots:
            package = sys.modules.get(root)
            if package is not None and package.__name__ == root:  # else it is another package under a second name
                yield from self._below(root, getattr(package, "__path__", ()))

    def _below(self, package: str, folders: Iterable[str]) -> Iterator[tuple[str, Path | None]]:
        for folder in folders:
            for found in pkgutil.iter_modules([folder]):
                name = f"{package}.{found.name}"
                if found.name.startswith("_") or found.name in ("tests", "test") or self.skipped(name):
                    continue
                path = Path(folder, found.name)
                yield name, path / "__init__.py" if found.ispkg else path.with_suffix(".py")
                if found.ispkg:
                    yield from self._below(name, [str(path)])

    def skipped(self, dotted: str) -> bool:
        """Whether a name, or one above it, is not to be documented."""
        parts = dotted.split(".")
        return any(".".join(parts[: end + 1]) in self._skip for end in range(len(parts)))

    def _module(self, name: str, module: types.ModuleType, also: Sequence[str]) -> Module:
        own = [module.__name__] if module.__name__ != name else []
        return Module(
            name=name,
            doc=_doc(module),
            where=_below_site(_attribute(module, "__file__")),
            entries=tuple(self._entries(name, module)),
            also=tuple(sorted({*also, *own})),
        )

    def _entries(self, name: str, module: types.ModuleType) -> Iterator[Entry]:
        listed = _attribute(module, "__all__")
        names = listed if isinstance(listed, list | tuple) else [n for n in dir(module) if not n.startswith("_")]
        values = {}
        for attribute in sorted({str(n) for n in names}):
            value = _attribute(module, attribute)
            wanted = value is not _MISSING and not isinstance(value, types.ModuleType)
            if wanted and not _is_foreign(value, self._tops) and not self._skipped_in(module, name, attribute):
                values[attribute] = value
        of_a_type = Counter(type(value) for value in values.values())
        for attribute, value in values.items():
            yield self._entry(attribute, value, module.__name__, only_one=of_a_type[type(value)] == 1)

    def _skipped_in(self, module: types.ModuleType, name: str, attribute: str) -> bool:
        return self.skipped(f"{name}.{attribute}") or self.skipped(f"{module.__name__}.{attribute}")

    def _entry(self, name: str, value: Any, module: str, *, only_one: bool, depth: int = 0) -> Entry:
        kind = self._kind(value, only_one)
        home = _attribute(_behind(value), "__module__")
        home = home if isinstance(home, str) else module
        # A name that another page describes gets a line and a link; one that none describes is described here.
        elsewhere = depth == 0 and home != module and home in self._documented and kind in ("function", "class")
        return Entry(
            name=name,
            kind=kind,
            signature=_value(value) if kind == "value" else _signature(value),
            doc=_type_name(value) if kind == "value" else first_sentence(_doc(value)) if elsewhere else _doc(value),
            where="" if kind in ("value", "namespace") else _where(value),
            defined_in=self._documented[home] if elsewhere else "",
            members=() if elsewhere or kind in ("function", "value") else tuple(self._members(value, module, depth)),
        )

    def _kind(self, value: Any, only_one: bool) -> Kind:
        """An object that is the only one of its type is a namespace where it has methods; data types, say, are not."""
        if isinstance(value, type):
            return "class"
        if inspect.isroutine(value) or _behind(value) is not value:
            return "function"
        ours = f"{type(value).__module__}.".startswith(self._tops)
        public = [n for n in dir(value) if not n.startswith("_")]
        return "namespace" if ours and only_one and public else "value"

    def _members(self, value: Any, module: str, depth: int) -> Iterator[Entry]:
        """Methods of a class; attributes of a namespace object, and of the namespaces that it holds."""
        if isinstance(value, type):
            for name, member in sorted(vars(value).items()):
                if name.startswith("_") and name != "__init__":
                    continue
                function = member.__func__ if isinstance(member, staticmethod | classmethod) else member
                if inspect.isroutine(function) or isinstance(function, property):
                    yield self._method(name, function)
            return
        if depth >= _DEEPEST:
            return
        for name in sorted(n for n in dir(value) if not n.startswith("_")):
            member = _attribute(value, name)
            if member is _MISSING or isinstance(member, types.ModuleType) or self.skipped(f"{module}.{name}"):
                continue
            yield self._entry(name, member, module, only_one=True, depth=depth + 1)

    def _method(self, name: str, function: Any) -> Entry:
        if isinstance(function, property):
            return Entry(name=name, kind="value", doc=_doc(function))
        return Entry(name=name, kind="function", signature=_signature(function), doc=_doc(function))


def _from_source(name: str, path: Path | None, error: BaseException) -> Module:
    reason = f"{type(error).__name__}: {error}".split("\n")[0]
    where = _below_site(str(path)) if path is not None else ""
    doc, entries = parsing.entries_of(path, where) if path is not None else ("", ())
    return Module(name=name, doc=doc, where=where, entries=entries, unread=reason)


def _attribute(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except BaseException:  # lazily imported things may fail in any way
        return _MISSING


def _is_foreign(value: Any, tops: tuple[str, ...]) -> bool:
    """Whether a name was imported from a package that is not documented here: `Any`, `dataclass`, `torch.Tensor`."""
    home = _attribute(_behind(value), "__module__")
    if home == "typing" and _is_alias(value):  # `Shape = Union[int, ...]` was made where it is found
        return False
    return isinstance(home, str) and not f"{home}.".startswith(tops)


def _behind(value: Any) -> Any:
    """The plain function behind one that became an object: a jitted function, a partial function, a dispatcher."""
    if isinstance(value, type) or not callable(value):
        return value
    inner = _quietly(inspect.unwrap, value) or value
    for attribute in ("func", "fn"):
        found = getattr(inner, attribute, None)
        if isinstance(found, types.FunctionType):
            return found
    return inner if isinstance(inner, types.FunctionType) else value


def _doc(value: Any) -> str:
    found = _behind(value)
    if not (isinstance(found, type | types.ModuleType | property) or inspect.isroutine(found)):
        found = type(found)
    text = _quietly(inspect.getdoc, found)
    return _plain(text).strip() if isinstance(text, str) else ""


def _signature(value: Any) -> str:
    if not callable(value):
        return ""
    shown = value if isinstance(value, functools.partial | type) else _behind(value)
    text = _quietly(lambda v: str(inspect.signature(v)), shown)
    if not isinstance(text, str):
        return "(...)"
    text = _short(text)
    return text if len(text) <= _LONGEST_SIGNATURE else f"{text[:_LONGEST_SIGNATURE]} ..."


def _is_alias(value: Any) -> bool:
    return not isinstance(value, type) and bool(typing.get_args(value))


def _value(value: Any) -> str:
    if _is_alias(value):
        text = _short(repr(value))
        return f" = {text}" if len(text) <= _LONGEST_SIGNATURE else ""
    text = _plain(repr(value)) if isinstance(value, int | float | str | bool | tuple | frozenset) else ""
    return f" = {text}" if 0 < len(text) <= _LONGEST_VALUE else ""


def _type_name(value: Any) -> str:
    plain = isinstance(value, int | float | str | bool | tuple | None) or _is_alias(value)
    return "" if plain else type(value).__qualname__


def _short(text: str) -> str:
    """Types without the modules that they are from."""
    return _FORWARD.sub(r"\1", _QUALIFIED.sub(r"\1", _plain(text)))


def _plain(text: str) -> str:
    """Without what differs from run to run."""
    return _ADDRESS.sub("", text)


def _where(value: Any) -> str:
    found = _behind(value)
    code = getattr(found, "__code__", None)
    if code is not None:
        place = _below_site(code.co_filename)
        return f"{place}:{code.co_firstlineno}" if place else ""
    path = _quietly(inspect.getsourcefile, found) if isinstance(found, type) else None
    if not isinstance(path, str) or not (place := _below_site(path)):
        return ""
    line = parsing.lines_of(Path(path)).get(found.__qualname__)
    return f"{place}:{line}" if line else place


def _below_site(path: Any) -> str:
    """A file's path below the folder of installed packages; empty where it lies elsewhere."""
    if not isinstance(path, str) or not Path(path).is_absolute():
        return ""
    resolved = Path(path).resolve()
    return str(resolved.relative_to(_SITE)) if resolved.is_relative_to(_SITE) else ""


def _quietly(ask: Callable[[Any], Any], value: Any) -> Any:
    """What `ask` says of a value that may answer any question with any exception; None then."""
    try:
        return ask(value)
    except BaseException:
        return None


if __name__ == "__main__":
    main()
