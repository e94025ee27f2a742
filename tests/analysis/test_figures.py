"""The pictures: every form of every one of them, marks for every row, and what stands in the pages."""

from __future__ import annotations

import re
from pathlib import Path

import polars as pl
import pytest

from metakernelbench.analysis import figures, outcome
from metakernelbench.analysis.figures.attempts import best_so_far
from metakernelbench.analysis.figures.theme import short_names
from metakernelbench.analysis.frames import Frames, frames_of
from metakernelbench.analysis.simulate import World, simulate
from metakernelbench.experiments.designs import Plan
from tests.analysis.support import study_of
from tests.report.support import chromium, opened


@pytest.fixture(scope="module")
def study() -> Frames:
    return frames_of(*simulate(World(problems=12, models=2, effect=0.2, unfinished=0.02, texts=True), 5))


@pytest.fixture(scope="module")
def pictures(study) -> dict[str, figures.Picture]:
    return {picture.name: picture for picture in figures.pictures(study)}


def test_every_picture_comes_as_svg_png_pdf_and_page(pictures):
    assert set(pictures) == {
        "lift", "outcome-by-direction", "outcome-by-family", "outcome-by-model", "ratios-cute-tirx",
        "ratios-tirx-cute", "standing", "tiers", "submissions", "best-so-far", "roofline",
    }  # fmt: skip
    for picture in pictures.values():
        assert figures.svg(picture.chart).startswith("<svg")
        assert figures.png(picture.chart).startswith(b"\x89PNG")
        assert figures.pdf(picture.chart).startswith(b"%PDF")
        assert picture.note.endswith(".")


def test_pictures_fit_a_phone(pictures):
    for picture in pictures.values():
        width = re.match(r'<svg[^>]* width="([\d.]+)"', figures.svg(picture.chart))
        assert width is not None and float(width[1]) < 530, picture.name


def test_an_interactive_page_asks_the_network_for_nothing_and_keeps_hostile_names_as_text():
    study = frames_of(*simulate(World(problems=6, models=1, effect=0.2), 5))
    name = "</script><script>window.broken = 1</script>"
    hostile = study.main.with_columns(model=pl.lit(name))
    chart = figures.ratio_strip(hostile, figures.families_in_order(hostile))
    page = figures.interactive(figures.Picture(name="x", title=name, note=name, chart=chart))
    assert page.count("</script") == 1
    assert not re.findall(r'(?:src|href)="', page.partition("<script")[0])


def test_the_strip_has_a_mark_for_every_judged_comparison(study):
    svg = figures.svg(figures.ratio_strip(study.main, figures.families_in_order(study.main)))
    marks = svg.count('aria-roledescription="point"')
    assert marks == outcome.judged(study.main).height


def test_marks_of_a_strip_lead_where_they_are_told(study):
    linked = {picture.name: picture for picture in figures.pictures(study, link=lambda row: f"#{row['treatment']}")}
    svg = figures.svg(linked["ratios-cute-tirx"].chart)
    forth = outcome.judged(study.main).filter(pl.col("direction") == "cute→tirx")
    assert all(f"#{treatment}" in svg for treatment in forth["treatment"])


def test_best_so_far_only_ever_rises(study):
    steps = best_so_far(study.attempts, study.submissions)
    assert steps.height > 0
    rises = steps.sort("key", "minute").with_columns(step=pl.col("best").diff().over("key"))
    assert rises["step"].drop_nulls().min() > 0


@pytest.mark.parametrize("records", [True, False])
def test_a_study_with_little_or_nothing_has_what_pictures_it_can(records):
    plan, made = study_of({"p03": (4.0, 6.0, 4.0, 4.0)})
    for picture in figures.pictures(frames_of(plan, made if records else {})):
        assert figures.svg(picture.chart).startswith("<svg")
    assert figures.pictures(frames_of(Plan(attempts=(), comparisons=()), {})) == []


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["a/x/one", "b/two"], ["one", "two"]),
        (["a/one", "b/one"], ["a/one", "b/one"]),
        (["one"], ["one"]),
    ],
)
def test_names_of_models_are_short_where_they_still_differ(names, short):
    assert list(short_names(names).values()) == short


@pytest.mark.browser
@pytest.mark.skipif(not Path("/usr/bin/chromium").exists(), reason="needs Chromium")
def test_an_interactive_page_draws_itself_offline_on_a_phone_and_answers_to_the_pointer(study, pictures, tmp_path):
    page = tmp_path / "ratios.html"
    page.write_text(figures.interactive(pictures["ratios-cute-tirx"]), encoding="utf-8")
    with chromium() as browser, opened(browser, page, viewport={"width": 390, "height": 800}) as (tab, complaints):
        marks = tab.locator('#chart svg [aria-roledescription="point"]')
        marks.first.wait_for()
        assert marks.count() == outcome.judged(study.main).filter(direction="cute→tirx").height
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390
        marks.first.hover(force=True)
        tab.locator("#vg-tooltip-element.visible").wait_for()
        assert "verdicts" in tab.locator("#vg-tooltip-element").inner_text()
        assert complaints == []
