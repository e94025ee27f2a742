"""Small tools of the verifier for processes: what they print, what memory they hold, how they ended."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

_TAIL_BYTES = 4096
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def shared_environment() -> dict[str, str]:
    """Environment of verifier and worker alike, so that both sides of a speedup run under the same conditions. Threads
    are limited here and not by calls to torch, which would start some: a process with threads forks badly."""
    return {
        "OMP_NUM_THREADS": str(cores()),
        "OMP_WAIT_POLICY": "passive",  # idle threads must not spin while the other side is being timed
        "OPENBLAS_NUM_THREADS": "1",
        "TORCH_DISABLE_NATIVE_JIT": "1",  # torch's own CuTe DSL and Triton kernels would differ between DSLs
    }


class Drain:
    """Reads a pipe to its end in a thread; keeps the last few kilobytes and the count."""

    def __init__(self, descriptor: int) -> None:
        self._tail = b""
        self.total = 0
        self._thread = threading.Thread(target=self._run, args=(descriptor,), daemon=True)
        self._thread.start()

    def _run(self, descriptor: int) -> None:
        with os.fdopen(descriptor, "rb", buffering=0) as pipe:
            while data := pipe.read(65_536):
                self.total += len(data)
                self._tail = (self._tail + data)[-_TAIL_BYTES:]

    def text(self, patience_s: float = 0.3) -> str:
        """The last lines printed, once the pipe has ended or after a little patience."""
        self._thread.join(patience_s)
        return self._tail.decode("utf-8", errors="replace")


def ending(status: dict[str, object]) -> str:
    """How a process ended, in words, from a status that it may itself have forged."""
    if isinstance(number := status.get("signal"), int) and number in set(signal.Signals):
        return f"it was ended by {signal.Signals(number).name}"
    if isinstance(code := status.get("exit"), int):
        return f"it left with exit code {code}"
    return ""


def below(roots: Sequence[int]) -> list[int]:
    """These processes and all their descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            children.setdefault(_parent(int(folder.name)), []).append(int(folder.name))
    found, waiting = [], list(dict.fromkeys(roots))
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children.get(pid, [])
    return found


def memory_below(roots: Sequence[int]) -> int:
    """Bytes of memory that these processes and all their descendants hold; what is shared is counted in shares, files
    that they map are not counted."""
    return sum(map(_memory, below(roots)))


def seconds_run(roots: Sequence[int]) -> float:
    """Seconds for which these processes and all their descendants have run so far, those included that ended and were
    waited for. Cheap enough to be asked between two calls."""
    total, waiting, seen = 0.0, list(roots), set[int]()
    while waiting:
        pid = waiting.pop()
        if pid not in seen:
            seen.add(pid)
            total += _seconds_run(pid)
            waiting += _children(pid)
    return total


def _seconds_run(pid: int) -> float:
    """Of one process: itself and its children that it waited for, in user and in kernel mode. Only the children's time
    is read in ticks of 10 ms, within which a thread can work and hide."""
    times = _status_fields(pid)[11:15]
    own, waited_for = (sum(map(int, pair)) / _TICKS_A_SECOND for pair in (times[:2], times[2:]))
    with contextlib.suppress(OSError):  # it ended meanwhile, or the kernel keeps no such clock
        own = time.clock_gettime(_processor_clock(pid))
    return own + waited_for


def _processor_clock(pid: int) -> int:
    """The clock of another process's processor time, as clock_getcpuclockid(3) makes it: in nanoseconds, all threads
    included, also those that ended."""
    return ~pid << 3 | 2


def _children(pid: int) -> list[int]:
    found: list[int] = []
    tasks = Path(f"/proc/{pid}/task")
    with contextlib.suppress(OSError):  # the process ended meanwhile
        for thread in os.listdir(tasks):  # noqa: PTH208 (the names, not a path each)
            with contextlib.suppress(OSError):  # or the thread
                found += map(int, (tasks / thread / "children").read_text().split())
    return found


def _parent(pid: int) -> int:
    """0 for a process that ended meanwhile."""
    return int((_status_fields(pid) or ["", "0"])[1])


def _status_fields(pid: int) -> list[str]:
    """What the kernel says of a process, from its state on; empty where it ended meanwhile. The name before that is
    whatever bytes the process chose."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _memory(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith(("Pss_Anon", "Pss_Shmem")))
