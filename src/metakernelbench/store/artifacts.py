"""Large texts, each in a file of its own that is named by the digest of what it holds.

    artifacts/ab/abcdef….gz     (`zcat` shows it)

A file appears whole or not at all: it is written under another name, synced, and renamed. Equal texts share one file,
and no file is ever changed, so that several runners need no agreement.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from metakernelbench.errors import StoreError
from metakernelbench.files import why_unread


def digest_of(text: str) -> str:
    """SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(_encoded(text)).hexdigest()


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


class Artifacts:
    """A folder of texts addressed by their content."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, text: str) -> str:
        """Keep a text; returns the digest to find it by. It is on the disk when this returns."""
        batch = self.batch()
        digest = batch.put(text)
        batch.keep()
        return digest

    def batch(self) -> Batch:
        """Texts to be kept together."""
        return Batch(self)

    def get(self, digest: str) -> str:
        """The text with this digest. Raises `StoreError` where it is missing or damaged."""
        path = self.path(digest)
        try:
            text = gzip.decompress(path.read_bytes()).decode("utf-8", "surrogatepass")
        except (OSError, EOFError, ValueError) as error:
            raise StoreError(f"the artifact {path} cannot be read: {why_unread(error, path)}", hint=_RESTORE) from error
        if digest_of(text) != digest:
            raise StoreError(f"the artifact {path} does not hold what its name says", hint=_RESTORE)
        return text

    def path(self, digest: str) -> Path:
        """Where the text with this digest is, or would be."""
        return self.folder / digest[:2] / f"{digest}.gz"


class Batch:
    """Texts that are kept together, because waiting for the disk takes as long for many files as for one."""

    def __init__(self, artifacts: Artifacts) -> None:
        self._artifacts = artifacts
        self._new: dict[Path, bytes] = {}

    def put(self, text: str) -> str:
        """Keep a text once `keep` is called; returns the digest to find it by."""
        digest = digest_of(text)
        path = self._artifacts.path(digest)
        if path not in self._new and not path.exists():
            self._new[path] = gzip.compress(_encoded(text), compresslevel=6, mtime=0)
        return digest

    def keep(self) -> None:
        """Write everything; it is on the disk when this returns. Raises `StoreError`, and then nothing half written is
        left behind."""
        try:
            _write(self._new)
        except OSError as error:
            raise StoreError(
                f"cannot write to {self._artifacts.folder}: {error.strerror}",
                hint="make room or check permissions; run again",
            ) from error
        self._new.clear()


def _write(files: Mapping[Path, bytes]) -> None:
    """First all files under other names, then the wait for the disk, then all names: most of the waiting is in the
    first of each."""
    unfinished = {path: path.with_name(f"{path.name}.{uuid.uuid4().hex}.unfinished") for path in files}
    try:
        with ExitStack() as opened:
            written = [opened.enter_context(_written(unfinished[path], data)) for path, data in files.items()]
            for file in written:
                os.fsync(file.fileno())
        for path in files:
            unfinished[path].replace(path)
    except BaseException:
        for path in unfinished.values():
            path.unlink(missing_ok=True)
        raise
    for folder in {path.parent for path in files}:
        _sync_folder(folder)


def _written(path: Path, data: bytes) -> IO[bytes]:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("xb")
    file.write(data)
    file.flush()
    return file


_RESTORE = "bring the artifacts folder back from a copy: the database and this folder belong together"


def _sync_folder(folder: Path) -> None:
    """Make the rename itself last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
