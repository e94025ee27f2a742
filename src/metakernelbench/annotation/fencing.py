"""Sets text that others wrote apart from what we ask, so that no text can end its own part or begin another.

Each request draws a mark that nobody could have written down before. A part begins and ends with a line that carries
it; what stands between is data, whatever it says. Control characters, which could hide or reorder text, are shown as
replacement characters: one for one, so that places in the shown text are places in the original.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from metakernelbench.text import harmless


def fenced(parts: Mapping[str, str], mark: str) -> str:
    """The named texts, one after the other, each between two lines that carry the mark."""
    return "\n\n".join(f"[{mark} begin {name}]\n{harmless(text)}\n[{mark} end {name}]" for name, text in parts.items())


def fresh_mark(parts: Mapping[str, str]) -> str:
    """A mark that no part contains."""
    while True:
        mark = secrets.token_hex(16)
        if not any(mark in text for text in parts.values()):
            return mark
