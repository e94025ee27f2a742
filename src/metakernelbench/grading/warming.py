"""Brings a processor up to speed right before a timed call on a GPU, whose calls are bound by what the host does.

A process that waited has a slow and cold core when it goes on: its clock was lowered, its caches were emptied. What is
timed then is how long the pause was. So verifier, worker and control all do the same small work, by the procedure of a
timed call, right before one: no inputs exist yet for a worker, and nothing of this is timed. On a CPU nobody does:
there the work is the call, and the processes may have to share two cores.
"""

from __future__ import annotations

import time

import torch

_clock = time.perf_counter_ns
_add = torch.Tensor.add_
_synchronize = torch.cuda.synchronize
_Event = torch.cuda.Event

WARMING_NS = 1_000_000
"""How long: a clock is up after a good part of a millisecond."""


class Warming:
    """The small work: a kernel of a few elements, between two events."""

    def __init__(self) -> None:
        self._scrap = torch.zeros(16, device="cuda")

    def run(self, nanoseconds: int) -> int:
        """Work for this long; how often the work was done."""
        end, turns = _clock() + nanoseconds, 0
        while _clock() < end:
            turns += 1
            begin, finish = (_Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            _synchronize()
            begin.record()
            _add(self._scrap, 1)
            _synchronize()
            finish.record()
            finish.synchronize()
        return turns
