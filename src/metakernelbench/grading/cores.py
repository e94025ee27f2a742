"""Which cores of this machine are calm, and who runs where while something is timed on a GPU.

Calls of a tenth of a millisecond are made of work on the host, and how fast a core does that work depends on who uses
the other half of it, which on a shared machine may be somebody else. So cores are tried with a loop that is always the
same, and verifier, workers and control are each given one of the calmest for themselves; right before its call, each
one's is tried again. No time that counts is looked at. Measured on the host of an H200, on 32 cores: in 10 µs the loop
turns 100 to 110 times or 55 to 75 times, and in 50 ms one core in three changes from one to the other. On a CPU, where
implementations use many threads, nothing of this is done.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

_TRIAL_NS = 200_000
_CALM = 0.8
"""A core is calm if its pace is at least this share of the best that was seen."""
SETTLED_FOR = 5
"""After so many draws everyone is given a core anew, so that no side has the best one throughout."""
_MOST_TRIED = 16
_NEEDED_PER_PROCESS = 2
"""How many cores there must be for each process that gets one, for a choice to be one."""
_SIBLINGS = Path("/sys/devices/system/cpu")
_clock = time.perf_counter_ns


def pace(nanoseconds: int) -> float:
    """How often a small loop turns in a millisecond on the core that this process runs on."""
    start, turns = _clock(), 0
    while (now := _clock()) - start < nanoseconds:
        turns += 1
    return 1e6 * turns / (now - start)


class CalmCores:
    """Gives cores to processes, and takes them away in the end."""

    def __init__(self, allowed: Iterable[int] | None = None) -> None:
        self._allowed = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
        self._halves = sorted({siblings(core) & self._allowed for core in self._allowed}, key=min)
        self._settled: dict[int, frozenset[int]] = {}
        self.paces: dict[int, float] = {}
        """What each core that was tried last gave, by its number."""
        self._best = 0.0

    def settle(self, pids: Sequence[int]) -> None:
        """Try the cores, and give one of the calmest to each of these processes (0 is this one), which one by chance.
        Leaves them as they are where there are too few."""
        if len(self._halves) < _NEEDED_PER_PROCESS * len(pids):
            return
        tried = random.sample(self._halves, min(_MOST_TRIED, len(self._halves)))
        self.paces = {}
        for halves in tried:
            self._try(halves)
        calmest = sorted(tried, key=lambda halves: self.paces[min(halves)], reverse=True)[: len(pids)]
        random.shuffle(calmest)
        for pid, halves in zip(pids, calmest, strict=True):
            self._give(pid, halves)

    def look_after(self, pid: int | None) -> None:
        """Right before its call: where the core of this process has slowed down, give it one that is calm and that
        nobody has, or else the calmest of those. Nothing for one that was given none."""
        if pid is None or pid not in self._settled:
            return
        if not self._is_calm(self._settled[pid]):
            free = [halves for halves in self._halves if halves not in self._settled.values()]
            tried = random.sample(free, min(_MOST_TRIED, len(free)))
            calm = next(filter(self._is_calm, tried), None)
            self._give(pid, calm or max([*tried, self._settled[pid]], key=lambda halves: self.paces[min(halves)]))
        self._give(0, self._settled[0])

    def release(self) -> None:
        """Let all processes run anywhere again."""
        for pid in list(self._settled):
            self._give(pid, self._allowed)
        self._settled = {}

    def _is_calm(self, halves: frozenset[int]) -> bool:
        return self._try(halves) >= _CALM * self._best

    def _try(self, halves: frozenset[int]) -> float:
        """Go to a core and learn its pace."""
        core = min(halves)
        os.sched_setaffinity(0, {core})
        self.paces[core] = found = pace(_TRIAL_NS)
        self._best = max(self._best, found)
        return found

    def _give(self, pid: int, cores: frozenset[int]) -> None:
        with contextlib.suppress(OSError):  # it ended, or belongs to somebody else
            os.sched_setaffinity(pid, cores)
            self._settled[pid] = cores


def siblings(core: int) -> frozenset[int]:
    """The numbers under which the system knows the halves of a core, this one among them."""
    try:
        text = (_SIBLINGS / f"cpu{core}/topology/thread_siblings_list").read_text()
    except OSError:
        return frozenset({core})
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
