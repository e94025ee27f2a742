"""Everything the command line prints goes through here: data to stdout, the rest to stderr, hostile text made harmless.

`stdout` (for what was asked for) and `stderr` (for progress, warnings and errors) are Rich consoles, made on first use:
importing Rich takes as long as everything else that `mkb --help` does.
"""

from __future__ import annotations

import json
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any

from metakernelbench.errors import InfrastructureFault, MkbError
from metakernelbench.text import harmless

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

    return Console(stderr=name == "stderr", highlight=False)


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
