"""How every picture looks, and its forms: SVG for a page, interactive HTML, and PNG, SVG and PDF for print.

No browser is needed for any of them, and no network to look at any of them. Colours are those of Okabe and Ito, which
stay apart for colour-blind readers, and colour never says anything alone: what a colour says is also a place, a shape
or a number beside the mark. Pictures are at most `WIDTH` wide between their axes, so that they fit a phone and a
column of a paper.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

INK = "#222222"
"""The colour of text in print."""
WIDTH = 330
"""Pixels between the axes of a picture."""
BLUE, VERMILLION, GREEN, ORANGE, PINK, SKY, GREY = (
    "#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#9AA0A6",
)  # fmt: skip
OUTCOME_COLOURS = {"help": BLUE, "neutral": GREY, "harm": VERMILLION}
"""Blue and vermillion stay apart for every kind of colour-blindness, and of light and dark on a grey printer."""
FAMILY_COLOURS = (BLUE, ORANGE, GREEN, PINK, VERMILLION, SKY)
"""In the order in which the families appear in the study."""
ARM_COLOURS = {"solo": ORANGE, "conditioned": BLUE}
SERIES = (BLUE, ORANGE, GREEN, PINK, VERMILLION, SKY, "#444B54")
"""For anything else that has a handful of kinds: causes, categories, uptake. (A lighter grey would be pink's
double for who does not see green.)"""
STEPS = (VERMILLION, "#F3D9C9", "#F2F2F2", "#C9DDEB", BLUE)
"""From harm over nothing to help, for areas whose colour is a number."""


PERCENT = "format(100 * datum.value, ',.0f') + ' %'"
"""Labels of an axis of shares."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A chart with a name for its files, a title, and a sentence that says how to read it."""

    name: str
    title: str
    note: str
    chart: Any
    """An Altair chart."""


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Names of models without what stands before their last slash, where they still differ then: in a picture there is
    room for `model-v3`, not for `provider/vendor/model-v3`."""
    names = sorted(set(names))
    short = [name.rsplit("/", 1)[-1] for name in names]
    return dict(zip(names, short if len(set(short)) == len(names) else names, strict=True))


def svg(chart: Any, *, ink: str = "currentColor") -> str:
    """A chart as SVG. Its text takes the colour of the page it is in, so that it reads in light and in dark."""
    import vl_convert

    return str(vl_convert.vegalite_to_svg(specification(chart, ink=ink, paper=None)))


def png(chart: Any, *, scale: float = 2.0) -> bytes:
    """A chart as PNG on white."""
    import vl_convert

    return bytes(vl_convert.vegalite_to_png(specification(chart), scale=scale))


def pdf(chart: Any) -> bytes:
    """A chart as PDF."""
    import vl_convert

    return bytes(vl_convert.vegalite_to_pdf(specification(chart)))


def interactive(picture: Picture) -> str:
    """A page with the picture alone, its marks answering to the pointer; all that it needs is in it (some 0.9 MB)."""
    chart = json.dumps(specification(picture.chart, ink=INK)).replace("<", "\\u003c")
    title, note = html.escape(picture.title), html.escape(picture.note)
    return _PAGE.format(title=title, note=note, chart=chart, library=_library())


@cache
def _library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script."""
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script")


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 60rem; margin: 1rem auto;
  padding: 0 1rem; }}
h1 {{ font-size: 1.4rem; line-height: 1.25; }}
#chart svg {{ max-width: 100%; height: auto; }}
</style>
<h1>{title}</h1>
<p>{note}</p>
<div id="chart" role="img" aria-label="{title}"></div>
<script type="module">
{library}
vegaEmbed("#chart", {chart}, {{ actions: false, renderer: "svg" }});
</script>
</html>
"""


def specification(chart: Any, *, ink: str = INK, paper: str | None = "white") -> dict[str, Any]:
    """The chart as Vega-Lite, with our type and colours. (Altair itself would refuse `currentColor`.)"""
    found: dict[str, Any] = chart.to_dict()
    lines = {"labelColor": ink, "titleColor": ink, "tickColor": ink, "domainColor": ink, "gridColor": ink}
    text = {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"}
    found["background"] = paper
    found["config"] = {
        "font": "Arial, Helvetica, Liberation Sans, sans-serif",
        "padding": {"left": 20, "right": 12, "top": 4, "bottom": 4},  # fonts differ in width from machine to machine
        "view": {"stroke": None},
        "axis": {**lines, **text, "gridOpacity": 0.12, "domainOpacity": 0.4, "tickOpacity": 0.4},
        "axisY": {"titlePadding": 14},  # a browser's font may be wider than the one that was measured
        "legend": {
            "labelColor": ink, "titleColor": ink, "labelFontSize": 12, "titleFontSize": 12,
            "titleFontWeight": "normal", "symbolOpacity": 1, "columnPadding": 16,
            "layout": {"top": {"direction": "vertical", "anchor": "start"}},
        },
        "header": {"labelColor": ink, "titleColor": ink, "labelFontSize": 12, "titleFontSize": 12,
                   "titleFontWeight": "normal", "labelFontWeight": "bold"},
        "title": {"color": ink, "fontSize": 12, "anchor": "start", "frame": "group"},
        "text": {"color": ink, "fontSize": 11},
        "rule": {"color": ink},
        "tick": {"color": ink},
    }  # fmt: skip
    return found
