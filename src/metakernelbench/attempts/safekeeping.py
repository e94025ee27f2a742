"""What an attempt has come to, kept in its folder until its record is in the store.

A judge that is lost for longer than its tries, a store that cannot be written to, or a kill then costs a grading or
nothing, and not the agent's work: the next try, also that of a later run, goes on from here.
"""

from __future__ import annotations

import base64
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from metakernelbench.attempts.record import AttemptRecord
from metakernelbench.files import write_whole

_FILE = "kept.json"


class Kept(BaseModel):
    """A record, and what its final verdict is given on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    record: AttemptRecord
    kernel: str | None
    """The bytes of kernel.py, which may be no text at all, in base64; None where there was none."""

    @property
    def source(self) -> bytes | None:
        """The final kernel.py."""
        return None if self.kernel is None else base64.b64decode(self.kernel)

    @property
    def complete(self) -> bool:
        """Whether nothing is left to do."""
        return self.kernel is None or self.record.final is not None


def keep(folder: Path, record: AttemptRecord, source: bytes | None) -> Kept:
    """Write it down, whole or not at all. A disk that is full is no reason to stop: what is kept here is a spare."""
    kept = Kept(record=record, kernel=None if source is None else base64.b64encode(source).decode())
    with suppress(OSError):
        write_whole(folder / _FILE, kept.model_dump_json().encode())
    return kept


def found(folder: Path, fingerprint: str) -> Kept | None:
    """What an earlier try of the same attempt, by its fingerprint, has left; None where there is nothing of use."""
    try:
        kept = Kept.model_validate_json((folder / _FILE).read_bytes())
    except (OSError, ValidationError):
        return None
    return kept if kept.record.fingerprint == fingerprint else None
