"""The form of a skill, counted by rule."""

from __future__ import annotations

from importlib import resources

import pytest

from metakernelbench.annotation.format_check import SECTIONS, check_format, check_structure
from metakernelbench.annotation.gold_set import gold_set
from tests.annotation.test_statements import SKILL

PROSE = """# What was learned

- If the sum is taken first, the norm is right: it has to be, because rows are independent.
- For each of the eight heads, one block reads the keys (once).
- The time fell from 1.9 to 1.2 ms; e.g. on the second draw. See also the previous point.
- In version 2.0 of the kernel (kernel.py) this was = 0.
"""


def test_prose_keeps_the_form() -> None:
    found = check_format(PROSE)
    assert found.kept
    assert (found.code_lines, found.commands, found.api_names) == (0, 0, ())
    assert (found.headings, found.words) == (1, len(PROSE.split()))


def test_statements_are_sentences_and_rows() -> None:
    assert check_format(SKILL).statements == 7


@pytest.mark.parametrize(
    ("text", "code", "commands", "names"),
    [
        ("```python\nx = tl.load(p)\n\ntl.store(q, x)\n```\n", 2, 0, ("tl.load", "tl.store")),
        ("Text.\n\n~~~\n$ task submit\npython3 check.py\n~~~\n", 0, 2, ()),
        ("Then run `task submit` and wait.", 0, 1, ()),
        ("$ nvidia-smi\n", 0, 1, ()),
        ("Use T.alloc_buffer for it, and cute.copy, and T.alloc_buffer again.", 0, 0, ("T.alloc_buffer", "cute.copy")),
        ("import torch\nout = solve(x)\n", 2, 0, ()),
        ("def solve(x):\n    return x\n", 2, 0, ()),
        ("An open block:\n```\nx = 1\n", 1, 0, ()),
    ],
)
def test_what_the_form_leaves_out_is_counted(text: str, code: int, commands: int, names: tuple[str, ...]) -> None:
    found = check_format(text)
    assert (found.code_lines, found.commands, found.api_names) == (code, commands, names)
    assert not found.kept


def test_of_the_gold_skills_one_is_code_and_two_name_an_interface() -> None:
    broken = {skill.id for skill in gold_set().skill if not check_format(skill.text).kept}
    assert broken == {"s20", "s06", "s13"}


def test_an_empty_skill_has_nothing_to_count() -> None:
    found = check_format("")
    assert (found.words, found.statements, found.kept) == (0, 0, True)


STRUCTURED = """# Fused add and RMSNorm

## Findings

- One read of the row is enough (1.2 ms instead of 1.9).
- The sum may stay in float32 until the end,
  and is rounded once (not tested)

## Division of work

* One block takes a row (passed (all draws)).

## What failed

- nothing

## Where it applies

- "Nothing".

## Open questions

- Several rows for each block (not tested)
"""


def test_a_structured_skill_has_its_sections_in_order_and_evidence_with_every_item() -> None:
    found = check_structure(STRUCTURED)
    assert (found.sections, found.in_order, found.items, found.with_evidence) == (5, True, 4, 4)
    assert found.kept
    assert check_format(STRUCTURED).kept


@pytest.mark.parametrize(
    "changed",
    [
        STRUCTURED.replace("## What failed\n\n- nothing\n\n", ""),
        STRUCTURED.replace("## Findings", "## Open").replace("## Open questions", "## Findings"),
        STRUCTURED.replace(" (1.2 ms instead of 1.9).", "."),
        STRUCTURED + "\n## More\n\n- And this (seen once).\n",
        PROSE,
    ],
)
def test_a_structured_skill_that_lacks_some_of_it_does_not_keep_the_form(changed: str) -> None:
    assert not check_structure(changed).kept


def test_the_sections_are_those_of_the_instruction() -> None:
    template = resources.files("metakernelbench.attempts").joinpath("instruction.md.j2").read_text()
    places = [template.index(f"`## {section}`") for section in SECTIONS]
    assert places == sorted(places)
