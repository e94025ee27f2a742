"""One grading at a time on a device, across all processes of this machine: two would disturb each other's clocks."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from metakernelbench.errors import InfrastructureFault


@contextmanager
def device_lock(device: str, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the device. `waiting` is called once if another grading has it. A process that dies lets go."""
    path = Path(tempfile.gettempdir()) / f"metakernelbench-{_identity(device)}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise InfrastructureFault(f"the lock file {path} cannot be opened: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _identity(device: str) -> str:
    """The device's name in the lock file: the GPU that CUDA would use first, or the CPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    return "cpu" if device == "cpu" else f"cuda-{''.join(c for c in visible if c.isalnum() or c == '-')}"
