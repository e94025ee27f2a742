from pathlib import Path

import pytest

from metakernelbench.attempts.payload import docs_search

TWIN = "## warp_sum\n\n```python\nwarp_sum(value, width=32)\n# not a heading\n```\nAdds over a warp.\n"
PAGES = {
    "index.md": "# Index\n\n- warp_sum everywhere\n",
    "guide.md": "# Guide\n\n## Reductions\n\nUse `warp_sum` first.\n",
    "modules/a.md": f"# a\n\n{TWIN}",
    "modules/b.md": f"# b\n\n{TWIN}"
    "\n## other\n\nLike warp_sum, but long. " + "word " * 500 + "\n\n## unrelated\n\nNothing.\n",
}


@pytest.fixture(autouse=True)
def docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in PAGES.items():
        page = tmp_path / "docs" / name
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text)
    monkeypatch.setattr(docs_search, "DOCS", tmp_path / "docs")
    return tmp_path / "docs"


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = docs_search.main(arguments)
    return code, capsys.readouterr().out


def test_the_section_of_that_name_comes_first_with_its_place(capsys: pytest.CaptureFixture[str], docs: Path) -> None:
    code, text = ask(capsys, "warp_sum")
    assert code == docs_search.FOUND
    first = text.split("\n")[0]
    assert first == f"1. {docs}/modules/a.md:3  warp_sum"
    assert "warp_sum(value, width=32)" in text
    assert text.rstrip().endswith("docs-search --full.")


def test_twins_on_several_pages_are_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = ask(capsys, "warp_sum")
    assert "3 of 3 sections" in text
    assert "index.md" not in text


def test_terms_are_parts_of_words_in_any_case_and_all_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = ask(capsys, "WARP", "width")
    assert "1 of 1 sections" in text


def test_a_dotted_name_is_looked_for_on_its_modules_page(capsys: pytest.CaptureFixture[str], docs: Path) -> None:
    assert ask(capsys, "b.other")[1].startswith(f"1. {docs}/modules/b.md")


def test_where_no_section_has_all_terms_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = ask(capsys, "warp_sum", "nowhere")
    assert code == docs_search.FOUND
    assert text.startswith("No section holds all the terms")


def test_nothing_found_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = ask(capsys, "nowhere")
    assert code == docs_search.NOTHING
    assert "shorter or another word" in text


def test_excerpts_are_short_unless_asked_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    assert max(map(len, ask(capsys, "but", "long")[1].split("\n"))) < 200
    assert max(map(len, ask(capsys, "--full", "unrelated")[1].split("\n"))) < 200
    assert ask(capsys, "-n", "1", "warp_sum")[1].count("\n1. ") + 1 == 1


@pytest.mark.parametrize("arguments", [[], ["-n"], ["-n", "x", "a"], ["--what", "a"], ["  "], ["-n", "0", "a"]])
def test_wrong_usage_shows_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, text = ask(capsys, *arguments)
    assert code == docs_search.USAGE
    assert "docs-search [-n NUMBER]" in text


def test_a_sandbox_without_documentation_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(docs_search, "DOCS", tmp_path / "absent")
    assert ask(capsys, "warp") == (docs_search.NOTHING, f"There is no documentation in {tmp_path}/absent.\n")
