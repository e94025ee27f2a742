"""What an instruction shows of an earlier attempt: its skill as it is, or its implementation, or its trajectory.

A trajectory is far longer than an instruction may be. What is shown of it are the agent's remarks, what it typed, and
what came back, in order; long pieces are cut in their middle, and if the whole is still too long, steps are left out
from its middle. What is left out is said in its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from metakernelbench.experiments.planned import Material

MAX_TRAJECTORY = 60_000
"""Characters of a trajectory as shown: some 15,000 tokens, several times what a long skill or kernel takes."""
_EMPTY_LINES = re.compile(r"\n(?:[ \t]*\n){2,}")
"""A terminal's screen is mostly empty."""
_MAX_PIECE = 2_000
"""Characters of one remark, one input or one output."""


def presented(material: Material, text: str) -> str:
    """What is attached to an instruction of a skill, a kernel.py or the JSON of a trajectory."""
    match material:
        case "skill":
            return text
        case "implementation":
            return _fenced(text, "python")
        case "trajectory":
            return _trajectory(json.loads(text))


def _fenced(text: str, language: str = "") -> str:
    longest = max((len(run) for run in text.split("\n") if run and set(run) == {"`"}), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip('\n')}\n{fence}"


def _trajectory(trajectory: dict[str, Any]) -> str:
    steps = [_step(number, step) for number, step in enumerate(_agents(trajectory), start=1)]
    kept, left_out = list(steps), 0
    while sum(map(len, kept)) > MAX_TRAJECTORY and len(kept) > 1:
        kept.pop(len(kept) // 2)
        left_out += 1
    if left_out:
        kept.insert((len(kept) + 1) // 2, f"[{left_out} steps are left out here]")
    return "\n\n".join(kept)


def _agents(trajectory: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (step for step in trajectory.get("steps", []) if step.get("source") == "agent")


def _step(number: int, step: dict[str, Any]) -> str:
    pieces = [f"Step {number}", _cut(_plain(step.get("message")))]
    for call in step.get("tool_calls") or ():
        arguments = call.get("arguments") or {}
        typed = arguments.get("keystrokes")
        pieces.append(_fenced(_cut(typed if isinstance(typed, str) else _call(call, arguments))))
    results = (step.get("observation") or {}).get("results") or ()
    pieces += [_fenced(_cut(_plain(result.get("content")).strip())) for result in results]
    return "\n\n".join(piece for piece in pieces if piece.strip("`\n "))


def _call(call: dict[str, Any], arguments: dict[str, Any]) -> str:
    shown = json.dumps(arguments, ensure_ascii=False) if arguments else ""
    return f"{call.get('function_name', '')} {shown}".strip()


def _plain(content: Any) -> str:
    """The text of a message, which is a string or a list of parts."""
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, dict) and part.get("text"))
    return _EMPTY_LINES.sub("\n\n", content) if isinstance(content, str) else ""


def _cut(text: str) -> str:
    if len(text) <= _MAX_PIECE:
        return text
    half = _MAX_PIECE // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters are left out here]\n{text[-half:]}"
