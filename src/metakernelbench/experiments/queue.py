"""Which attempt may start next, and which models are to be left alone for a while."""

from __future__ import annotations

import heapq
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 30.0, 600.0


@dataclass
class Pauses:
    """Models whose provider has asked for fewer requests. Each time in a row it is left alone for twice as long."""

    clock: Callable[[], float] = time.monotonic
    _until: dict[str, float] = field(default_factory=dict[str, float])
    _length: dict[str, float] = field(default_factory=dict[str, float])

    def begin(self, model: str) -> None:
        """The provider has refused. Attempts that were running at once are refused at once: that is one refusal."""
        if self.left(model):
            return
        length = min(2 * self._length.get(model, _FIRST_PAUSE_S / 2), _LONGEST_PAUSE_S)
        self._length[model] = length
        self._until[model] = self.clock() + length * random.uniform(1.0, 1.5)

    def end(self, model: str) -> None:
        """The provider has served a whole attempt."""
        self._length.pop(model, None)
        self._until.pop(model, None)

    def left(self, model: str) -> float:
        """Seconds until the model may be asked again; 0 where it may."""
        return max(0.0, self._until.get(model, 0.0) - self.clock())


class Queue:
    """Attempts that can start, by their place in the plan: the first goes first, but no more at once with one model
    than `most`, and none with a model that is to be left alone."""

    def __init__(self, models: Sequence[str], most: int | None, pauses: Pauses) -> None:
        self._models, self._most, self._pauses = models, most, pauses
        self._ready: dict[str, list[int]] = {model: [] for model in models}
        self._taken = Counter[str]()

    def __bool__(self) -> bool:
        return any(self._ready.values())

    def add(self, place: int) -> None:
        """This attempt can start."""
        heapq.heappush(self._ready[self._models[place]], place)

    def take(self) -> int | None:
        """The place of the next attempt to start; None where none may."""
        firsts = [ready[0] for model, ready in self._ready.items() if ready and self._may_start(model)]
        if not firsts:
            return None
        model = self._models[min(firsts)]
        self._taken[model] += 1
        return heapq.heappop(self._ready[model])

    def first(self, number: int) -> list[int]:
        """The places that come first, whether they may start or not."""
        return heapq.nsmallest(number, (place for ready in self._ready.values() for place in ready))

    def remove(self, places: Collection[int]) -> None:
        """These attempts cannot start any more."""
        for ready in self._ready.values():
            ready[:] = [place for place in ready if place not in places]
            heapq.heapify(ready)

    def give_back(self, place: int) -> None:
        """An attempt that was taken runs no longer."""
        self._taken[self._models[place]] -= 1

    @property
    def pause(self) -> float | None:
        """Seconds until an attempt may start, 0 where one may now; None where one has to end first or none is there."""
        left = (self._pauses.left(model) for model, ready in self._ready.items() if ready and self._has_room(model))
        return min(left, default=None)

    def _may_start(self, model: str) -> bool:
        return self._has_room(model) and not self._pauses.left(model)

    def _has_room(self, model: str) -> bool:
        return self._most is None or self._taken[model] < self._most
