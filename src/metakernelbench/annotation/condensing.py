"""A whole attempt as one text that fits a token budget: what the agent said, typed and saw, what it submitted and what
it was told. Condensed by rule, never by a model, so that everything that an annotator quotes really stood there.

Where the budget does not suffice, outputs are shortened first, then long commands (mostly files being written), then
remarks, then steps in the middle go, those that submit something last. What is left out is counted in its place.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from metakernelbench.attempts.record import AttemptRecord, Submission
from metakernelbench.grading.report import headline
from metakernelbench.grading.verdict import Verdict
from metakernelbench.text import harmless

BUDGET = 24_000
"""Tokens of a condensed attempt."""
VERSION = 1
"""Raised whenever the same record comes out as another text."""
_PIECE = re.compile(r"[A-Z]?[a-z]{1,4}|[A-Z]{1,2}|\d{1,3}|[^\sa-zA-Z0-9]|\s{2,}|\n| (?=\d)")
"""Rather smaller than a token of the usual tokenizers: words fall into pieces of five letters, signs stand alone."""
_PROMPT = re.compile(r"^(?:>|[^$#]{0,60}[$#])\s?")
_SCREEN = "New Terminal Output:"
"""What Terminus writes above every screen."""
_MOST_BYTES_PER_TOKEN = 8
"""Of any text that is read here; longer ones need no counting to be too long."""
_KERNEL_SHARE, _SUBMISSIONS_SHARE = 0.35, 0.25
"""What the final kernel and the answers to submissions may take of the budget; the steps have the rest."""


@dataclass(frozen=True)
class _Lengths:
    """Characters that each kind of text may have."""

    remark: int
    command: int
    output: int


_LEVELS = (
    _Lengths(4000, 8000, 4000), _Lengths(2000, 4000, 1200), _Lengths(1200, 1500, 600), _Lengths(700, 600, 300),
    _Lengths(400, 300, 160), _Lengths(200, 160, 80),
)  # fmt: skip


def tokens(text: str) -> int:
    """Tokens of a text, rather too many than too few: prose and code come out a third above what GPT-4's tokenizer
    counts, listings of numbers equal to it. No tokenizer is needed, whose tables would have to be fetched."""
    return len(_PIECE.findall(text)) + sum(not character.isascii() for character in text)


def _fits(text: str, budget: int) -> bool:
    size = len(text)
    return size <= budget // 3 or (size <= budget * _MOST_BYTES_PER_TOKEN and tokens(text) <= budget)


def condensed(record: AttemptRecord, budget: int = BUDGET) -> str:
    """The attempt's course within `budget` tokens. Neither its arm nor its model nor any other attempt is named, and
    the skill that was attached to it is left out: that is another part of what an annotator sees."""
    head = _head(record)
    kernel = _within("Final kernel.py", harmless(record.kernel or ""), int(budget * _KERNEL_SHARE))
    answers = _submissions(record.submissions, int(budget * _SUBMISSIONS_SHARE))
    used = sum(map(tokens, (head, kernel, answers))) + 16
    steps = _steps(_turns(record.trajectory), budget - used)
    return "\n\n".join(filter(None, (head, steps, answers, kernel)))


def source_of(record: AttemptRecord) -> str:
    """Everything that `condensed` reads, as one text: equal sources come out equal, at a fraction of the work."""
    shown = [(s.number, round(s.requested_at_s), s.answer) for s in record.submissions]
    parts = (VERSION, record.ended, shown, record.kernel, _verdict(record.final), record.trajectory)
    return json.dumps(parts, sort_keys=True)


def _head(record: AttemptRecord) -> str:
    counted = sum(submission.number is not None for submission in record.submissions)
    endings = {
        "completed": "the agent said that it was done",
        "budget": "the clock ran out",
        "agent_exit": "the agent left the terminal",
        "agent_error": "the agent failed for a reason of its own",
    }
    lines = [
        "## The attempt",
        f"It ended because {endings.get(record.ended, record.ended)}, after {counted} counted submissions.",
        f"Final grading: {_verdict(record.final)}",
    ]
    return "\n".join(lines)


def _verdict(verdict: Verdict | None) -> str:
    if verdict is None:
        return "there was no kernel.py to grade."
    findings = "".join(f"\n  [{finding.code}] {harmless(finding.message)[:400]}" for finding in verdict.findings[:3])
    return headline(verdict) + findings


def _submissions(submissions: tuple[Submission, ...], budget: int) -> str:
    if not submissions:
        return ""
    for length in (1500, 800, 400, 200, 100):
        lines = ["## Submissions and their answers"]
        for submission in submissions:
            number = f"submission {submission.number}" if submission.number is not None else "not counted"
            lines.append(f"[{number}, at {submission.requested_at_s:.0f} s]")
            lines.append(_shortened(harmless(submission.answer.strip()) or "no answer before the end", length))
        text = "\n".join(lines)
        if _fits(text, budget):
            return text
    return _cut(text, budget)


def _within(title: str, text: str, budget: int) -> str:
    if not text.strip():
        return ""
    return _cut(f"## {title}\n{text}", budget)


def _cut(text: str, budget: int) -> str:
    """The text within a budget: its beginning and its end."""
    length = len(text)
    while not _fits(text_cut := _shortened(text, length), budget) and length > 40:
        length = int(length * 0.8)
    return text_cut


@dataclass(frozen=True)
class _Turn:
    """One step of the agent."""

    number: int
    remark: str
    commands: tuple[str, ...]
    output: str

    @property
    def submits(self) -> bool:
        return any("task submit" in command for command in self.commands)

    def repeats(self, before: _Turn) -> bool:
        """Whether it does no more than look again, in the same words, at what has not changed."""
        return not self.commands and (self.remark, self.output) == (before.remark, before.output)

    def text(self, lengths: _Lengths) -> str:
        lines = [f"[step {self.number}] {_shortened(self.remark, lengths.remark)}".rstrip()]
        lines += [f"$ {_shortened(command, lengths.command)}" for command in self.commands]
        if self.output:
            lines.append(f"> {_shortened(self.output, lengths.output)}")
        return "\n".join(lines)


def _steps(turns: list[_Turn], budget: int) -> str:
    if not turns:
        return ""
    for lengths in _LEVELS:
        text = _joined(turns, lengths, frozenset())
        if _fits(text, budget):
            return text
    return _thinned(turns, budget)


def _thinned(turns: list[_Turn], budget: int) -> str:
    """Without the steps that matter least: from the middle outwards, those that submit last."""
    middle = len(turns) / 2
    order = sorted(range(len(turns)), key=lambda index: (turns[index].submits, abs(index - middle)))
    gone: set[int] = set()
    excess = tokens(_joined(turns, _LEVELS[-1], frozenset())) - budget
    for index in order:
        if excess <= 0 and _fits(_joined(turns, _LEVELS[-1], frozenset(gone)), budget):
            break
        gone.add(index)
        excess -= tokens(turns[index].text(_LEVELS[-1]))
    return _cut(_joined(turns, _LEVELS[-1], frozenset(gone)), budget)


def _joined(turns: list[_Turn], lengths: _Lengths, gone: frozenset[int]) -> str:
    lines, missing = ["## Steps of the agent (its remarks, what it typed after $, what it saw after >)"], 0
    for index, turn in enumerate(turns):
        if index in gone or (index > 0 and turn.repeats(turns[index - 1])):
            missing += 1
            continue
        if missing:
            lines.append(f"[{missing} steps left out]")
            missing = 0
        lines.append(turn.text(lengths))
    if missing:
        lines.append(f"[{missing} steps left out]")
    return "\n".join(lines)


def _shortened(text: str, length: int) -> str:
    """Beginning and end of a text, with the number of characters between them."""
    if len(text) <= length:
        return text
    half = max(length // 2 - 20, 10)
    return f"{text[:half]} [{len(text) - 2 * half} characters left out] {text[-half:]}"


def _turns(trajectory: dict[str, Any] | None) -> list[_Turn]:
    """The agent's steps, from a trajectory in Harbor's format (ATIF). What cannot be read is passed over."""
    steps = (trajectory or {}).get("steps") or []
    found: list[_Turn] = []
    for step in steps:
        if not isinstance(step, dict) or step.get("source") != "agent" or step.get("is_copied_context"):
            continue
        calls = step.get("tool_calls") or []
        results = (step.get("observation") or {}).get("results") or []
        commands = tuple(filter(None, (harmless(_command(call)).strip() for call in calls)))
        output = harmless("\n".join(_plain(result.get("content")) for result in results))
        found.append(
            _Turn(
                number=len(found) + 1,
                remark=harmless(_plain(step.get("message"))).strip(),
                commands=commands,
                output=_without_echo(output, commands),
            )
        )
    return found


def _without_echo(output: str, commands: tuple[str, ...]) -> str:
    """What a terminal shows, less what was typed into it: that stands with the command already."""
    typed = {line.strip() for command in commands for line in command.splitlines()} - {""}
    kept = [line for line in output.splitlines() if not _is_echo(line.strip(), typed)]
    return "\n".join(kept).strip()


def _is_echo(line: str, typed: set[str]) -> bool:
    after_prompt = _PROMPT.sub("", line).strip()
    return line == _SCREEN or (bool(after_prompt) and after_prompt in typed)


def _command(call: dict[str, Any]) -> str:
    arguments = call.get("arguments") or {}
    for name in ("keystrokes", "command", "cmd"):
        if isinstance(arguments.get(name), str):
            return str(arguments[name])
    values = ", ".join(f"{name}={value}" for name, value in arguments.items())
    return f"{call.get('function_name', '')} {values}".strip()


def _plain(content: Any) -> str:
    """Text of a message, which may be a list of parts."""
    match content:
        case str():
            return content
        case list():
            return "\n".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return ""
