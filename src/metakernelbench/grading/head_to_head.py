"""Head to head: several implementations of one problem, timed interleaved in one session, and what each pair's runtimes
are to each other.

Two gradings made one after the other differ by more than their implementations: clocks, caches and the host drift. In
a head to head every timed draw is run by all implementations one right after the other, in an order that nobody can
foresee, so a drift meets them alike and the ratio of two runtimes is measured rather than divided.

Standard library only, like the verdict: whoever reads a result needs no torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import SystemRandom
from typing import Any

from metakernelbench.grading.verdict import Verdict

HEAD_TO_HEAD_VERSION = 1


@dataclass(frozen=True)
class Entrant:
    """One implementation of a head to head."""

    dsl: str
    kernel: bytes | None
    """The bytes of kernel.py; None stands for a missing one."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two implementations that were timed on the same draws."""

    first: int
    """The place of an implementation among the entrants, from 0."""
    second: int
    """The place of another; larger than `first`."""
    ratio: float
    """Runtime of the first over runtime of the second: above 1 where the second is the faster one."""
    low: float
    """Lower end of the 95 % interval of the ratio."""
    high: float
    """Upper end."""

    @property
    def swapped(self) -> Pair:
        """The same measurement, seen from the other side."""
        return Pair(first=self.second, second=self.first, ratio=1 / self.ratio, low=1 / self.high, high=1 / self.low)


@dataclass(frozen=True, kw_only=True)
class HeadToHead:
    """What a head to head says. Its verdicts are as good as any other: each implementation went through all stages,
    and its speedup is over the eager calls of the same session."""

    verdicts: tuple[Verdict, ...]
    """One for each entrant, in their order."""
    pairs: tuple[Pair, ...]
    """Of every two entrants that were timed to the end: those that passed, and in a final head to head also those whose
    only fault is a broken rule."""
    version: int = HEAD_TO_HEAD_VERSION

    @property
    def passed(self) -> bool:
        """Whether all entrants passed."""
        return all(verdict.passed for verdict in self.verdicts)

    def pair(self, first: int, second: int) -> Pair | None:
        """The pair of these two places, in this order; None where one of them was not timed to the end."""
        for found in self.pairs:
            if (found.first, found.second) == (first, second):
                return found
            if (found.first, found.second) == (second, first):
                return found.swapped
        return None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), allow_nan=False)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> HeadToHead:
        """The inverse of `dataclasses.asdict`. Raises `ValueError` for what a newer version wrote."""
        if data.get("version", 0) > HEAD_TO_HEAD_VERSION:
            raise ValueError(
                f"head-to-head version {data['version']} is newer than this program's {HEAD_TO_HEAD_VERSION}"
            )
        return HeadToHead(
            verdicts=tuple(map(Verdict.from_dict, data["verdicts"])),
            pairs=tuple(Pair(**pair) for pair in data["pairs"]),
            version=data["version"],
        )

    @staticmethod
    def from_json(text: str) -> HeadToHead:
        return HeadToHead.from_dict(json.loads(text))


def orders[T](members: Sequence[T]) -> Iterator[list[T]]:
    """The order of the members in one draw after the other, without end.

    In every as many draws as there are members, each member has each place once; which order comes when is drawn from
    the system's randomness, so that no member can know whom it follows.
    """
    chance = SystemRandom()
    while True:
        shuffled = chance.sample(members, len(members))
        turns = [shuffled[k:] + shuffled[:k] for k in range(len(shuffled))]
        chance.shuffle(turns)
        yield from turns
