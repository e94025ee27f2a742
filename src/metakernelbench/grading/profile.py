"""Where the time of a grading went, and what each timed draw looked like: what `mkb grade --profile` shows.

Standard library only. Nothing here is part of a verdict.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

STARTS = ("verifier process", "imports", "workers", "GPU contexts", "kernel.py")
"""Process starts and imports. `imports` are the verifier's; `workers` end when their DSL is imported as well."""
MANDATED = ("inputs", "references", "anchors", "eager calls", "implementation")
"""What the contract asks for, whoever grades. `implementation` is what the calls of kernel.py themselves took."""
DEPENDENCE = "dependence"
WAITING = "waiting for the device"


class Stopwatch:
    """Adds up seconds by what was being done. Spans may lie in each other; each counts what its inner ones do not."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = time.monotonic()
        self.finish: Callable[[], None] = lambda: None
        """Waits for what a device still does, so that it counts where it was asked for."""

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Count the time of the block under `name`; under `dependence`, once that is open, whatever the name."""
        self._turn()
        self._open.append(DEPENDENCE if DEPENDENCE in self._open and name not in STARTS else name)
        try:
            yield
        finally:
            self.finish()
            self._turn()
            self._open.pop()

    def move(self, seconds: float, name: str) -> None:
        """Count so much of the span that is open under another name."""
        if self._open and self._open[-1] != DEPENDENCE:
            self.add(seconds, name)
            self.add(-seconds, self._open[-1])

    def add(self, seconds: float, name: str) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def _turn(self) -> None:
        now = time.monotonic()
        if self._open:
            self.add(now - self._since, self._open[-1])
        self._since = now


@dataclass(frozen=True, kw_only=True)
class TracedDraw:
    """One draw of the timing stage. Lists have a member for each side, in the order of the entrants."""

    number: int
    """Negative for warm-up."""
    order: tuple[str, ...]
    """What was called, one after the other: `eager`, `worker 0`, `control 0`, ..."""
    eager_ms: float
    claimed_ms: tuple[float | None, ...]
    """What the workers' clocks say; None for a side that is out."""
    window_ms: tuple[float | None, ...]
    """The verifier's clock around the same calls."""
    carrying_ms: tuple[float | None, ...]
    """The control's call of the same draw, less what it claims."""
    buffers: tuple[int | None, ...]
    """Which of the verifier's buffers carried the worker's call."""
    waited_ms: tuple[float, ...]
    """How long each call in `order` waited for a processor; controls are not asked."""
    turns: tuple[int, ...]
    """How often the small work was done before each call; 0 for controls."""
    cores: dict[str, float]
    """The pace of the cores that were tried last, by number; empty where none were."""
    repeated: bool
    """Whether the draw was disturbed and does not count."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One session of a verifier."""

    seconds: dict[str, float]
    """By what was done (`STARTS`, `MANDATED` and what verification adds)."""
    all_s: float = 0.0
    """From the asking to the answer."""
    draws: tuple[TracedDraw, ...] = field(default=())

    def part(self, names: Sequence[str]) -> float:
        """Seconds that these together took."""
        return sum(self.seconds.get(name, 0.0) for name in names)

    @property
    def added(self) -> dict[str, float]:
        """What verification adds to starts and mandated work, by name; `other` is what nothing was noted for."""
        known = {n: s for n, s in self.seconds.items() if n not in (*STARTS, *MANDATED, WAITING)}
        return {**known, "other": self.all_s - sum(self.seconds.values())}

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Profile:
        draws: list[dict[str, Any]] = [
            {k: tuple(v) if isinstance(v, list) else v for k, v in draw.items()} for draw in data["draws"]
        ]
        return Profile(seconds=data["seconds"], all_s=data["all_s"], draws=tuple(TracedDraw(**draw) for draw in draws))
