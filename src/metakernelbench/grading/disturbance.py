"""Whether a call was disturbed, asked of the operating system's scheduler and never of a time that was measured.

A call whose process was ready to run and had no processor for a while took less time than it seems. The draw is then
made again, by all sides, on other inputs: the rule knows nothing of what either side took.
"""

from __future__ import annotations

import os
from pathlib import Path

MOST_WAITED_MS = 1.0
"""A call that waited longer than this for a processor is disturbed: another process was given its place. Being woken
takes a few thousandths, on a busy machine some tenths."""
LONGEST_DRAW_S = 0.05
"""Draws that take longer are not made again: a wait is small beside them, and they cost."""
REPEATED_SHARE = 0.2
"""The most draws that are made again, as a share of the timed ones: a busy machine stays busy."""


def waited_ms(pid: int | None = None) -> float:
    """Milliseconds for which the main thread of a process (by default this one) has so far been ready to run without a
    processor; 0 where the system does not tell."""
    try:
        fields = Path(f"/proc/{os.getpid() if pid is None else pid}/schedstat").read_text().split()
    except OSError:
        return 0.0
    return int(fields[1]) / 1e6 if len(fields) > 1 else 0.0
