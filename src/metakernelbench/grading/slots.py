"""Numbers that no other process of this machine has, for as long as this one lives: a lock file stands for each.

User ids are made of them. Every verifier has one for its workers, so that what one grades can neither reach nor use up
the limits of what another grades; every sandbox of an attempt has one, whichever runner started it.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from metakernelbench.errors import InfrastructureFault

SLOTS = 256
_FIRST_UID = 30001


def is_workers_uid(uid: int) -> bool:
    """Whether some verifier of this machine may have given its workers this user id."""
    return _FIRST_UID <= uid < _FIRST_UID + SLOTS


def worker_uid() -> int:
    """The user id of this process's workers, where it is root."""
    return _FIRST_UID + own_number("slot")


@cache
def own_number(kind: str, index: int = 0) -> int:
    """A number below `SLOTS` that only this process has, of this kind; another for another index. Raises
    `InfrastructureFault` where all are taken."""
    for number in range(SLOTS):
        path = Path(tempfile.gettempdir()) / f"metakernelbench-{kind}-{number}.lock"
        with suppress(OSError):  # somebody else's file: not ours to use
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                continue
            return number
    raise InfrastructureFault(f"all {SLOTS} user ids of this kind ({kind}, {index}) are taken on this machine")
