"""What is known of a module before it becomes a page. Plain data that travels as JSON between two processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

type Kind = Literal["function", "class", "namespace", "value"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One public name of a module or of a class."""

    name: str
    kind: Kind
    signature: str = ""
    """What stands after the name: the parameters of a function or class, ` = ...` of a value; empty if unknown."""
    doc: str = ""
    where: str = ""
    """`path:line` below the folder of installed packages; empty if unknown."""
    defined_in: str = ""
    """The module that defines it, where that is another one."""
    members: tuple[Entry, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Module:
    """One module that gets a page."""

    name: str
    doc: str = ""
    where: str = ""
    entries: tuple[Entry, ...] = ()
    also: tuple[str, ...] = field(default=())
    """Other names under which the same module is found."""
    unread: str = ""
    """Why the module could not be imported, where its page was made from its source alone."""


def from_json(data: dict[str, Any]) -> Module:
    """The inverse of `dataclasses.asdict`."""
    entries = tuple(map(_entry, data.pop("entries")))
    return Module(entries=entries, also=tuple(data.pop("also")), **data)


def _entry(data: dict[str, Any]) -> Entry:
    return Entry(members=tuple(map(_entry, data.pop("members"))), **data)
