"""What annotators are told, and how attempts are condensed, changes only with the version under which answers lie."""

from __future__ import annotations

from pathlib import Path

from metakernelbench import annotation
from metakernelbench.annotation import condensing
from metakernelbench.annotation.condensing import condensed
from metakernelbench.annotation.questions import PROMPT_VERSION
from metakernelbench.annotation.rubric import rubric, taxonomy
from metakernelbench.store.artifacts import digest_of
from tests.annotation.test_condensing import LONG

FOLDER = Path(annotation.__file__).parent
HINT = "raise the version, then put the new digest here"


def digest(*names: str) -> str:
    return digest_of("".join((FOLDER / name).read_text() for name in names))[:16]


def test_another_instruction_has_another_version() -> None:
    prompts = sorted(f"prompts/{path.name}" for path in (FOLDER / "prompts").glob("*.j2"))
    assert (PROMPT_VERSION, digest(*prompts)) == ("1", "5352f8ce0296ede7"), HINT


def test_other_words_have_another_version() -> None:
    assert (rubric().version, digest_of(rubric().model_dump_json())[:16]) == (1, "f6561822d3bf2722"), HINT
    assert (taxonomy().version, digest_of(taxonomy().model_dump_json())[:16]) == (1, "c87dda6d6761266f"), HINT


def test_another_way_of_condensing_has_another_version() -> None:
    # What stands above the steps is part of the subject as it is, so that a change there asks again by itself.
    shown = [digest_of(condensed(LONG, budget).partition("## Steps")[2])[:16] for budget in (4_000, 24_000)]
    assert (condensing.VERSION, *shown) == (1, "aa9cac11aae17b73", "70add2aac694c49c"), HINT
