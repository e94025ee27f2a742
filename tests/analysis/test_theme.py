"""Colours that stay apart: for every kind of colour-blindness, and where it matters on a grey printer."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from metakernelbench.analysis.figures.theme import ARM_COLOURS, FAMILY_COLOURS, OUTCOME_COLOURS, SERIES

PALETTES = {
    "outcomes": tuple(OUTCOME_COLOURS.values()),
    "families": FAMILY_COLOURS,
    "arms": tuple(ARM_COLOURS.values()),
    "series": SERIES,
}
# Machado, Oliveira and Fernandes 2009, severity 1: what linear RGB looks like without one kind of cone.
VISION = {
    "ordinary": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]])
WHITE = np.array([0.95047, 1, 1.08883])


def lab(colour: str, vision: str) -> np.ndarray:
    """CIE L*a*b* of `#rrggbb` as it is seen."""
    srgb = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = XYZ @ np.clip(np.array(VISION[vision]) @ linear, 0, 1) / WHITE
    x, y, z = np.where(seen > 0.008856, np.cbrt(seen), 7.787 * seen + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("palette", PALETTES)
def test_colours_of_a_picture_stay_apart(palette, vision):
    """2.3 is a difference that can just be seen; side by side in a legend, 15 is plain."""
    for one, other in combinations(PALETTES[palette], 2):
        assert np.linalg.norm(lab(one, vision) - lab(other, vision)) > 15, (one, other)


@pytest.mark.parametrize("palette", ["outcomes", "arms"])
def test_outcomes_and_arms_differ_in_grey_too(palette):
    lightness = sorted(lab(colour, "ordinary")[0] for colour in PALETTES[palette])
    assert min(np.diff(lightness)) > 7
