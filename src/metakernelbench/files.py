"""Files that a user names: written whole or not at all, read only so far, and what is refused said in a sentence."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from metakernelbench.errors import UserError

_MOST = 1_000_000
"""Characters of a file that people write by hand."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_STATES = (*_NO_ROOM, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)
"""What the machine refuses, whatever the program does."""


def read_text(path: Path, *, most: int = _MOST) -> str:
    """A regular file's text. Raises `OSError` also for what never ends or never begins: a device, a pipe, a file of
    more than `most` characters."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    with path.open(encoding="utf-8") as file:
        return read_all(file, most=most)


def read_all(file: TextIO, *, most: int = _MOST) -> str:
    """What an open file holds. Raises `OSError` for more than `most` characters."""
    text = file.read(most + 1)
    if len(text) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} characters", file.name)
    return text


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, or replace one. A failure leaves what was there; its `OSError` names `path`."""
    path = path.resolve()  # of a link, what it points to is replaced
    if path.exists() and not path.is_file():  # a pipe or a terminal, which cannot be replaced, or a folder
        path.write_bytes(data)
        return
    unfinished = path.with_name(f".mkb-{uuid.uuid4().hex}.unfinished")
    try:
        unfinished.write_bytes(data)
        if path.exists():
            shutil.copymode(path, unfinished)
        unfinished.replace(path)
    except BaseException as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def why_unread(error: Exception, path: Path) -> str:
    """Why `path`, which the sentence around names, could not be read: without a number, and without its name again."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    other = error.filename is not None and str(error.filename) != str(path)
    return f"{error.filename}: {error.strerror}" if other else error.strerror


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """A folder's name to write under; what it then holds takes the place of all that is in `folder`. A failure leaves
    what was there; its `OSError` names `folder`."""
    is_new = not folder.exists()
    unfinished = folder / f".mkb-{uuid.uuid4().hex}.unfinished"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield unfinished
        for old in set(folder.iterdir()) - {unfinished}:
            _remove(old)
        for made in unfinished.iterdir():
            made.rename(folder / made.name)
        unfinished.rmdir()
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if is_new:
            with suppress(OSError):
                folder.rmdir()
        if isinstance(error, OSError):
            raise OSError(error.errno, _why(error), str(folder)) from error
        raise


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextmanager
def writing(target: Path, *, hint: str) -> Iterator[None]:
    """Turn a refusal to write to `target`, or to something in it, into a `UserError`."""
    try:
        yield
    except OSError as error:
        raise refusal(error, target, hint=hint) from error


def refusal(error: OSError, target: Path | None = None, *, hint: str | None = None) -> UserError:
    """What could not be written, why, and what to do."""
    place, why = error.filename or target, _why(error)
    if error.errno in _NO_ROOM or why == os.strerror(errno.ENOSPC):
        hint = f"make room there{', or ' + hint if hint else ''}"
    said = "a file cannot be written" if place is None else f"cannot write {place}"
    return UserError(f"{said}: {why}", hint=hint)


def _why(error: OSError) -> str:
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list):  # all that a copy of a folder could not do
        _, _, why = error.args[0][0]
        return str(why).partition("] ")[2].partition(": ")[0] or str(why)
    return error.strerror or str(error)


def is_state_of_the_machine(error: OSError) -> bool:
    """Whether it is the disk, or who may write to it, and no mistake of ours."""
    return error.errno in _STATES
