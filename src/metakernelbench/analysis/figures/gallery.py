"""Every picture that a study has, by name: what lists pictures, lists these."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import polars as pl

from metakernelbench.analysis import outcome, standing
from metakernelbench.analysis.figures import attempts, lifts, ratios
from metakernelbench.analysis.figures.theme import Picture, short_names
from metakernelbench.analysis.frames import Frames

type Link = Callable[[dict[str, Any]], str]
"""Where the mark of a comparison (a row of the comparisons' frame) leads to."""


def pictures(study: Frames, *, link: Link | None = None) -> list[Picture]:
    """The pictures of a study's main question and of its attempts; none of what it has nothing to show for."""
    study = _with_short_names(_with_links(study, link))
    return [*_of_lifts(study), *_of_ratios(study), *_of_standing(study), *_of_attempts(study)]


def _with_links(study: Frames, link: Link | None) -> Frames:
    if link is None:
        return study
    links = pl.Series("link", [link(row) for row in study.comparisons.iter_rows(named=True)], dtype=pl.String)
    return replace(study, comparisons=study.comparisons.with_columns(links))


def _with_short_names(study: Frames) -> Frames:
    model = pl.col("model").replace(short_names(study.attempts["model"]))
    return replace(
        study, attempts=study.attempts.with_columns(model), comparisons=study.comparisons.with_columns(model)
    )


def _of_lifts(study: Frames) -> Iterator[Picture]:
    by = ["direction", "family", *(["model"] if study.attempts["model"].n_unique() > 1 else [])]
    frames = [(name, outcome.lift(study.main, name, study.band).frame) for name in by]
    if not outcome.judged(study.main).height:
        return
    yield Picture(
        name="lift",
        title="Paired lift",
        note="ΔGM, the geometric mean of the paired ratios less one, with its 95 % interval over problems. Blue: the "
        "whole interval is above no lift; vermillion: below it; grey: neither, or there are too few problems.",
        chart=lifts.lift_dots(frames),
    )
    for name, frame in frames:
        yield Picture(
            name=f"outcome-by-{name}",
            title=f"Helped, neutral, harmed, by {name}",
            note=f"Shares of comparisons with a ratio above {1 + study.band:g}, below 1/{1 + study.band:g}, and "
            "between.",
            chart=lifts.outcome_bars(frame, name),
        )


def _of_ratios(study: Frames) -> Iterator[Picture]:
    families = ratios.families_in_order(study.main)
    for (direction,), part in outcome.judged(study.main).partition_by("direction", as_dict=True).items():
        yield Picture(
            name="ratios-" + re.sub(r"[^A-Za-z0-9_]+", "-", str(direction)),
            title=f"Paired ratios, {direction}",
            note="A mark is a comparison: right of 1 the attempt that had the skill was faster. Triangles are verdicts "
            "that changed, which count as 4 (rescue) and 1/4 (break). The shaded band is neutral.",
            chart=ratios.ratio_strip(part, families, band=study.band, legends=True),
        )


def _of_standing(study: Frames) -> Iterator[Picture]:
    if not standing.with_standing(study.main).height:
        return
    yield Picture(
        name="standing",
        title="Lift by the source's standing",
        note="ΔGM where the source's tier was below, at and above the baseline's. The upright strokes are what "
        "choosing comparisons by their baseline gives by chance: what a skill does is the distance between the two.",
        chart=lifts.standing_panels(standing.standing(study.main, study.band).frame),
    )
    yield Picture(
        name="tiers",
        title="Lift by solo tier and source tier",
        note="ΔGM in each field, and below it what choosing comparisons by their solo attempt gives by chance.",
        chart=lifts.tier_map(standing.tier_pairs(study.main, study.band).frame),
    )


def _of_attempts(study: Frames) -> Iterator[Picture]:
    if study.submissions.height:
        yield Picture(
            name="submissions",
            title="Submissions over time",
            note="Submissions of all attempts in each two minutes of the attempt's clock, by what came of them.",
            chart=attempts.submissions_over_time(study.submissions),
        )
    if study.submissions["speedup"].count():
        few = study.attempts.filter(pl.col("state").is_in(["passed", "failed"])).height <= attempts.MOST_LINES
        thin = "A thin line is an attempt." if few else "Thin lines are the lower and upper quartiles."
        yield Picture(
            name="best-so-far",
            title="Best speedup so far",
            note=f"The thick line is the median of its arm. {thin} Attempts without a passing submission stand below "
            "all others, so the median begins where half of them have passed.",
            chart=attempts.best_over_time(study.attempts, study.submissions),
        )
    if study.attempts.filter(pl.col("state") == "passed")["roofline"].count():
        yield Picture(
            name="roofline",
            title="Speedup against the roofline",
            note="A mark is a passing attempt. To the right: nearer to the bound that memory and arithmetic of the GPU "
            "set; up: faster than eager PyTorch.",
            chart=attempts.roofline(study.attempts, ratios.families_in_order(study.attempts)),
        )
