"""Turns what is known of a package's modules into Markdown pages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from metakernelbench.dsls.docs.entries import Entry, Module

INDEX, GUIDE, RULES = "index.md", "guide.md", "not-allowed.md"


def pages(
    title: str, modules: Sequence[Module], *, start: Sequence[str], guide: str | None, forbidden: Mapping[str, str]
) -> dict[str, str]:
    """File name → text of every page. `start` names the modules to begin with."""
    found = {page_of(module.name): "\n".join(_page(module)) + "\n" for module in modules}
    found[RULES] = "\n".join(_rules(title, forbidden)) + "\n"
    if guide is not None:
        found[GUIDE] = guide
    found[INDEX] = "\n".join(_index(title, modules, start, guide is not None)) + "\n"
    return found


def page_of(module: str) -> str:
    """The path of a module's page below the folder of the documentation."""
    return f"modules/{module}.md"


def _index(title: str, modules: Sequence[Module], start: Sequence[str], has_guide: bool) -> Iterator[str]:
    known = {module.name: module for module in modules}
    yield f"# {title}: documentation of the installed packages"
    yield ""
    yield "Made from signatures, docstrings and source locations. Search it all with `docs-search TERM ...`."
    yield "Source locations are below the folder of installed packages:"
    yield "`python3 -c \"import sysconfig; print(sysconfig.get_path('purelib'))\"`."
    yield ""
    yield "## Start here"
    yield ""
    if has_guide:
        yield f"- [{GUIDE}]({GUIDE}): a short guide, with code that runs"
    yield f"- [{RULES}]({RULES}): names that a submission may not use; they have no pages"
    for name in start:
        if name in known:
            yield _listed(known[name])
    yield ""
    yield "## All modules"
    yield ""
    yield from map(_listed, modules)


def _listed(module: Module) -> str:
    about = first_sentence(module.doc)
    names = len(module.entries)
    count = f"{names} name{'s' if names != 1 else ''}"
    return f"- [{module.name}]({page_of(module.name)}) ({count}){f': {about}' if about else ''}"


def _rules(title: str, forbidden: Mapping[str, str]) -> Iterator[str]:
    yield f"# Names of {title}'s packages that a submission may not use"
    yield ""
    yield "What lies below a name is meant as well. `task check` says where kernel.py uses one."
    yield ""
    for name, why in sorted(forbidden.items()):
        yield f"- `{name}`: {why}"


def _page(module: Module) -> Iterator[str]:
    yield f"# {module.name}"
    yield ""
    if module.where:
        yield f"Source: `{module.where}`"
    if module.also:
        yield f"The same module as {', '.join(f'`{name}`' for name in module.also)}"
    if module.unread:
        yield f"This module cannot be imported here ({module.unread}); the page was made from its source."
    yield from _text(module.doc)
    yield from _elsewhere([entry for entry in module.entries if entry.defined_in])
    yield from _values([entry for entry in module.entries if entry.kind == "value"])
    for entry in module.entries:
        if not entry.defined_in and entry.kind != "value":
            yield from _described(entry)


def _elsewhere(entries: Sequence[Entry]) -> Iterator[str]:
    if entries:
        yield from ("", "## Names described on other pages", "")
    for entry in entries:
        link = f"[{entry.defined_in}]({entry.defined_in}.md)"
        about = f": {entry.doc}" if entry.doc else ""
        yield f"- `{entry.name}{entry.signature}`{about} ({link})"


def _values(entries: Sequence[Entry]) -> Iterator[str]:
    """Constants, those of one type together."""
    if entries:
        yield from ("", "## Values", "")
    by_type: dict[str, list[str]] = {}
    for entry in entries:
        by_type.setdefault(entry.doc, []).append(f"`{entry.name}{entry.signature}`")
    for type_name, names in by_type.items():
        yield f"- {f'of type `{type_name}`: ' if type_name else ''}{', '.join(names)}"


def _described(entry: Entry, owner: str = "") -> Iterator[str]:
    name = f"{owner}{entry.name}"
    yield from ("", f"{'###' if owner else '##'} {name}", "")
    if entry.signature:
        yield from ("```python", f"{name}{entry.signature}", "```")
    if entry.where:
        yield f"`{entry.where}`"
    yield from _text(entry.doc)
    for member in entry.members:
        if member.kind == "value" and not member.doc:
            continue
        yield from _described(member, f"{name}.")


def _text(doc: str) -> Iterator[str]:
    """A docstring as it is: most are not Markdown."""
    if doc:
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", doc)), default=0))
        yield from (f"{fence}text", doc, fence)


def first_sentence(text: str) -> str:
    """The first sentence of a docstring, on one line."""
    paragraph = " ".join(text.split("\n\n", maxsplit=1)[0].split())
    return re.split(r"(?<=[.!?]) ", paragraph)[0][:300]
