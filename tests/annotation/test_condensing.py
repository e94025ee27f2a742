"""An attempt as one text: everything that matters, within a token budget, and nothing that was not there."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metakernelbench.annotation.condensing import condensed, tokens
from tests.annotation.support import NOTE, attempt, step, submission, verdict

LONG = attempt(
    *(
        step(
            f"Remark {n}. " + "I think about tiles and stages. " * 40,
            "task submit" if n % 10 == 0 else f"cat > kernel.py <<'EOF'\n# version {n}\n" + "x = y + z\n" * 400 + "EOF",
            f"output {n}\n" + "0.123 0.456 0.789\n" * 300,
        )
        for n in range(1, 121)
    ),
    submissions=tuple(submission(n, verdict(), answer=f"FAILED number {n}\n" + "details " * 800) for n in range(1, 11)),
    kernel="def solve(x):\n" + "    x = x + 1\n" * 9000,
)


def test_a_short_attempt_is_shown_whole() -> None:
    text = condensed(attempt(step("I read the problem.", "cat /task/problem.py", "rows = 13")))
    assert "[step 1] I read the problem.\n$ cat /task/problem.py\n> rows = 13" in text
    assert "[submission 1, at 60 s]\nanswered" in text
    assert "[wrong-output] what was wrong" in text
    assert text.endswith("## Final kernel.py\ndef solve(x): ...")


def test_echoes_of_what_was_typed_and_repeated_looks_are_shown_once() -> None:
    typed = "cat > kernel.py <<'EOF'\nx = load(p)\n\nEOF\n"
    screen = "New Terminal Output:\n\n[9:00 left] /app$ cat > kernel.py <<'EOF'\n> x = load(p)\n>\n> EOF\ndone"
    waits = [step("Wait for it.", "", "Waiting for the verdict ...") for _ in range(4)]
    text = condensed(attempt(step("Write it.", typed, screen), *waits, step("Wait for it.", "", "PASSED")))
    assert text.count("x = load(p)") == 1
    assert "> done" in text.replace(">\ndone", "> done")
    assert text.count("Waiting for the verdict ...") == 1
    assert "[3 steps left out]\n[step 6] Wait for it.\n> PASSED" in text


@pytest.mark.parametrize("budget", [1_000, 4_000, 24_000, 100_000])
def test_a_long_attempt_keeps_within_its_budget(budget: int) -> None:
    text = condensed(LONG, budget)
    assert tokens(text) <= budget
    assert tokens(text) > 0.5 * budget
    assert text.startswith("## The attempt")


def test_real_tokenizers_count_no_more_than_the_budget() -> None:
    from metakernelbench.annotation.annotator import library

    text = condensed(LONG, 8_000)
    assert library().token_counter(model="gpt-4o", text=text) <= 8_000


def test_steps_that_submit_outlast_the_others_and_what_is_left_out_is_counted() -> None:
    text = condensed(LONG, 4_000)
    left = {int(number) for number in re.findall(r"\[step (\d+)\]", text)}
    assert {n for n in left if n % 10 == 0} == {10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120} & left
    assert len([n for n in left if n % 10 == 0]) >= 6
    gone = sum(int(number) for number in re.findall(r"\[(\d+) steps left out\]", text))
    assert gone + len(left) == 120


def test_a_shortened_text_has_its_beginning_and_its_end() -> None:
    text = condensed(LONG, 24_000)
    assert re.search(r"output 10\n0\.123.*characters left out\].*0\.789", text, re.DOTALL)


def test_neither_model_nor_arm_nor_note_nor_instruction_is_shown() -> None:
    text = condensed(attempt(step("work", "ls", "")))
    for word in ("secret-model", "conditioned", "solo", "Attached notes", NOTE.splitlines()[2], "Write a kernel."):
        assert word not in text


def test_control_characters_and_odd_trajectories_do_no_harm() -> None:
    record = attempt(
        step("\x1b[31mred\u202e", "ls\x07", "\x1b[2J"),
        trajectory={
            "steps": [
                "not a step",
                {"source": "agent"},
                {"source": "agent", "message": [{"type": "text", "text": "in parts"}], "tool_calls": None},
                {"source": "agent", "message": "copied", "is_copied_context": True},
                {"source": "agent", "message": "m", "tool_calls": [{"function_name": "done", "arguments": {"a": 1}}]},
                {"source": "agent", "message": "n", "observation": {"results": [{"content": None}]}},
            ]
        },
    )
    text = condensed(record)
    assert "in parts" in text
    assert "$ done a=1" in text
    assert "copied" not in text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", text)


def test_an_attempt_without_anything_still_says_how_it_ended() -> None:
    text = condensed(attempt(trajectory=None, kernel=None, final=None, submissions=(), ended="budget"))
    assert text == (
        "## The attempt\nIt ended because the clock ran out, after 0 counted submissions.\n"
        "Final grading: there was no kernel.py to grade."
    )


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=300), st.text(max_size=900), st.text(max_size=900)), max_size=12))
def test_any_trajectory_fits(steps: list[tuple[str, str, str]]) -> None:
    assert tokens(condensed(attempt(*(step(*one) for one in steps)), 600)) <= 600
