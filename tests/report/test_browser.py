"""The report in a real browser: it opens clean, leads from page to page, sorts, filters, searches, runs nothing of
others, fits a phone, and reads for those who use a keyboard or a screen reader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from metakernelbench.report import names, page
from metakernelbench.report.packing import packed
from tests.report.support import HOSTILE, HOSTILE_NAME, accessibility, chromium, opened, study

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not Path("/usr/bin/chromium").exists(), reason="needs Chromium"),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page.render(study(text=HOSTILE, model=HOSTILE_NAME)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def chrome() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def browser(chrome: Any, report: Path) -> Iterator[tuple[Any, list[str]]]:
    with opened(chrome, report) as found:
        yield found


def attempt(dsl: str, label: str) -> str:
    attempts = study(model=HOSTILE_NAME).plan.attempts
    return names.attempt(next(a for a in attempts if (a.problem, a.dsl, a.label) == ("p03", dsl, label)))


def go(tab: Any, anchor: str) -> Any:
    """Follow an address; returns the page that it leads to."""
    tab.evaluate("anchor => { location.hash = anchor; }", anchor)
    found = tab.locator(f"article.page[id='{anchor.split('?', maxsplit=1)[0]}']")
    found.wait_for()
    return found


def until(tab: Any, condition: str) -> None:
    """Wait for an expression to hold. (Playwright's own way is not allowed by the page's policy against scripts.)"""
    for _ in range(200):
        if tab.evaluate(condition):
            return
        tab.wait_for_timeout(50)
    raise AssertionError(f"{condition} does not come to hold")


def comparison(tab: Any) -> Any:
    """The page of p03 from cute to tirx, where both kernels passed."""
    go(tab, "comparisons?direction=cute→tirx")
    tab.locator("#all-comparisons tbody tr:visible a").first.click()
    found = tab.locator("article.comparison")
    found.wait_for()
    return found


def test_it_opens_without_a_complaint_or_a_request(browser):
    tab, complaints = browser
    assert tab.title() == "trial · MetaKernelBench"
    assert tab.locator("h1").inner_text() == "No clear effect overall"
    for anchor in ("pictures", "tables", "comparisons"):
        go(tab, anchor)
    assert complaints == []


def test_one_goes_from_the_overview_over_model_family_and_problem_to_a_comparison_and_back(browser):
    tab, _ = browser
    tab.locator("#overview .matrix tbody a").nth(1).click()  # a family with the model
    until(tab, "document.activeElement === document.querySelector('main')")  # where a screen reader reads on
    scope = tab.locator("article.page:not(#overview)")
    scope.wait_for()
    assert "Over 1 comparisons" not in scope.inner_text()
    tab.locator(".matrix tbody th a").first.click()
    tab.locator("article[id^='problem-']").wait_for()
    tab.locator("article[id^='problem-'] table a").first.click()
    tab.locator("article.comparison").wait_for()
    tab.go_back()
    tab.locator("article[id^='problem-']").wait_for()
    tab.go_back()
    tab.go_back()
    tab.locator("#overview").wait_for()


def test_an_address_survives_a_reload_and_the_place_on_the_page_a_way_back(browser):
    tab, _ = browser
    found = comparison(tab)
    title = found.locator("h1").inner_text()
    tab.reload()
    tab.locator("article.comparison").wait_for()
    assert tab.locator("h1").inner_text() == title
    tab.evaluate("scrollTo(0, 500)")
    until(tab, "[...places.values()].includes(500)")
    go(tab, attempt("cute", "solo"))
    assert tab.evaluate("scrollY") == 0
    tab.go_back()
    tab.locator("article.comparison").wait_for()
    until(tab, "scrollY === 500")


def test_an_address_inside_a_page_leads_to_that_place(browser):
    tab, _ = browser
    tab.evaluate("location.hash = 'tables.noise'")
    tab.locator("article[id='tables']").wait_for()
    until(tab, "scrollY > 500")
    assert tab.evaluate("document.getElementById('tables.noise').getBoundingClientRect().top") < 200


def test_a_wrong_address_says_so(browser):
    tab, complaints = browser
    tab.evaluate("location.hash = 'problem-p99'")
    tab.get_by_text("No such page").wait_for()
    tab.get_by_text("To the overview").click()
    tab.locator("#overview").wait_for()
    assert complaints == []


def test_a_comparison_has_its_three_attempts_side_by_side(browser):
    tab, complaints = browser
    found = comparison(tab)
    assert found.locator(".rho").inner_text() == "ρ = 1.5"
    assert found.locator(".three").first.locator("section").count() == 3
    skills = found.locator("section[aria-label='Skills'] .side")
    assert [skills.nth(n).locator(".prose strong").count() for n in range(3)] == [1, 1, 1]
    assert found.locator("section[aria-label='Submissions'] .timeline").count() == 3
    assert found.locator("section[aria-label='What the agents did'] .turns").count() == 3
    assert found.locator(".card .clockwork").count() == 3
    assert complaints == []


def test_kernels_are_shown_as_what_changed_between_any_two(browser):
    tab, _ = browser
    found = comparison(tab)
    difference = found.locator(".difference")
    difference.locator("table").wait_for()
    assert difference.locator("output").inner_text() == "lines: 1 gone, 1 new"
    assert difference.locator("tr.gone").inner_text().split() == ["2", "-", "return", "x", "+", "6.0", *HASH]
    difference.locator("select").first.select_option("nothing")
    difference.locator("tr.new").nth(1).wait_for()
    assert difference.locator("tr.gone").count() == 0
    assert difference.locator("i.k").all_inner_texts() == ["def", "return"]
    assert difference.locator("i.f").all_inner_texts() == ["solve"]


HASH = f"# {HOSTILE}".replace("\u202e", "�").replace("\x1b", "�").replace("\ud800", "�").split()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.lists(st.tuples(st.text(max_size=6), st.integers(1, 300))))
@example(text=[])
@example(text=[("a", 4), ("b", 3), ("c", 259), ("d", 4)])
@example(text=[("the quick brown fox", 70_000)])
@example(text=[(chr(n), n) for n in range(32, 600)])
def test_whatever_is_packed_comes_back(browser, text):
    tab, _ = browser
    written = "".join(part * times for part, times in text)
    assert tab.evaluate("unpacked", packed(written)) == written


def test_the_shortest_edit_is_found(browser):
    tab, _ = browser
    script = """([a, b]) => {
        const found = edits([...a], [...b]);
        const old = found.filter(([sign]) => sign !== "+").map(([, x]) => a[x]).join("");
        const fresh = found.filter(([sign]) => sign !== "-").map(([, , y]) => b[y]).join("");
        return [old, fresh, found.filter(([sign]) => sign !== " ").length];
    }"""
    for a, b, least in [("abcabba", "cbabac", 5), ("", "xy", 2), ("xy", "", 2), ("same", "same", 0), ("ab", "ba", 2)]:
        assert tab.evaluate(script, [a, b]) == [a, b, least]
    assert tab.evaluate("edits([...'abcdefgh'], [...'ijklmnop'], 5)") is None


def test_a_submission_shows_what_changed_since_the_one_before(browser):
    tab, _ = browser
    found = go(tab, attempt("cute", "solo"))
    sent = found.locator("details.sent")
    for summary in sent.locator("summary").all():
        summary.click()
    button = sent.nth(1).locator("button", has_text="Show all of it")
    button.click()
    assert sent.nth(1).locator("pre.code").is_visible()


def test_texts_of_agents_are_shown_and_run_nothing(browser):
    tab, complaints = browser
    found = go(tab, attempt("cute", "solo"))
    for summary in found.locator("details > summary").all():
        summary.click()
    assert "<script>window.broken = 1</script>" in found.locator("pre.text").first.inner_text()
    assert "<script>window.broken = 1</script>" in found.locator(".prose").inner_text()
    assert "<script>window.broken = 1</script>" in found.locator(".turns").inner_text()
    assert found.locator(".prose strong").count() == 1
    assert found.locator(".prose td").count() == 2
    comparison(tab)
    tab.mouse.move(200, 300)
    assert tab.evaluate("window.broken") is None
    foreign = "main img, main iframe, main script, main [onmouseover], main [onerror], main [onload]"
    assert tab.locator(foreign).count() == 0
    assert tab.locator(".prose a").count() == 0
    assert "{{ 7 * 7 }}" in tab.locator("main").inner_text()
    assert complaints == []


def test_sorting_by_a_column_orders_rows_says_so_and_stays_in_the_address(browser):
    tab, _ = browser
    go(tab, "comparisons")
    table = tab.locator("#all-comparisons")
    ratios = "rows => rows.map(row => Number(row.cells[2].dataset.value))"
    head = table.locator("th", has_text="ρ")
    head.locator("button").focus()
    tab.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    found = table.locator("tbody tr").evaluate_all(ratios)
    assert found == sorted(found)
    head.locator("button").click()
    assert table.locator("tbody tr").evaluate_all(ratios) == sorted(found, reverse=True)
    tab.reload()
    tab.locator("th[aria-sort='descending']").wait_for()
    assert table.locator("tbody tr").evaluate_all(ratios) == sorted(found, reverse=True)


def test_filtering_keeps_the_rows_that_fit_and_stays_in_the_address(browser):
    tab, _ = browser
    go(tab, "comparisons")
    tab.locator("input[name=q]").fill("rescue")
    tab.locator("select[name=direction]").select_option("cute→tirx")
    for _ in range(2):
        tab.locator("#found", has_text="1 row").wait_for()
        assert tab.locator("#all-comparisons tbody tr:visible").count() == 1
        tab.reload()


def test_a_search_by_keys_alone_leads_to_a_page(browser):
    tab, _ = browser
    tab.keyboard.press("/")
    tab.keyboard.type("p49 cute→tirx")
    tab.locator("#hits [role=option]").first.wait_for()
    tab.keyboard.press("Enter")
    tab.locator("article.comparison h1", has_text="p49, cute→tirx").wait_for()
    tab.keyboard.press("ArrowRight")
    tab.locator("article.comparison h1", has_text="p49, tirx→cute").wait_for()
    tab.keyboard.press("ArrowLeft")
    tab.locator("article.comparison h1", has_text="p49, cute→tirx").wait_for()


def test_a_mark_of_the_picture_leads_to_its_comparison(browser):
    tab, _ = browser
    go(tab, "pictures")
    links = tab.locator("figure svg a").evaluate_all("links => links.map(link => link.href.baseVal)")
    assert len(links) >= 12
    tab.evaluate("hash => { location.hash = hash; }", links[5])
    tab.locator("article.comparison").wait_for()


def test_every_column_of_the_comparisons_is_seen_on_a_small_laptop(chrome, report):
    with opened(chrome, report, viewport={"width": 1200, "height": 800}) as (tab, _):
        go(tab, "comparisons")
        box = tab.locator(".scroll:has(#all-comparisons)")
        assert box.evaluate("box => box.scrollWidth <= box.clientWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_it_without_sideways_scrolling(chrome, report, scheme):
    with opened(chrome, report, viewport={"width": 390, "height": 800}, color_scheme=scheme) as (tab, complaints):
        pages = ["overview", "comparisons", "tables", "pictures", "problem-p03", attempt("cute", "from-tirx")]
        for anchor in pages:
            found = go(tab, anchor)
            for summary in found.locator("details > summary").all():
                summary.click()
            assert tab.evaluate("document.documentElement.scrollWidth") == 390, anchor
        comparison(tab)
        assert tab.evaluate("document.documentElement.scrollWidth") == 390
        assert complaints == []


def test_dark_and_light_follow_the_system_and_the_button(chrome, report):
    paper = "getComputedStyle(document.body).backgroundColor"
    with opened(chrome, report, color_scheme="light") as (light, _):
        by_day = light.evaluate(paper)
        light.locator("#theme").click()
        switched = light.evaluate(paper)
    with opened(chrome, report, color_scheme="dark") as (dark, _):
        by_night = dark.evaluate(paper)
    assert by_day != by_night == switched


def test_in_print_nothing_is_cut_off(chrome, report):
    with opened(chrome, report) as (tab, _):
        comparison(tab)
        tab.emulate_media(media="print")
        assert not tab.locator("header.bar").is_visible()
        assert tab.locator(".prose").first.evaluate("box => box.scrollHeight <= box.clientHeight + 1")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(chrome, report, scheme):
    # Axe is a script of its own, so the page's policy against scripts is lifted for it.
    with opened(chrome, report, color_scheme=scheme, bypass_csp=True) as (tab, _):
        for anchor in ("overview", "comparisons", "tables", "pictures", "problem-p03", attempt("cute", "solo")):
            found = go(tab, anchor)
            for summary in found.locator("details > summary").all():
                summary.click()
            assert accessibility(tab) == [], anchor
        tab.evaluate("location.hash = ''")
        tab.locator("#overview .matrix tbody a").nth(1).click()
        tab.locator("article.page:not(#overview)").wait_for()
        assert accessibility(tab) == []
        comparison(tab).locator(".difference table").wait_for()
        assert accessibility(tab) == []
