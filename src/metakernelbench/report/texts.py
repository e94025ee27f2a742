"""Texts that agents wrote, as HTML. All of them are hostile: everything is escaped, and nothing in them can load,
link or run anything."""

from __future__ import annotations

from functools import cache
from html import escape
from typing import Any

from markupsafe import Markup

from metakernelbench.text import harmless

_HEADING_SHIFT = 3
"""A skill's own headings come below the report's: its first level becomes h4."""


def plain(text: str) -> Markup:
    """A text as it is, in a scrollable block."""
    return _block("text", escape(harmless(text)))


def python(text: str) -> Markup:
    """A kernel. The page colours it, as text, when it is opened: colours here would triple the file."""
    return _block("code", escape(harmless(text)))


def _block(kind: str, html: str) -> Markup:
    return Markup('<pre class="{}" tabindex="0">{}</pre>').format(kind, Markup(html))


def markdown(text: str) -> Markup:
    """A skill, rendered. Raw HTML, links and images stay text: nothing is fetched and nothing can be clicked."""
    parser = _markdown()
    tokens = parser.parse(harmless(text))
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(6, int(token.tag[1]) + _HEADING_SHIFT)}"
    html = Markup(parser.renderer.render(tokens, parser.options, {}))
    return Markup('<div class="prose" tabindex="0">{}</div>').format(html)


@cache
def _markdown() -> Any:
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    return parser.disable(["html_block", "html_inline", "image", "link", "autolink", "reference"])
