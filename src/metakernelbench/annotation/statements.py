"""A skill as statements: the sentences, list items, table rows and code blocks that labels and removals speak of.

The parts are found by rule, so that two annotators who quote the same sentence with another beginning or another end
mean the same statement, and so that a removal takes out a whole sentence and leaves prose behind. No part overlaps
another; what lies between them is white space and list markers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

type Kind = Literal["sentence", "heading", "row", "code"]


@dataclass(frozen=True, slots=True)
class Part:
    """One statement of a skill, as a slice of its text."""

    start: int
    end: int
    kind: Kind

    def of(self, text: str) -> str:
        return text[self.start : self.end]


_FENCE = re.compile(r"[ ]{0,3}(`{3,}|~{3,})")
_HEADING = re.compile(r"[ ]{0,3}#{1,6}(?:\s|$)")
_ROW = re.compile(r"\s*\|.*\|\s*$")
_MARKER = re.compile(r"\s*(?:[-*+]|\d{1,4}[.)])\s+")
_QUOTED = re.compile(r"\s*>+\s?")
_SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]*_`]*(?=\s+[\"'“‘(\[*_`]*[A-ZÄÖÜ0-9])")
_ABBREVIATIONS = frozenset({"e.g.", "i.e.", "vs.", "cf.", "approx.", "etc.", "no.", "fig.", "sec.", "resp.", "ca."})


def parts(text: str) -> tuple[Part, ...]:
    """The statements of a skill, in order."""
    return tuple(_parts(text))


def _parts(text: str) -> Iterator[Part]:
    paragraph: tuple[int, int] | None = None
    fence: tuple[int, str] | None = None
    offset = 0
    for line in text.splitlines(keepends=True):
        start, end = offset, offset + len(line)
        offset = end
        opening = _FENCE.match(line)
        if fence is not None:
            if opening and opening[1].startswith(fence[1]):
                yield from _trimmed(text, fence[0], end, "code")
                fence = None
            continue
        special = bool(opening or _HEADING.match(line) or _ROW.match(line) or not line.strip())
        marker = None if special else _MARKER.match(line) or _QUOTED.match(line)
        if paragraph is not None and (special or marker):
            yield from _sentences(text, *paragraph)
            paragraph = None
        if opening:
            fence = (start, opening[1])
        elif _HEADING.match(line):
            yield from _trimmed(text, start, end, "heading")
        elif _ROW.match(line):
            yield from _trimmed(text, start, end, "row")
        elif line.strip():
            first = start + (marker.end() if marker else 0)
            paragraph = (paragraph[0], end) if paragraph else (first, end)
    if fence is not None:
        yield from _trimmed(text, fence[0], len(text), "code")
    if paragraph is not None:
        yield from _sentences(text, *paragraph)


def _sentences(text: str, start: int, end: int) -> Iterator[Part]:
    begin = start
    for found in _SENTENCE_END.finditer(text, start, end):
        word = text[begin : found.end()].rsplit(None, 1)
        if word and word[-1].lower().lstrip("(") in _ABBREVIATIONS:
            continue
        yield from _trimmed(text, begin, found.end(), "sentence")
        begin = found.end()
    yield from _trimmed(text, begin, end, "sentence")


def _trimmed(text: str, start: int, end: int, kind: Kind) -> Iterator[Part]:
    """The slice without white space at its ends; nothing where nothing is left."""
    piece = text[start:end]
    left, right = len(piece) - len(piece.lstrip()), len(piece.rstrip())
    if left < right:
        yield Part(start + left, start + right, kind)


def find_quote(text: str, quote: str) -> tuple[int, int] | None:
    """Where a quote stands in a text, word for word; None where it does not.

    White space counts as equal whatever it is made of, because a quote joins lines that the text breaks; every other
    character has to agree.
    """
    words = quote.split()
    if not words:
        return None
    found = re.search(r"\s+".join(map(re.escape, words)), text)
    return None if found is None else found.span()


def touched(found: tuple[Part, ...], start: int, end: int) -> frozenset[int]:
    """Indices of the parts that a slice of the text shares a character with."""
    return frozenset(index for index, part in enumerate(found) if part.start < end and start < part.end)
