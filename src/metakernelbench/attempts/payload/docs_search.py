#!/usr/bin/env python3
"""Search the documentation in /docs: every section that holds all the terms, best first.

    docs-search [-n NUMBER] [--full] TERM ...

    -n NUMBER   how many sections to show (default 8)
    --full      show whole sections instead of excerpts

Terms are looked for without regard to case, inside longer words and in the page's name too: `warp sum` finds
`warp_reduction_sum`, and `module.name` finds `name` on that module's pages.
Exit status: 0 something was found, 1 nothing was, 2 wrong usage.
"""

import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

DOCS = Path(os.environ.get("MKB_ROOT") or "/") / "docs"
FOUND, NOTHING, USAGE = 0, 1, 2
_SHOWN = 8
_EXCERPT_LINES = 6
_WIDTH = 150
_TITLE_IS_TERM, _TITLE_HAS_TERM = 12.0, 4.0
_GUIDE = 2.0
"""How much more a section of the guide counts than one made from a docstring."""


class Section(NamedTuple):
    """What stands under one heading."""

    page: str
    """Path below /docs."""
    line: int
    title: str
    text: str


def main(arguments: Sequence[str]) -> int:
    try:
        terms, number, full = parse(arguments)
    except ValueError:
        print(__doc__)
        return USAGE
    if not (DOCS / "index.md").is_file():
        print(f"There is no documentation in {DOCS}.")
        return NOTHING
    found, every = search(terms, list(sections(DOCS)))
    if not found:
        print(f"Nothing found for {' '.join(terms)!r}. Try a shorter or another word, or read {DOCS}/index.md.")
        return NOTHING
    if not every:
        print("No section holds all the terms; these hold some of them.")
    for place, section in enumerate(found[:number], start=1):
        print(f"{place}. {DOCS / section.page}:{section.line}  {section.title}")
        print("\n".join(f"     {line[:_WIDTH]}" for line in shown(section, terms, full=full)) + "\n")
    print(f"{min(number, len(found))} of {len(found)} sections. Read on: sed -n LINE,+40p FILE, or docs-search --full.")
    return FOUND


def parse(arguments: Sequence[str]) -> tuple[list[str], int, bool]:
    """Terms in lower case, the number to show, whether to show all. Raises `ValueError`."""
    terms: list[str] = []
    number, full, rest = _SHOWN, False, list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "-n":
            number = int(rest.pop(0)) if rest else 0
        elif argument == "--full":
            full = True
        elif argument.startswith("-"):
            raise ValueError(argument)
        else:
            terms += re.split(r"[\s.()]+", argument.lower())
    terms = [term for term in dict.fromkeys(terms) if term]
    if not terms or number < 1:
        raise ValueError("no terms")
    return terms, number, full


def sections(docs: Path) -> Iterator[Section]:
    """All sections of all pages: a heading outside code, and what follows up to the next one."""
    for path in sorted(docs.rglob("*.md")):
        page = str(path.relative_to(docs))
        if page == "index.md":
            continue
        start, title, fence = 1, page, ""
        lines: list[str] = []
        for number, line in enumerate(path.read_text(errors="replace").split("\n"), start=1):
            if line.startswith("```"):
                ticks = line[: len(line) - len(line.lstrip("`"))]
                fence = "" if fence == line else fence or ticks
            elif not fence and (heading := re.match(r"#{1,3} (.*)", line)):
                yield Section(page, start, title, "\n".join(lines))
                start, title, lines = number, heading[1], []
                continue
            lines.append(line)
        yield Section(page, start, title, "\n".join(lines))


def search(terms: Sequence[str], among: Sequence[Section]) -> tuple[list[Section], bool]:
    """Sections with all the terms, best first, and True; where there are none, those with some, and False."""
    texts = [(section, f"{section.page}\n{section.title}\n{section.text}".lower()) for section in among]
    holding = {term: sum(term in text for _, text in texts) for term in terms}
    weights = {term: math.log(1 + len(texts) / (1 + holding[term])) for term in terms}
    every = [(section, text) for section, text in texts if all(term in text for term in terms)]
    candidates = every or [(section, text) for section, text in texts if any(term in text for term in terms)]
    scored = [(score(section, text, weights), section) for section, text in candidates]
    scored.sort(key=lambda pair: (-pair[0], pair[1].page, pair[1].line))
    once = {(section.title, section.text): section for _, section in reversed(scored)}  # of twins, the better placed
    return [section for _, section in scored if once[section.title, section.text] is section], bool(every)


def score(section: Section, text: str, weights: dict[str, float]) -> float:
    """Rare terms, terms in the title, many mentions and short sections count more."""
    names = set(re.findall(r"\w+", section.title.lower()))
    total = 0.0
    for term, weight in weights.items():
        mentions = text.count(term)
        total += weight * mentions / (mentions + 1 + len(text) / 2000)
        if term in names or term == section.title.lower():
            total += weight * _TITLE_IS_TERM / len(names)
        elif term in section.title.lower():
            total += weight * _TITLE_HAS_TERM / len(names)
    return total * (_GUIDE if section.page == "guide.md" else 1.0)


def shown(section: Section, terms: Sequence[str], *, full: bool) -> list[str]:
    """The whole section, or its lines with the terms, in order; its first lines where only the title has them."""
    lines = [line for line in section.text.split("\n") if line.strip() and not line.startswith("```")]
    if full:
        return lines
    with_terms = [line for line in lines if any(term in line.lower() for term in terms)]
    chosen = [*lines[:2], *(line for line in with_terms if line not in lines[:2])]
    return chosen[:_EXCERPT_LINES]


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BrokenPipeError:
        sys.exit(FOUND)
