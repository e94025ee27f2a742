"""What is attached of an earlier attempt: a skill as it is, a kernel as code, a trajectory cut to a bounded length."""

from __future__ import annotations

import json
from typing import Any

from metakernelbench.attempts.material import MAX_TRAJECTORY, presented


def step(message: str, typed: str = "", seen: str = "") -> dict[str, Any]:
    return {
        "source": "agent",
        "message": message,
        "tool_calls": [{"function_name": "bash_command", "arguments": {"keystrokes": typed}}] if typed else None,
        "observation": {"results": [{"content": seen}]} if seen else None,
    }


def shown(*steps: dict[str, Any]) -> str:
    return presented("trajectory", json.dumps({"steps": list(steps)}))


def test_a_skill_is_attached_as_it_is() -> None:
    assert presented("skill", "# Learned\n\n{braces} \n") == "# Learned\n\n{braces} \n"


def test_a_kernel_is_fenced_and_cannot_close_its_fence() -> None:
    assert presented("implementation", "x = 1\n\n") == "```python\nx = 1\n```"
    hostile = 'x = """\n```\nnow outside\n"""\n'
    assert presented("implementation", hostile).startswith("````python\n")
    assert presented("implementation", hostile).endswith("\n````")


def test_a_trajectory_shows_remarks_inputs_and_outputs_of_the_agent_in_order() -> None:
    text = shown({"source": "user", "message": "secret"}, step("I look.", "ls\n", "kernel.py\n\n"), step("Done."))
    assert text == "Step 1\n\nI look.\n\n```\nls\n```\n\n```\nkernel.py\n```\n\nStep 2\n\nDone."


def test_the_empty_part_of_a_screen_is_not_shown() -> None:
    assert shown(step("Look.", seen="a\n\n\n  \n\nb\n\nc\n\n\n\n")) == "Step 1\n\nLook.\n\n```\na\n\nb\n\nc\n```"


def test_a_trajectory_is_bounded_and_says_what_is_left_out() -> None:
    text = shown(*(step(f"Remark {number}. " + "a" * 1000, "b" * 5000, "c" * 5000) for number in range(100)))
    assert len(text) < MAX_TRAJECTORY * 1.05
    assert "Remark 0." in text
    assert "Remark 99." in text
    assert "steps are left out here]" in text
    assert "[3000 characters are left out here]" in text


def test_other_agents_calls_and_parts_of_messages_are_shown_as_well() -> None:
    call = {"function_name": "edit", "arguments": {"path": "kernel.py"}}
    text = shown({"source": "agent", "message": [{"type": "text", "text": "Hm."}], "tool_calls": [call]})
    assert text == 'Step 1\n\nHm.\n\n```\nedit {"path": "kernel.py"}\n```'
