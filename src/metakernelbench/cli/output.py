"""Everything the command line prints goes through here: data to stdout, the rest to stderr, hostile text made harmless.

`stdout` (for what was asked for) and `stderr` (for progress, warnings and errors) are Rich consoles, made on first use:
importing Rich takes as long as everything else that `mkb --help` does.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any, TextIO, cast

from metakernelbench.errors import InfrastructureFault, MkbError
from metakernelbench.text import harmless

_NARROWEST = 80
"""Columns that are printed on at least: in fewer, tables lose what they are about."""

if TYPE_CHECKING:
    from rich.console import Console

    stdout: Console
    stderr: Console


def __getattr__(name: str) -> Any:
    if name in ("stdout", "stderr"):
        return _console(name)
    raise AttributeError(name)


@cache
def _console(name: str) -> Console:
    from rich.console import Console

    console = Console(stderr=name == "stderr", highlight=False)
    console.width = max(console.width, _NARROWEST)
    return console


class CannotPrint(MkbError):
    """Standard output refuses what is written to it."""


class _Checked:
    """Standard output, whose refusals are told from those of any other file: neither names what it is about."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.refused: CannotPrint | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._refusals():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._refusals():
            self._stream.flush()

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:  # whoever read it has read enough: Rich and Typer know what to do
            raise
        except OSError as error:
            self.refused = CannotPrint(f"cannot write to standard output: {error.strerror}")
            raise self.refused from error

    def finish(self) -> None:
        """Raise what was refused, whoever has caught it meanwhile."""
        with suppress(CannotPrint):
            self.flush()
        if self.refused is not None:
            with suppress(OSError):  # what is buffered has to go somewhere, or Python complains of it when it ends
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            raise self.refused


@contextmanager
def checked_stdout() -> Iterator[None]:
    """Raises `CannotPrint` as soon as standard output refuses something, and at the latest at the end."""
    checked = _Checked(sys.stdout)
    with redirect_stdout(cast(TextIO, checked)):
        try:
            yield
        finally:
            checked.finish()


class ExitCode(IntEnum):
    """What `mkb` leaves with. 130 is an interruption, as in every shell."""

    OK = 0
    FAILED = 1
    USAGE = 2
    INFRASTRUCTURE = 3
    INTERRUPTED = 130


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    _console("stdout").print(
        json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False), markup=False, soft_wrap=True
    )


def warn(text: str) -> None:
    """Say on stderr what should be known and ends nothing."""
    _console("stderr").print(harmless(text), markup=False, style="yellow", soft_wrap=True)


def report_error(error: MkbError, *, as_json: bool) -> ExitCode:
    """Print an error with its hint, as text on stderr or as JSON on stdout, and return the exit code it deserves."""
    code = ExitCode.INFRASTRUCTURE if isinstance(error, InfrastructureFault) else ExitCode.USAGE
    if as_json:
        print_json({"error": {"kind": error.kind, "message": error.message, "hint": error.hint}})
        return code
    stderr = _console("stderr")
    stderr.print(f"[bold red]error:[/] {_escape(error.message)}", soft_wrap=True)
    if error.hint:
        stderr.print(f"\n[bold]hint:[/] {_escape(error.hint)}", soft_wrap=True)
    return code


def _escape(text: str) -> str:
    return harmless(text).replace("[", r"\[")
