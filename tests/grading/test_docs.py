"""docs/grading.md repeats facts from the code: what it shows is what the code would make of it now."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from metakernelbench.grading import threats
from metakernelbench.grading.codes import CODES
from metakernelbench.grading.contract import Contract
from metakernelbench.grading.isolation import Limits
from metakernelbench.grading.page import PAGE, documentation, rendered
from metakernelbench.grading.redteam import EXPLOITS, read
from metakernelbench.grading.verdict import Stage

SOURCES = Path(__file__).parents[2] / "src" / "metakernelbench" / "grading"


def test_page_is_current() -> None:
    page = PAGE.read_text()
    assert rendered(page) == page, "run `python -m metakernelbench.grading.page`"


def test_a_part_that_is_missing_or_unknown_is_named() -> None:
    with pytest.raises(ValueError, match="should have"):
        rendered("# Grading\n")


def test_every_field_that_is_shown_has_its_text() -> None:
    for described in (Contract, Limits):
        assert documentation(described).keys() == {field.name for field in dataclasses.fields(described)}
    assert documentation(Stage).keys() == {stage.name for stage in Stage}


def test_every_family_has_exploits_or_a_reason() -> None:
    families = {read(path).family for path in EXPLOITS.glob("*.py")}
    assert families <= threats.FAMILIES.keys()
    assert threats.WITHOUT_EXPLOIT.keys() == threats.FAMILIES.keys() - families
    numbers = dict.fromkeys(threats.GROUPS, 0)
    for family in threats.FAMILIES:
        numbers[family[0]] += 1
        assert family == f"{family[0]}{numbers[family[0]]}", "in order, without a gap"


def test_files_that_the_page_mentions_exist() -> None:
    mentioned = re.findall(r"`([\w/]+\.py)`", " ".join(threats.WITHOUT_EXPLOIT.values()))
    assert all((EXPLOITS / name).is_file() or (EXPLOITS.parent / name).is_file() for name in mentioned)


def test_every_code_is_used_and_every_used_code_is_listed() -> None:
    sources = "\n".join(path.read_text() for path in SOURCES.glob("*.py") if path.stem != "codes")
    unused = [code for code in CODES if f'"{code}"' not in sources]
    assert not unused
    used = set(re.findall(r'finding\(\s*"([\w-]+)"', sources)) | set(re.findall(r'_add\("([\w-]+)"', sources))
    assert used <= set(CODES)
