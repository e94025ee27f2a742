"""The pictures, as Altair charts. `theme` says how they look and writes them; the other modules draw them."""

from metakernelbench.analysis.figures.gallery import pictures
from metakernelbench.analysis.figures.lifts import outcome_bars
from metakernelbench.analysis.figures.ratios import families_in_order, ratio_strip
from metakernelbench.analysis.figures.theme import (
    ARM_COLOURS,
    FAMILY_COLOURS,
    INK,
    OUTCOME_COLOURS,
    SERIES,
    WIDTH,
    Picture,
    interactive,
    pdf,
    png,
    specification,
    svg,
)

__all__ = [
    "ARM_COLOURS",
    "FAMILY_COLOURS",
    "INK",
    "OUTCOME_COLOURS",
    "SERIES",
    "WIDTH",
    "Picture",
    "families_in_order",
    "interactive",
    "outcome_bars",
    "pdf",
    "pictures",
    "png",
    "ratio_strip",
    "specification",
    "svg",
]
