"""Where a key stands in a TOML file, for error messages. A wrong answer costs a misleading line, no more."""

from __future__ import annotations

import re
from collections.abc import Sequence

_TABLE = re.compile(r"""^\s*\[\[?\s*([\w."' -]+?)\s*\]\]?\s*(#.*)?$""")
_KEY = re.compile(r"""^\s*([\w."' -]+?)\s*=""")
_INLINE_KEY = r"""[{{,]\s*["']?{}["']?\s*="""


def line_of(text: str, keys: Sequence[str], value: str | None = None) -> int | None:
    """The 1-based line of a dotted key, or of `value` in it where that stands on a later line of the same list."""
    lines = text.splitlines()
    found = _line_of_key(lines, list(keys))
    if found is None or value is None:
        return found
    for number in range(found, len(lines) + 1):
        if re.search(rf"""["']{re.escape(value)}["']""", lines[number - 1]):
            return number
        if number > found and _KEY.match(lines[number - 1]):
            break
    return found


def _line_of_key(lines: list[str], keys: list[str]) -> int | None:
    table: list[str] = []
    outer: int | None = None
    for number, line in enumerate(lines, start=1):
        if header := _TABLE.match(line):
            table = _parts(header[1])
            here = table
        elif entry := _KEY.match(line):
            here = [*table, *_parts(entry[1])]
        else:
            continue
        if here == keys:
            return number
        if here and here == keys[: len(here)]:
            if entry_is_inline(line, keys[len(here)]):
                return number
            outer = outer or number
    return outer


def entry_is_inline(line: str, key: str) -> bool:
    """Whether an inline table on this line has the key."""
    return re.search(_INLINE_KEY.format(re.escape(key)), line) is not None


def _parts(dotted: str) -> list[str]:
    return [part.strip().strip("\"'") for part in dotted.split(".")]
