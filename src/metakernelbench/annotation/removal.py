"""A skill without the statements of some category: the material of the `ablate` design."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from metakernelbench.annotation.labels import Statement
from metakernelbench.annotation.statements import Part, parts, touched


def without_category(skill: str, statements: Iterable[Statement], category: str) -> str:
    """The skill with every statement of `category` taken out; the same text where it has none.

    Whole sentences go, also where the label quotes a part of one, and with them what they leave empty: the marker of
    a list item, the heading of a section. All other characters stay as they are.
    """
    found = parts(skill)
    labelled = (statement for statement in statements if statement.category == category)
    gone = set().union(*(touched(found, statement.start, statement.end) for statement in labelled))
    gone |= _empty_headings(skill, found, gone)
    return _cut(skill, [found[index] for index in sorted(gone)])


def _empty_headings(skill: str, found: tuple[Part, ...], gone: Collection[int]) -> set[int]:
    """Headings all of whose statements are gone. One that never had any stays."""
    empty = set()
    for index, part in enumerate(found):
        if part.kind != "heading" or index in gone:
            continue
        section = _section(skill, found, index)
        if section and all(below in gone for below in section):
            empty.add(index)
    return empty


def _section(skill: str, found: tuple[Part, ...], heading: int) -> list[int]:
    """The statements under a heading, those of deeper headings included, headings themselves left out."""
    level, below = _level(found[heading].of(skill)), []
    for index in range(heading + 1, len(found)):
        part = found[index]
        if part.kind == "heading" and _level(part.of(skill)) <= level:
            break
        if part.kind != "heading":
            below.append(index)
    return below


def _level(heading: str) -> int:
    return len(heading) - len(heading.lstrip("#"))


_MARKER_ALONE = re.compile(r"\s*(?:(?:[-*+]|\d{1,4}[.)])\s*)?(?:>\s*)*$")


def _cut(skill: str, gone: list[Part]) -> str:
    """The text without these parts, without lines that only held them, and without the gap that a sentence leaves."""
    for part in reversed(gone):
        before, after = skill[: part.start], skill[part.end :]
        line_start = before.rfind("\n") + 1
        rest, newline, further = after.partition("\n")
        if _MARKER_ALONE.match(before[line_start:]) and not rest.strip():
            skill = before[:line_start] + further if newline else before[:line_start]
        elif _MARKER_ALONE.match(before[line_start:]):
            skill = before + after.lstrip(" \t")
        elif not rest.strip():
            skill = before.rstrip(" \t") + newline + further
        else:
            skill = before.rstrip(" \t") + " " + after.lstrip(" \t")
    return skill
