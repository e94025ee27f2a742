"""The bubblewrap sandbox for plain `harbor run`, on machines without a container engine.

    harbor run -p DIR -a AGENT -m MODEL -e metakernelbench.attempts.sandbox.standalone:StandaloneEnvironment

Besides what a sandbox of an attempt has, Harbor's verifier finds /tests and its `oracle` agent /solution here. The
tasks of `mkb export harbor` grade in place, inside: an attempt that `mkb run` makes never has these folders.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

from metakernelbench.attempts.sandbox.bubblewrap import BubblewrapEnvironment
from metakernelbench.attempts.sandbox.command import slot_uid

_FOLDERS = ("tests", "solution")


class StandaloneEnvironment(BubblewrapEnvironment):
    """One sandbox of a Harbor trial; its slot follows from the trial's name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"slot": zlib.crc32(str(kwargs.get("session_id")).encode()), **kwargs})

    @staticmethod
    def type() -> str:
        return "bubblewrap-standalone"

    def _populate(self, state: Path) -> None:
        super()._populate(state)
        uid = slot_uid(self.slot)
        for name in _FOLDERS:
            (state / name).mkdir(mode=0o700)
            if uid is not None:
                os.chown(state / name, uid, uid)

    def _launch(self, state: Path, fd: int) -> list[str]:
        command = super()._launch(state, fd)
        end = command.index("--remount-ro")
        binds = [part for name in _FOLDERS for part in ("--bind", str(state / name), f"/{name}")]
        return [*command[:end], *binds, *command[end:]]
