"""Where our own guides are: in the checkout, or in the installed package."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parent
_CHECKOUT = _PACKAGE.parents[2]


def guide_of(name: str) -> Path | None:
    """The guide to one of our DSLs; None where neither place has it."""
    for folder in (_PACKAGE / "guides", _CHECKOUT / "docs" / "dsl"):
        guide = folder / f"{name}.md"
        if guide.is_file():
            return guide
    return None
