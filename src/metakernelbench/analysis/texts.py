"""What the attempts of an experiment have read and written, as one Parquet file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from metakernelbench.analysis.frames import write_frame

if TYPE_CHECKING:
    from metakernelbench.store.store import Store

_SCHEMA = dict.fromkeys(("key", "instruction", "kernel", "skill"), pl.String)


def write_texts(store: Store, name: str, path: Path) -> Path:
    """Instruction as sent, final kernel and skill of every finished attempt, by key. Half characters are replaced: a
    Parquet file holds UTF-8."""
    rows = [
        {
            "key": key,
            "instruction": _utf8(record.instruction),
            "kernel": _utf8(record.kernel),
            "skill": _utf8(record.skill),
        }
        for key, record in store.attempts(name)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_frame(pl.DataFrame(rows, schema=_SCHEMA), path)
    return path


def _utf8(text: str | None) -> str | None:
    return None if text is None else text.encode("utf-8", "replace").decode()
