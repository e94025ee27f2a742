"""Whether something runs on the GPU when nothing should.

Processes share a GPU in slices of time, and work that a submission leaves there between its calls takes no processor
time that could be seen. It slows down the other side: the reference, and the control. So after each of its calls the
verifier runs a small kernel of known length, which has to wait for its slice where the GPU is not idle.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median

import torch

_CYCLES = 100_000
"""Some 60 µs."""
_ALONE = 15
_FACTOR = 3.0
_LEAST_MS = 0.2
"""How much longer the kernel must take, at the median, before something else was there: honest gradings lie far below,
since the kernel is short, and a slice of time is a millisecond or more."""


@dataclass
class Contention:
    """The small kernel's times on one device, in milliseconds; always empty on a CPU."""

    device: str
    alone_ms: list[float] = field(default_factory=list[float])
    between_ms: list[float] = field(default_factory=list[float])

    def look_alone(self) -> None:
        """Measure what the kernel takes before anything of the submission runs."""
        if self.device != "cpu":
            self.alone_ms = [_small_kernel_ms() for _ in range(_ALONE)][_ALONE // 3 :]

    def look(self) -> None:
        """Measure it after a call of the submission's."""
        if self.device != "cpu":
            self.between_ms.append(_small_kernel_ms())

    @property
    def excessive(self) -> bool:
        """Whether the GPU was in use after most calls."""
        if not self.alone_ms or not self.between_ms:
            return False
        return median(self.between_ms) > max(_FACTOR * median(self.alone_ms), median(self.alone_ms) + _LEAST_MS)

    def told(self) -> str:
        """What was seen, for a finding."""
        between, alone = median(self.between_ms), median(self.alone_ms)
        return f"A small kernel takes {between:.2f} ms after its calls, and {alone:.2f} ms on an idle GPU"


def _small_kernel_ms() -> float:
    """On the verifier's clock: events would not show the wait for a slice."""
    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    torch.cuda._sleep(_CYCLES)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    return (time.perf_counter_ns() - start) / 1e6
