"""What an agent did, condensed: one entry a turn, with what it said, what it typed and what it saw, each cut to size.

A trajectory is the agent's own file (ATIF), so nothing in it is taken for granted: what has another form is passed
over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Room:
    """How many characters of each kind a turn may take. Nothing is left of a kind with no room."""

    said: int
    typed: int
    seen: int
    headline: int = 140


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of the agent, or several in which it only waited."""

    number: str
    """`7`, or `7–11`."""
    at_s: float | None
    """Seconds since the trajectory began."""
    headline: str
    """The first thing that it said or typed, on one line."""
    said: str
    typed: str
    seen: str


_PASSING = 140
"""A turn that types nothing and says no more than this only gives the terminal time."""


def turns(trajectory: dict[str, Any] | None, room: Room) -> tuple[Turn, ...]:
    """The turns of the agent, oldest first."""
    found: list[Turn] = []
    began: float | None = None
    waits: list[tuple[int, float | None, str]] = []
    for number, step in enumerate(_agent_steps(trajectory), start=1):
        time = _time(step)
        began = time if began is None else began
        at = None if time is None or began is None else time - began
        said, typed, seen = _said(step), _typed(step), _seen(step)
        if _calls(step) and not typed.strip() and len(said) <= _PASSING:  # it only gives the terminal time
            waits.append((number, at, seen))
            continue
        found += _waited(waits, room)
        waits = []
        found.append(
            Turn(
                number=str(number),
                at_s=at,
                headline=_headline(said, typed, room.headline),
                said=_cut(said, room.said),
                typed=_cut(typed, room.typed),
                seen=_cut(seen, room.seen),
            )
        )
    return (*found, *_waited(waits, room))


def count_turns(trajectory: dict[str, Any] | None) -> int:
    """How many turns the agent has had."""
    return sum(1 for _ in _agent_steps(trajectory))


def _agent_steps(trajectory: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    steps = trajectory.get("steps") if isinstance(trajectory, dict) else None
    for step in steps if isinstance(steps, list) else []:
        if isinstance(step, dict) and step.get("source") == "agent" and not step.get("is_copied_context"):
            yield step


def _waited(waits: list[tuple[int, float | None, str]], room: Room) -> list[Turn]:
    """Turns in which nothing was typed, as one."""
    if not waits:
        return []
    (first, at, _), (last, _, seen) = waits[0], waits[-1]
    number = str(first) if first == last else f"{first}–{last}"
    return [Turn(number=number, at_s=at, headline="waited", said="", typed="", seen=_cut(seen, room.seen))]


def _time(step: dict[str, Any]) -> float | None:
    try:
        return datetime.fromisoformat(str(step.get("timestamp"))).timestamp()
    except (ValueError, OverflowError):
        return None


def _text(content: Any) -> str:
    """A text, or the text parts of a message with several parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict) and "text" in part)
    return ""


def _calls(step: dict[str, Any]) -> list[dict[str, Any]]:
    calls = step.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def _said(step: dict[str, Any]) -> str:
    thought, message = _text(step.get("reasoning_content")), _text(step.get("message"))
    return "\n\n".join(part for part in (thought.strip(), message.strip()) if part)


def _typed(step: dict[str, Any]) -> str:
    """Keystrokes of a terminal agent; of any other, the name of each tool and what it was given."""
    lines = []
    for call in _calls(step):
        arguments = call.get("arguments")
        if isinstance(arguments, dict) and isinstance(arguments.get("keystrokes"), str):
            lines.append(arguments["keystrokes"])
        else:
            lines.append(f"{call.get('function_name', '')} {arguments or ''}".rstrip() + "\n")
    return "".join(lines)


def _seen(step: dict[str, Any]) -> str:
    observation = step.get("observation")
    results = observation.get("results") if isinstance(observation, dict) else None
    texts = [_text(r.get("content")) for r in results if isinstance(r, dict)] if isinstance(results, list) else []
    return "\n".join(texts).removeprefix("New Terminal Output:").strip("\n")


def _headline(said: str, typed: str, room: int) -> str:
    line = next((line.strip() for line in (said or typed).splitlines() if line.strip()), "")
    line = line.removeprefix("Analysis:").strip()
    return line if len(line) <= room else line[: room - 1].rstrip() + "…"


def _cut(text: str, room: int) -> str:
    """A text without its middle where it is too long: what was begun and how it ended are worth most."""
    if len(text) <= room:
        return text
    if room == 0:
        return ""
    head, tail = room * 2 // 3, room // 3
    return f"{text[:head]}\n… {len(text) - head - tail:,} characters left out …\n{text[-tail:]}"
