"""A judge that asks another one again when that failed for a reason of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from metakernelbench.errors import InfrastructureFault, UserError
from metakernelbench.grading.head_to_head import HeadToHead
from metakernelbench.grading.verdict import Verdict
from metakernelbench.judging.judge import GradingRequest, Judge

TRIES = 3
_PAUSE_S = 1.0


class Steadfast:
    """Up to three tries for what is asked for during an attempt, with growing pauses.

    A final grading is asked for once: who asks for it has tries of its own, and records them.
    """

    def __init__(self, judge: Judge, *, pause_s: float = _PAUSE_S) -> None:
        self.judge = judge
        self._pause_s = pause_s

    @property
    def at_once(self) -> int | None:
        """How many gradings the judge does at once; None where it does not say."""
        found: int | None = getattr(self.judge, "at_once", None)
        return found

    async def ready(self) -> None:
        """Let the judge find out whether it can grade at all, if it has a way to. Raises `UserError`."""
        if (check := getattr(self.judge, "ready", None)) is not None:
            await check()

    async def look(self) -> None:
        """As `ready`, as far as that starts nothing and costs nothing. Raises `UserError`."""
        if (check := getattr(self.judge, "look", None)) is not None:
            await check()

    async def verdict(self, request: GradingRequest) -> Verdict:
        """As the judge says. Raises `InfrastructureFault` when the last try failed too."""
        if request.final:
            return await self.judge.verdict(request)
        return await self._tried(partial(self.judge.verdict, request))

    async def head_to_head(self, requests: Sequence[GradingRequest]) -> HeadToHead:
        """As the judge says. Raises `UserError` for a judge that cannot."""
        measure = getattr(self.judge, "head_to_head", None)
        if measure is None:
            raise UserError(f"the judge {type(self.judge).__name__} cannot time implementations head to head")
        return await self._tried(partial(measure, requests))

    async def close(self) -> None:
        """Close the judge."""
        await self.judge.close()

    async def _tried[T](self, ask: Callable[[], Awaitable[T]]) -> T:
        for number in range(1, TRIES):
            try:
                return await ask()
            except InfrastructureFault:
                await asyncio.sleep(self._pause_s * 2**number * random.uniform(0.5, 1.5))
        return await ask()
