"""Skills fall into statements by rule; quotes are found word for word; a category can be taken out."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from metakernelbench.annotation.labels import Statement
from metakernelbench.annotation.removal import without_category
from metakernelbench.annotation.statements import find_quote, parts

SKILL = """# Fused add and RMSNorm

## What holds

- The sum stays in float32, e.g. until the last product. Rounding happens
  once, at the end.
- One worker takes several rows.

## Open

How many rows a worker should take was not measured.

| rows | ms |
|---|---|
| 1 | 2.0 |

```
x = 1
```
"""


def labelled(text: str, category: str, *quotes: str) -> list[Statement]:
    found = []
    for quote in quotes:
        span = find_quote(text, quote)
        assert span is not None
        found.append(Statement(category=category, quote=quote, start=span[0], end=span[1], supported=False))
    return found


def test_sentences_items_rows_headings_and_code_are_statements() -> None:
    kinds = [(part.kind, part.of(SKILL)) for part in parts(SKILL)]
    assert kinds[:5] == [
        ("heading", "# Fused add and RMSNorm"),
        ("heading", "## What holds"),
        ("sentence", "The sum stays in float32, e.g. until the last product."),
        ("sentence", "Rounding happens\n  once, at the end."),
        ("sentence", "One worker takes several rows."),
    ]
    assert [kind for kind, _ in kinds[5:]] == ["heading", "sentence", "row", "row", "row", "code"]


@given(st.text(alphabet="ab.A \n-#|`>1)!?\t\r\u2028é"))
def test_statements_never_overlap_and_hold_every_visible_character_but_markers(text: str) -> None:
    found = parts(text)
    assert all(a.end <= b.start for a, b in pairwise(found))
    assert all(part.of(text).strip() == part.of(text) != "" for part in found)
    covered = {index for part in found for index in range(part.start, part.end)}
    left = {c for index, c in enumerate(text) if index not in covered and not c.isspace()}
    assert left <= set("-1)>.")


def test_a_quote_may_join_lines_and_nothing_else() -> None:
    span = find_quote(SKILL, "Rounding happens once, at the end.")
    assert span is not None
    assert SKILL[slice(*span)] == "Rounding happens\n  once, at the end."
    assert find_quote(SKILL, "rounding happens once") is None
    assert find_quote(SKILL, "Rounding happens twice") is None
    assert find_quote(SKILL, " \n ") is None


def test_taking_out_a_category_takes_whole_sentences_and_leaves_the_rest_as_it_was() -> None:
    cut = without_category(SKILL, labelled(SKILL, "numerics_guidance", "Rounding happens once"), "numerics_guidance")
    assert cut == SKILL.replace(" Rounding happens\n  once, at the end.", "")


def test_an_emptied_list_item_and_an_emptied_section_go_as_well() -> None:
    one = without_category(SKILL, labelled(SKILL, "work_partition", "One worker takes"), "work_partition")
    assert one == SKILL.replace("- One worker takes several rows.\n", "")
    text = "# A\n\nKept here.\n\n## Open\n\n- Not tried: more rows.\n"
    assert without_category(text, labelled(text, "agenda_handoff", "Not tried"), "agenda_handoff").split() == [
        "#", "A", "Kept", "here.",
    ]  # fmt: skip


def test_a_sentence_in_the_middle_of_a_line_leaves_one_space() -> None:
    text = "First one. Second one. Third one.\n"
    assert without_category(text, labelled(text, "x", "Second one."), "x") == "First one. Third one.\n"
    assert without_category(text, labelled(text, "x", "First one."), "x") == "Second one. Third one.\n"
    assert without_category(text, labelled(text, "x", "Third one."), "x") == "First one. Second one.\n"


def test_other_categories_stay() -> None:
    assert without_category(SKILL, labelled(SKILL, "work_partition", "One worker takes"), "workload_fact") == SKILL


@given(st.data())
def test_nothing_but_the_labelled_statements_and_what_they_empty_goes(data: st.DataObject) -> None:
    found = parts(SKILL)
    chosen = data.draw(st.sets(st.sampled_from(range(len(found)))))
    labels = [
        Statement(category="c", quote="q", start=found[i].start, end=found[i].end, supported=True) for i in chosen
    ]
    cut = without_category(SKILL, labels, "c")
    for index, part in enumerate(found):
        if index not in chosen and part.kind != "heading":
            assert part.of(SKILL) in cut
        if index in chosen:
            assert part.of(SKILL) not in cut
