"""Texts of simulated attempts, of the size and the grain of real ones: kernels that grow, skills, trajectories.

Nothing in them means anything. They exist so that a report and a store can be tried at their full size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_WORDS = np.array([
    "tile", "warp", "stage", "shared", "load", "store", "product", "lane", "row", "column", "accumulator",
    "scale", "mask", "block", "step", "page", "head", "group", "expert", "token", "chunk", "state", "gate",
    "norm", "barrier", "pipeline", "layout", "stride", "vector", "register", "epilogue", "prologue", "swizzle",
    "occupancy", "latency", "bandwidth", "fragment", "descriptor", "iterator",
])  # fmt: skip
_OPERATORS = np.array(["+", "-", "*", "//", "%", "&"])
_LINES = 220
"""Lines of a final kernel."""
_CHANGED = 25
"""Lines in which a submission differs from the next one."""
_TURN_LINES = 24
"""Lines of terminal output that a turn shows."""


def kernel_versions(rng: np.random.Generator, count: int) -> list[str]:
    """`count` versions of one kernel, oldest first: each has some lines of the next one changed, and lacks a few."""
    lines = _code_lines(rng, _LINES)
    versions = [lines]
    for _ in range(count - 1):
        older = list(versions[0])
        for at, new in zip(rng.integers(len(older), size=_CHANGED), _code_lines(rng, _CHANGED), strict=True):
            older[at] = new
        del older[-int(rng.integers(1, 15)) :]
        versions.insert(0, older)
    return [_kernel(version) for version in versions]


def _kernel(lines: Sequence[str]) -> str:
    body = [f"\n\ndef part_{n}(x, y):\n" + "\n".join(lines[n : n + 20]) for n in range(0, len(lines), 20)]
    calls = "\n".join(f"    x = part_{n}(x, out)" for n in range(0, len(lines), 20))
    return f"import torch{''.join(body)}\n\n\ndef solve(x):\n    out = torch.empty_like(x)\n{calls}\n    return out\n"


def _code_lines(rng: np.random.Generator, count: int) -> list[str]:
    words, operators = rng.choice(_WORDS, (count, 3)), rng.choice(_OPERATORS, count)
    numbers = rng.integers(4096, size=(count, 2))
    rows = zip(words, operators, numbers, strict=True)
    return [f"    {a}_{b} = {b}[{i} + {c}] {sign} {c}_{a}  # {j}" for (a, b, c), sign, (i, j) in rows]


def skill(rng: np.random.Generator, *, statements: int) -> str:
    """A SKILL.md with so many statements under two headings."""
    words, sizes = rng.choice(_WORDS, (statements, 28)), rng.integers(10, 28, size=statements)
    said = [
        f"- **{row[0].capitalize()} {row[1]}**: {' '.join(row[2:size])}."
        for row, size in zip(words, sizes, strict=True)
    ]
    half = len(said) // 2
    return "\n".join(
        ["# What was learned", "", "## What worked", *said[:half], "", "## What did not", *said[half:], ""]
    )


def instruction(problem: str, dsl: str, *, rules: int, source_skill: str | None) -> str:
    """The instruction as sent, a source's skill under its header at the end."""
    body = "\n".join(f"{n}. Rule {n} of the simulated contract for {problem} holds in {dsl}." for n in range(rules))
    attached = f"\n# Material from an earlier attempt\n\n{source_skill}" if source_skill else ""
    return f"# Simulated instruction: {problem} in {dsl}\n\n{body}\n{attached}"


def trajectory(
    rng: np.random.Generator, *, model: str, sent: str, kernels: Sequence[str], turns: int
) -> dict[str, Any]:
    """An ATIF trajectory of `turns` turns that writes every one of `kernels` in its course."""
    writes = dict(zip(np.linspace(1, turns - 1, len(kernels), dtype=int).tolist(), kernels, strict=True))
    steps: list[dict[str, Any]] = [{"step_id": 1, "source": "user", "message": sent}]
    steps += [_turn(rng, turn, model, writes.get(turn)) for turn in range(turns)]
    agent = {"name": "simulated", "version": "1", "model_name": model}
    return {"schema_version": "ATIF-v1.6", "session_id": f"simulated-{rng.integers(1 << 40)}", "agent": agent,
            "steps": steps}  # fmt: skip


def _turn(rng: np.random.Generator, turn: int, model: str, kernel: str | None) -> dict[str, Any]:
    thought = " ".join(rng.choice(_WORDS, 60))
    typed = f"cat > kernel.py <<'EOF'\n{kernel}EOF\nsubmit\n" if kernel else f"python check.py --step {turn}\n"
    shown = "\n".join(_code_lines(rng, _TURN_LINES))
    return {
        "step_id": turn + 2,
        "source": "agent",
        "model_name": model,
        "message": f"Analysis: {thought[:200]}\nPlan: {thought[200:]}",
        "tool_calls": [
            {
                "tool_call_id": f"call-{turn}",
                "function_name": "bash_command",
                "arguments": {"keystrokes": typed, "duration": 5.0},
            }
        ],
        "observation": {"results": [{"source_call_id": f"call-{turn}", "content": shown}]},
        "metrics": {
            "prompt_tokens": int(rng.integers(8_000, 60_000)),
            "completion_tokens": int(rng.integers(200, 4_000)),
        },
    }
